"""Weights in groups with zero points in C, against the torch reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.linear import add_linear
from kernels.cpu.ops import Dtype, Epilogue
from kernels.cpu.pack import pack_quantized
from kernels.cpu.program import Program
from kernels.cpu.rows import add_quantize, quantized_bytes
from kernels.grouped_weight import GroupedWeight, dequantized_linear, make_grouped
from kernels.quantized_linear import QuantizedWeight, quantize_rows, quantized_linear
from tests.kernels.cpu.conftest import Machine
from tests.kernels.cpu.test_quantized_linear import ROWS, multiply

SIZES = [(16, 32, 32), (17, 64, 64), (33, 100, 100), (100, 256, 128), (64, 896, 128), (80, 4864, 4864), (8, 2, 2)]


def make_weight(out: int, width: int, group: int, *, is_symmetric: bool = False) -> GroupedWeight:
    """Random numbers, scales and zero points; extremes of both among them."""
    groups = -(-width // group)
    numbers, zeros = (torch.randint(0, 16, shape, dtype=torch.uint8) for shape in ((out, width), (out, groups)))
    zeros[0], zeros[-1] = 15, 0
    return make_grouped(numbers, torch.rand(out, groups) / 10, None if is_symmetric else zeros, group)


@pytest.mark.parametrize(("out", "width", "group"), SIZES)
def test_dequantizes_by_the_formula(out: int, width: int, group: int) -> None:
    """Each number should be scale · (n − zero) of its own group."""
    weight = make_weight(out, width, group)
    assert weight.zeros is not None
    numbers, dense = weight.numbers(), weight.dequantize()
    for column in range(width):
        zeros, scales = weight.zeros[:, column // group].float(), weight.scales[:, column // group].float()
        assert torch.equal(dense[:, column], (numbers[:, column].float() - zeros) * scales)


@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize(("out", "width", "group"), SIZES)
def test_equals_the_reference(machine: Machine, out: int, width: int, group: int, is_symmetric: bool) -> None:
    """Every row count should give the reference's bits, with one, two and three threads."""
    weight = make_weight(out, width, group, is_symmetric=is_symmetric)
    packed, bias = pack_quantized(weight), torch.randn(out)
    assert packed.dtype == (Dtype.INT4 if is_symmetric else Dtype.INT4_ZEROS)
    for rows in ROWS:
        x = torch.randn(rows, width)
        expected = quantized_linear(x, weight.as_int4(), bias)
        for threads in (1, 2, 3):
            assert torch.equal(expected, multiply(machine, x, packed, bias=bias, threads=threads))


@pytest.mark.parametrize("rows", [1, 3, 7, 13])
def test_extremes_do_not_saturate(machine: Machine, rows: int) -> None:
    """Groups of 15 steps times ±127, whose products lie farthest from zero, should add up exactly."""
    numbers = torch.tensor([15, 0], dtype=torch.uint8).repeat(8)[:, None].expand(16, 256).contiguous()
    zeros = 15 - numbers[:, :8]
    weight = make_grouped(numbers, torch.ones(16, 8), zeros, 32)
    x = torch.tensor([1.0, -1.0]).repeat(7)[:rows, None].expand(rows, 256)
    expected = x[:, :1] * 256 * torch.tensor([15.0, -15.0]).repeat(8)
    torch.testing.assert_close(expected, multiply(machine, x, pack_quantized(weight)))


def test_adds_to_the_residual(machine: Machine) -> None:
    """ADD should add the product to what is there."""
    weight = make_weight(40, 128, 64)
    x, residual = torch.randn(9, 128), torch.randn(9, 40)
    expected = residual + quantized_linear(x, weight.as_int4())
    assert torch.equal(expected, multiply(machine, x, pack_quantized(weight), y=residual, epilogue=Epilogue.ADD))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 20])
def test_columns_in_another_order(machine: Machine, rows: int, dtype: torch.dtype) -> None:
    """Rows quantized in a weight's order should give what the floats give, as near as int8 is."""
    plain, order = make_weight(48, 200, 200), torch.randperm(200)
    weight = GroupedWeight(nibbles=plain.nibbles, scales=plain.scales, zeros=plain.zeros, group=200, order=order)
    assert torch.equal(weight.dequantize()[:, order], plain.dequantize())
    packed, x = pack_quantized(weight), torch.randn(rows, 200, dtype=dtype)
    values, scales = torch.zeros(rows, quantized_bytes(200), dtype=torch.int8), torch.zeros(rows)
    y = torch.full((rows, 48), torch.nan)

    def both(program: Program) -> None:
        add_quantize(program, x, 200, values, scales, order=packed.order)
        add_linear(program, values, packed, y, x_scales=scales)

    machine.run(both, rows, threads=2)
    assert torch.equal(quantize_rows(x[:, order])[0], values[:, :200])
    assert torch.equal(quantized_linear(x[:, order], weight.as_int4()), y)
    expected = dequantized_linear(x, weight)
    assert (y - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("rows", [1, 20])
def test_fp8_runs_as_int8(machine: Machine, rows: int) -> None:
    """A weight of fp8 should be as near its own floats as int8 of each output is."""
    values = torch.randn(48, 256).to(torch.float8_e4m3fn)
    weight, x = QuantizedWeight(values=values, scales=torch.rand(48) + 0.1), torch.randn(rows, 256)
    y: Tensor = multiply(machine, x, pack_quantized(weight))
    expected = dequantized_linear(x, weight)
    assert (y - expected).norm() < 0.02 * expected.norm()


def test_refuses_scales_beyond_float16() -> None:
    """A scale that float16 does not reach should be an error."""
    with pytest.raises(ValueError, match="finite"):
        make_grouped(torch.zeros(2, 4, dtype=torch.uint8), torch.full((2, 1), 1e6), None, 4)

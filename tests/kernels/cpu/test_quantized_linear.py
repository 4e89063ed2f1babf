"""Linears with int8 and int4 weights in C against the torch reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.cpu.linear import PackedWeight, add_linear, interleave
from kernels.cpu.ops import Epilogue
from kernels.cpu.pack import pack_quantized, unpack_quantized
from kernels.quantized_linear import (
    QuantizedWeight,
    exact_product,
    quantize_int4,
    quantize_int8,
    quantize_rows,
    quantized_linear,
)
from tests.kernels.cpu.conftest import Machine, quantized_rows

Quantize = Callable[[Tensor], QuantizedWeight]

SIZES = [(1, 1), (16, 4), (17, 63), (33, 100), (100, 33), (64, 896), (80, 4864)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 33, 100, 400]

both = pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])


def multiply(
    machine: Machine,
    x: Tensor,
    packed: PackedWeight,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    threads: int = 1,
) -> Tensor:
    values, scales = quantize_rows(x)
    rows = quantized_rows(values)
    out = torch.full((len(x), packed.out_features), torch.nan) if y is None else y
    machine.run(
        lambda program: add_linear(program, rows, packed, out, bias=bias, x_scales=scales, epilogue=epilogue),
        len(x),
        threads=threads,
    )
    return out


@both
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_packing_keeps_every_number(quantize: Quantize, out_features: int, in_features: int) -> None:
    """Unpacking should give back what was packed, at any size."""
    weight = quantize(torch.randn(out_features, in_features))
    unpacked = unpack_quantized(pack_quantized(weight))
    assert torch.equal(weight.values, unpacked.values)
    assert torch.equal(weight.scales, unpacked.scales)


@both
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_equals_the_reference(machine: Machine, quantize: Quantize, out_features: int, in_features: int) -> None:
    """Every row count should give the reference's bits, with one, two and three threads."""
    weight = quantize(torch.randn(out_features, in_features))
    packed, bias = pack_quantized(weight), torch.randn(out_features)
    for rows in ROWS:
        x = torch.randn(rows, in_features)
        expected = quantized_linear(x, weight, bias)
        for threads in (1, 2, 3):
            assert torch.equal(expected, multiply(machine, x, packed, bias=bias, threads=threads))


@pytest.mark.parametrize(("quantize", "error"), [(quantize_int8, 0.02), (quantize_int4, 0.12)])
def test_is_near_the_float_product(quantize: Quantize, error: float) -> None:
    """The quantized product should be as near the exact one as the weights' bits allow."""
    x, weight = torch.randn(8, 512), torch.randn(64, 512)
    expected = x @ weight.T
    assert (quantized_linear(x, quantize(weight)) - expected).norm() < error * expected.norm()


@both
def test_dequantized_weight_is_near(quantize: Quantize) -> None:
    """No weight should be off by more than a step of its scale (int4's largest positive numbers: −8 … 7 steps)."""
    weight = torch.randn(10, 100)
    quantized = quantize(weight)
    scales = quantized.scales.float().reshape(10, -1).abs().amax(dim=1, keepdim=True)
    assert bool(((quantized.dequantize() - weight).abs() <= 1.01 * scales).all())


@both
def test_a_row_does_not_depend_on_its_batch(machine: Machine, quantize: Quantize) -> None:
    """A row alone should equal the same row among any number of others."""
    packed = pack_quantized(quantize(torch.randn(48, 200)))
    x = torch.randn(40, 200)
    whole = multiply(machine, x, packed)
    for rows in range(1, 40):
        assert torch.equal(whole[-rows:], multiply(machine, x[-rows:], packed, threads=2))


@both
def test_adds_to_the_residual(machine: Machine, quantize: Quantize) -> None:
    """ADD should add the product to what is there."""
    weight = quantize(torch.randn(40, 100))
    x, residual = torch.randn(9, 100), torch.randn(9, 40)
    expected = residual + quantized_linear(x, weight)
    assert torch.equal(expected, multiply(machine, x, pack_quantized(weight), y=residual, epilogue=Epilogue.ADD))


@both
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(machine: Machine, quantize: Quantize, rows: int, dtype: torch.dtype) -> None:
    """SILU_MUL should give silu(gate) · up of interleaved halves, in the output's dtype."""
    gate, up = quantize(torch.randn(40, 100) / 10), quantize(torch.randn(40, 100) / 10)
    interleaved = QuantizedWeight(
        values=interleave(gate.values, up.values),
        scales=interleave(gate.scales, up.scales),
    )
    packed = pack_quantized(interleaved)
    x = torch.randn(rows, 100)
    y = torch.full((rows, 48), torch.nan, dtype=dtype)
    multiply(machine, x, packed, y=y, epilogue=Epilogue.SILU_MUL, threads=2)
    expected = torch.nn.functional.silu(quantized_linear(x, gate)) * quantized_linear(x, up)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(expected.to(dtype), y[:, :40], rtol=tolerance, atol=tolerance)
    assert not bool(y[:, 40:].any())


@both
def test_extremes_do_not_saturate(machine: Machine, quantize: Quantize) -> None:
    """Rows of ±127 times ±127 (−8) should add up exactly over a long `in`, and rows of zeros give the bias."""
    signs = torch.tensor([1.0, -1.0])
    x = torch.stack((*(sign * torch.ones(8192) for sign in signs), torch.zeros(8192)))
    weight = quantize(signs.repeat(8)[:, None].expand(16, 8192).contiguous())
    bias = torch.arange(16.0)
    expected = quantized_linear(x, weight, bias)
    actual = multiply(machine, x, pack_quantized(weight), bias=bias)
    assert torch.equal(expected, actual)
    torch.testing.assert_close(actual[0], 8192 * signs.repeat(8) + bias)
    assert torch.equal(bias, actual[2])


@pytest.mark.parametrize("rows", [1, 3, 6, 7])
def test_extremes_of_int4_do_not_saturate(machine: Machine, rows: int) -> None:
    """Groups of −8 or 7 times ±127, whose products lie farthest from zero, should add up exactly."""
    values = torch.tensor([7, -8], dtype=torch.int8).repeat(8)[:, None].expand(16, 256).contiguous()
    weight = QuantizedWeight(values=values, scales=torch.ones(16, 8, dtype=torch.float16))
    x = torch.tensor([1.0, -1.0]).repeat(4)[:rows, None].expand(rows, 256)
    expected = x[:, :1] * 256 * values[:, 0]
    torch.testing.assert_close(expected, multiply(machine, x, pack_quantized(weight)))


@both
def test_zero_weights_give_zero(machine: Machine, quantize: Quantize) -> None:
    """A weight of zeros has no scale, and its product should be 0."""
    packed = pack_quantized(quantize(torch.zeros(20, 70)))
    assert torch.equal(torch.zeros(2, 20), multiply(machine, torch.randn(2, 70), packed))


@both
def test_a_broken_row_stays_alone(machine: Machine, quantize: Quantize) -> None:
    """A row that holds a NaN or an infinity should give NaN, and its neighbours what they give without it."""
    weight = quantize(torch.randn(32, 64))
    x = torch.randn(3, 64)
    x[0, 5], x[2, 7] = torch.nan, torch.inf
    y = multiply(machine, x, pack_quantized(weight))
    assert bool(y[0].isnan().all())
    assert bool(y[2].isnan().all())
    assert torch.equal(quantized_linear(x[1:2], weight), y[1:2])


@both
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_refuses_a_weight_that_is_not_finite(quantize: Quantize, bad: float) -> None:
    """A NaN or an infinity in a weight should be an error, not a scale."""
    weight = torch.ones(2, 8)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="NaN"):
        quantize(weight)


@pytest.mark.parametrize("fill", [127, -127, None])
def test_products_of_integers_are_exact(fill: int | None) -> None:
    """The product in parts, for machines whose own int8 product isn't exact, should be that of integers."""
    shape = (3, 5000)
    x = torch.randint(-127, 128, shape, dtype=torch.int8) if fill is None else torch.full(shape, fill, dtype=torch.int8)
    w = torch.full((2, 5000), 127, dtype=torch.int8)
    assert torch.equal(x.long() @ w.long().T, exact_product(x, w).long())


def test_refuses_rows_of_another_width() -> None:
    """Rows that don't fit the weight should be an error."""
    with pytest.raises(ValueError, match="takes"):
        quantized_linear(torch.randn(2, 7), quantize_int8(torch.randn(4, 8)))

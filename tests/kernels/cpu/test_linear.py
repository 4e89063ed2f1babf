"""Linears with float32 and bfloat16 weights in C."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.linear import PackedWeight, add_linear, interleave, pack_float
from kernels.cpu.ops import Epilogue
from kernels.cpu.pack import pack_quantized
from kernels.quantized_linear import quantize_int4, quantize_int8, quantize_rows
from tests.kernels.cpu.conftest import Machine, quantized_rows
from tests.kernels.cpu.guarded import GuardedTensor

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (16, 32), (17, 63), (33, 96), (100, 34), (64, 896), (80, 4864), (7, 32)]
ROWS = [1, 2, 5, 6, 7, 16, 17, 32, 33, 97, 193, 1100]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-4}
"""Of sums in float32 against sums in float64; bfloat16 products are exact, their sums rounded oftener."""

GATES = {Epilogue.SILU_MUL: F.silu, Epilogue.GELU_MUL: partial(F.gelu, approximate="tanh")}

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def multiply(
    machine: Machine,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    y: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    threads: int = 1,
) -> Tensor:
    """x · Wᵀ + bias; x is copied into rows with padding, as steps' buffers have it."""
    packed = pack_float(weight)
    rows = F.pad(x, (0, -x.shape[1] % 32))
    out = torch.full((len(x), packed.out_features), torch.nan) if y is None else y
    machine.run(
        lambda program: add_linear(program, rows, packed, out, bias=bias, epilogue=epilogue), len(x), threads=threads
    )
    return out


@dtypes
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
def test_is_near_the_product(machine: Machine, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    """Every row count should give the product."""
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features)
    x = torch.randn(max(ROWS), in_features).to(dtype)
    expected = (x.double() @ weight.double().T + bias).float()
    for rows in ROWS:
        y = multiply(machine, x[:rows], weight, bias=bias, threads=1 + rows % 3)
        tolerance = TOLERANCE[dtype] * in_features**0.5
        torch.testing.assert_close(expected[:rows], y, rtol=1e-5, atol=tolerance)


@dtypes
@pytest.mark.parametrize("in_features", [96, 100, 928])
def test_a_row_does_not_depend_on_its_batch(machine: Machine, dtype: torch.dtype, in_features: int) -> None:
    """A row alone should equal the same row among any number of others, at any place; products that are denormal,
    too, which some instructions take for zero."""
    weight, x = torch.randn(72, in_features), torch.randn(1100, in_features)
    weight[::3] *= 1e-19
    x[::5] *= 1e-19
    weight, x = weight.to(dtype), x.to(dtype)
    alone = torch.cat([multiply(machine, row, weight) for row in x[:70].split(1)])
    for rows in range(1, 71):
        for first in {0, 70 - rows}:
            y = multiply(machine, x[first : first + rows], weight, threads=1 + rows % 3)
            assert torch.equal(alone[first : first + rows], y)
    for rows in (128, 200, 513, 1100):
        assert torch.equal(alone, multiply(machine, x[:rows], weight, threads=2)[:70])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 32), (24, 64), (33, 96), (16, 448), (40, 1000)])
def test_stays_within_its_buffers(machine: Machine, kind: str, out_features: int, in_features: int) -> None:
    """Neither rows, weights nor outputs should be touched beyond their ends, which tile loads tell no sanitizer."""
    weight, values = torch.randn(out_features, in_features), torch.randn(70, in_features)
    packed, rows, scales = _operands(kind, weight, values)
    guarded_rows = GuardedTensor(rows)
    panels = GuardedTensor(packed.panels)
    for count in (1, 3, 16, 17, 33, 47, 70):
        x, y = guarded_rows.tensor[-count:], GuardedTensor(torch.zeros(count, out_features))
        expected = torch.empty(count, out_features)
        _run(machine, rows[-count:], packed, expected, scales[-count:])
        _run(machine, x, replace(packed, panels=panels.tensor), y.tensor, scales[-count:])
        assert torch.equal(expected, y.tensor)


def _operands(kind: str, weight: Tensor, x: Tensor) -> tuple[PackedWeight, Tensor, Tensor]:
    """The packed weight, rows without more padding than linears read, and their scales."""
    if kind in ("float32", "bfloat16"):
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        return pack_float(weight.to(dtype)), x.to(dtype), torch.empty(len(x))
    quantized = quantize_int8(weight) if kind == "int8" else quantize_int4(weight)
    values, scales = quantize_rows(x)
    return pack_quantized(quantized), quantized_rows(values), scales


def _run(machine: Machine, x: Tensor, packed: PackedWeight, y: Tensor, scales: Tensor) -> None:
    machine.run(lambda program: add_linear(program, x, packed, y, x_scales=scales.contiguous()), len(x), threads=2)


@dtypes
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_adds_to_the_residual(machine: Machine, dtype: torch.dtype, rows: int) -> None:
    """ADD should add the product to what is there."""
    x, weight, residual = torch.randn(rows, 96).to(dtype), torch.randn(40, 96).to(dtype), torch.randn(rows, 40)
    expected = residual + multiply(machine, x, weight)
    assert torch.equal(expected, multiply(machine, x, weight, y=residual, epilogue=Epilogue.ADD))


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 33, 150])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("epilogue", GATES)
def test_gates(machine: Machine, dtype: torch.dtype, rows: int, out_dtype: torch.dtype, epilogue: Epilogue) -> None:
    """A gate should give activation(gate) · up of interleaved halves, in the output's dtype."""
    gate, up = (torch.randn(40, 96).to(dtype) for _ in range(2))
    x = torch.randn(rows, 96).to(dtype)
    y = torch.full((rows, 48), torch.nan, dtype=out_dtype)
    bias = torch.randn(80)
    both = interleave(bias[:40], bias[40:])
    multiply(machine, x, interleave(gate, up), bias=both, y=y, epilogue=epilogue, threads=2)
    gated, upped = multiply(machine, x, gate, bias=bias[:40]), multiply(machine, x, up, bias=bias[40:])
    expected = GATES[epilogue](gated.double()).float() * upped
    tolerance = 2e-6 if out_dtype == torch.float32 else 8e-3
    torch.testing.assert_close(expected.to(out_dtype), y[:, :40], rtol=tolerance, atol=1e-6)
    assert not bool(y[:, 40:].any())


@pytest.mark.parametrize("epilogue", GATES)
def test_gates_keep_extremes(machine: Machine, epilogue: Epilogue) -> None:
    """The gate of a large number should be that number, of a large negative one 0, of NaN NaN."""
    z = torch.tensor([[90.0], [1e30], [-90.0], [-1e30], [torch.nan], [0.0]])
    weight = interleave(torch.ones(1, 1), torch.zeros(1, 1))
    bias = interleave(torch.zeros(1), torch.ones(1))
    y = torch.empty(6, 16)
    multiply(machine, z, weight, bias=bias, y=y, epilogue=epilogue)
    expected = torch.tensor([90.0, 1e30, 0, 0, torch.nan, 0])
    torch.testing.assert_close(expected, y[:, 0], rtol=1e-6, atol=1e-5, equal_nan=True)


@dtypes
def test_a_broken_row_stays_alone(machine: Machine, dtype: torch.dtype) -> None:
    """A row that holds a NaN should give NaN, and its neighbours what they give without it."""
    x, weight = torch.randn(40, 96).to(dtype), torch.randn(32, 96).to(dtype)
    expected = multiply(machine, x, weight)
    broken = x.clone()
    broken[7, 5] = torch.nan
    y = multiply(machine, broken, weight)
    assert bool(y[7].isnan().all())
    others = torch.arange(40) != 7
    assert torch.equal(expected[others], y[others])

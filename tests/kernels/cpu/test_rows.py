"""The C ops that work row by row: embedding, norm, quantizing, argmax."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.cpu.linear import PackedWeight, pack_float
from kernels.cpu.pack import pack_quantized
from kernels.cpu.program import Program
from kernels.cpu.rows import add_argmax, add_embed, add_gather, add_norm, add_quantize, quantized_bytes
from kernels.quantized_linear import quantize_int4, quantize_int8, quantize_rows
from kernels.rms_norm import rms_norm_reference
from tests.kernels.cpu.conftest import Machine, quantized_rows

WIDTHS = [1, 15, 16, 33, 63, 100, 896, 1025]
ROWS = [1, 2, 3, 9, 100]
EPS = 1e-6


def table_of(kind: str, weight: Tensor) -> tuple[PackedWeight, Tensor]:
    """The packed table, and what it stands for."""
    if kind == "float32":
        return pack_float(weight), weight
    if kind == "bfloat16":
        return pack_float(weight.bfloat16()), weight.bfloat16().float()
    quantized = quantize_int8(weight) if kind == "int8" else quantize_int4(weight)
    return pack_quantized(quantized), quantized.dequantize()


def norm(machine: Machine, x: Tensor, scale: Tensor, out: Tensor, *, threads: int = 1) -> Tensor:
    """The norm into `out`; returns the scales of quantized rows."""
    scales = torch.full((len(out),), torch.nan)
    machine.run(lambda program: add_norm(program, x, scale, out, EPS, out_scales=scales), len(x), threads=threads)
    return scales


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("hidden", WIDTHS)
def test_embeds_from_a_packed_table(machine: Machine, kind: str, hidden: int) -> None:
    """Every row should be its token's row of the table, dequantized, and nothing beyond be written."""
    packed, table = table_of(kind, torch.randn(50, hidden))
    for rows in ROWS:
        token_ids = torch.randint(0, 50, (rows,))
        out = torch.full((rows + 1, hidden), torch.nan)
        machine.run(lambda program, out=out: add_embed(program, packed, out), rows, threads=2, token_ids=token_ids)
        assert torch.equal(table[token_ids], out[:rows])
        assert bool(out[rows].isnan().all())


def test_scales_embeddings(machine: Machine) -> None:
    """Every row should be multiplied by the scale, and nothing beyond it."""
    packed, table = table_of("bfloat16", torch.randn(50, 100))
    token_ids, out = torch.randint(0, 50, (7,)), torch.full((8, 100), torch.nan)
    machine.run(lambda program: add_embed(program, packed, out, scale=9.75), 7, threads=2, token_ids=token_ids)
    assert torch.equal(table[token_ids] * 9.75, out[:7])
    assert bool(out[7].isnan().all())


@pytest.mark.parametrize("hidden", WIDTHS)
def test_norm_adds(machine: Machine, hidden: int) -> None:
    """A norm that is added should leave the sum of what was there and the norm, and nothing beyond."""
    x, scale, there = torch.randn(33, hidden), torch.randn(hidden), torch.randn(34, hidden)
    alone, out = torch.empty(33, hidden), there.clone()
    norm(machine, x, scale, alone)
    machine.run(lambda program: add_norm(program, x, scale, out, EPS, is_added=True), 33, threads=2)
    assert torch.equal(there[:33] + alone, out[:33])
    assert torch.equal(there[33], out[33])


@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_near_the_reference(machine: Machine, hidden: int, dtype: torch.dtype) -> None:
    """The norm of each row should be the formula's, rounded to nearest, and the padding 0."""
    x, scale = torch.randn(33, hidden), torch.randn(hidden)
    padded = -(-hidden // 64) * 64
    out = torch.full((33, padded + 64), torch.nan, dtype=dtype)
    norm(machine, x, scale, out)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    expected = rms_norm_reference(x, scale, EPS).to(dtype)
    torch.testing.assert_close(expected, out[:, :hidden], rtol=tolerance, atol=1e-6)
    lanes = 64 // dtype.itemsize
    assert not bool(out[:, hidden : -(-hidden // lanes) * lanes].any())


def test_norm_rounds_to_bfloat16_as_torch(machine: Machine) -> None:
    """A row in bfloat16 should be the float32 row rounded as torch rounds, ties to even."""
    x, scale = torch.randn(50, 896), torch.randn(896)
    wide, narrow = torch.empty(50, 896), torch.empty(50, 896, dtype=torch.bfloat16)
    norm(machine, x, scale, wide)
    norm(machine, x, scale, narrow)
    assert torch.equal(wide.bfloat16(), narrow)


@pytest.mark.parametrize("hidden", WIDTHS)
def test_norm_quantizes(machine: Machine, hidden: int) -> None:
    """An int8 row should be the quantized float32 row, its sums included."""
    x, scale = torch.randn(9, hidden), torch.randn(hidden)
    wide = torch.empty(9, hidden)
    norm(machine, x, scale, wide)
    out = torch.full((9, quantized_bytes(hidden)), 99, dtype=torch.int8)
    scales = norm(machine, x, scale, out, threads=2)
    expected, expected_scales = quantize_rows(wide)
    assert_quantized(expected, expected_scales, out, scales)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_ops_behind_a_gather_work_on_the_wanted_rows(machine: Machine, threads: int) -> None:
    """Output i should be the norm of row wanted[i], in any order and repeated, and nothing should be written behind."""
    x, scale = torch.randn(20, 100), torch.randn(100)
    whole, some, gathered = torch.empty(20, 100), torch.full((20, 100), 7.0), torch.empty(20, 100)
    norm(machine, x, scale, whole)
    wanted = torch.tensor([19, 0, 7, 7])

    def add(program: Program) -> None:
        add_gather(program, x, gathered)
        program.is_of_wanted = True
        add_norm(program, gathered, scale, some, EPS)

    machine.run(add, len(x), threads=threads, wanted_rows=wanted)
    assert torch.equal(whole[wanted], some[:4])
    assert (some[4:] == 7.0).all()


@pytest.mark.parametrize("rows", ROWS)
def test_norm_of_a_row_does_not_depend_on_its_batch(machine: Machine, rows: int) -> None:
    """A row should have the same bits alone, among others, and with any number of threads."""
    x, scale = torch.randn(100, 897), torch.randn(897)
    whole = torch.empty(100, 897)
    norm(machine, x, scale, whole)
    for threads in (1, 2, 3):
        out = torch.empty(rows, 897)
        norm(machine, x[-rows:].contiguous(), scale, out, threads=threads)
        assert torch.equal(whole[-rows:], out)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizes_rows(machine: Machine, width: int, dtype: torch.dtype) -> None:
    """Rows should be quantized as the reference does: ±127, zeros, tiny, huge, NaN and infinite rows included."""
    x = torch.randn(40, width)
    x[1], x[2], x[3], x[4] = 0, 1e-35, 1e35, -x[0].abs()
    x[5, width // 2], x[6, 0] = torch.nan, -torch.inf
    x = x.to(dtype)
    out = torch.full((40, quantized_bytes(width) + 64), 99, dtype=torch.int8)
    scales = torch.full((40,), torch.nan)
    machine.run(lambda program: add_quantize(program, x, width, out, scales), 40, threads=2)
    expected, expected_scales = quantize_rows(x)
    assert_quantized(expected, expected_scales, out, scales)


@pytest.mark.parametrize("width", [1, 15, 17, 16384, 16385, 40000])
def test_finds_the_largest_logit(machine: Machine, width: int) -> None:
    """Each wanted row's largest logit should win, the lowest id on a tie, whatever lies beyond `width`."""
    logits = torch.randn(9, width + 7).round(decimals=1)
    logits[:, width:] = 100
    for threads in (1, 2, 3):
        out = torch.full((9,), -1)
        machine.run(lambda program, out=out: add_argmax(program, logits, width, out), 9, threads=threads)
        largest = logits[:, :width].amax(dim=1, keepdim=True)
        assert torch.equal((logits[:, :width] == largest).int().argmax(dim=1), out)


def test_argmax_stays_in_range_without_a_largest(machine: Machine) -> None:
    """NaN should never win, and rows of nothing but NaN or −∞ give a valid id."""
    logits = torch.full((4, 40000), torch.nan)
    logits[1] = -torch.inf
    logits[2, 39999] = -5.0
    logits[3, 20000] = torch.inf
    out = torch.full((4,), -1)
    machine.run(lambda program: add_argmax(program, logits, 40000, out), 4)
    assert [0, 0, 39999, 20000] == out.tolist()


def assert_quantized(expected: Tensor, expected_scales: Tensor, out: Tensor, scales: Tensor) -> None:
    """`out` should be the quantized rows of `expected` and end in their sums."""
    width = expected.shape[1]
    padded = -(-width // 64) * 64
    used = padded + 4 * (1 + -(-width // 32))
    torch.testing.assert_close(expected_scales, scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(quantized_rows(expected)[:, :used], out[:, :used])

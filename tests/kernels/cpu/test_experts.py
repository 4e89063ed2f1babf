"""Experts in C: who computes which row, and what comes of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.experts import (
    ExpertPairs,
    add_combine,
    add_experts,
    add_gather_pairs,
    add_route,
    make_pairs,
)
from kernels.cpu.linear import PackedWeight, interleave, pack_float
from kernels.cpu.ops import Epilogue
from kernels.cpu.pack import pack_quantized
from kernels.cpu.program import Program
from kernels.cpu.rows import add_quantize, quantized_bytes
from kernels.quantized_linear import quantize_int4, quantize_int8, quantize_rows
from tests.kernels.cpu.conftest import Machine

ROWS = [1, 2, 7, 33, 150]
SIZES = [(5, 2), (1, 1), (128, 8), (40, 40)]
"""Experts, and how many of them compute a row."""
HIDDEN, INNER = 96, 40
KINDS = ["float32", "bfloat16", "int8", "int4"]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 2e-2, "int4": 2e-2}
"""Of a layer's results: gated numbers are rounded to bfloat16; one next to a border of the 254 steps may fall on its
other side."""


def pack(weight: Tensor, kind: str) -> tuple[PackedWeight, Tensor]:
    """The packed weight, and the numbers that it holds."""
    if kind in ("int8", "int4"):
        quantized = quantize_int8(weight) if kind == "int8" else quantize_int4(weight)
        return pack_quantized(quantized), quantized.dequantize()
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    return pack_float(weight.to(dtype)), weight.to(dtype).float()


class Layer:
    """Random experts of a kind."""

    def __init__(self, kind: str, num_experts: int) -> None:
        self.kind = kind
        gates, ups = torch.randn(2, num_experts, INNER, HIDDEN).unbind()
        made = [pack(interleave(gate, up), kind) for gate, up in zip(gates, ups, strict=True)]
        self.gate_up = [packed for packed, _ in made]
        self._gates = [pack(gate, kind)[1] for gate in gates]
        self._ups = [pack(up, kind)[1] for up in ups]
        down = [pack(torch.randn(HIDDEN, INNER), kind) for _ in range(num_experts)]
        self.down, self._downs = [packed for packed, _ in down], [numbers for _, numbers in down]

    def expected(self, x: Tensor, probabilities: Tensor, num_used: int, *, is_normalized: bool) -> Tensor:
        """What the experts of each row add, in float64; what quantized weights read is quantized as they read it."""
        shares, chosen = probabilities.double().topk(num_used)
        if is_normalized:
            shares = shares / shares.sum(dim=1, keepdim=True)
        out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
        read = self._read(x)
        for row in range(len(x)):
            for share, expert in zip(shares[row], chosen[row].tolist(), strict=True):
                gate, up = (read[row] @ part[expert].double().T for part in (self._gates, self._ups))
                inner = self._read((F.silu(gate) * up).float()[None])[0]
                out[row] += share * (inner @ self._downs[expert].double().T)
        return out

    def _read(self, x: Tensor) -> Tensor:
        """Rows as the weights read them."""
        if self.kind not in ("int8", "int4"):
            return x.double()
        values, scales = quantize_rows(x.bfloat16().float())
        return values.double() * scales.view(-1, 1).double()

    def add(
        self, program: Program, x: Tensor, logits: Tensor, out: Tensor, pairs: ExpertPairs, *, normed: bool
    ) -> None:
        """Append the whole layer over `x` [rows, hidden]."""
        count, is_quantized = len(pairs.row_of), self.kind in ("int8", "int4")
        dtype = torch.float32 if self.kind == "float32" else torch.bfloat16
        gated = torch.zeros(count, 64, dtype=dtype)
        results = torch.full((count, HIDDEN), torch.nan)
        add_route(program, logits, pairs, is_normalized=normed)
        if is_quantized:
            rows, some = (torch.zeros(n, quantized_bytes(HIDDEN), dtype=torch.int8) for n in (len(x), count))
            scales, some_scales = torch.zeros(len(x)), torch.zeros(count)
            add_quantize(program, x, HIDDEN, rows, scales)
            inner, inner_scales = torch.zeros(count, quantized_bytes(INNER), dtype=torch.int8), torch.zeros(count)
        else:
            rows, some, scales, some_scales = x.to(dtype), torch.zeros(count, HIDDEN, dtype=dtype), None, None
            inner, inner_scales = gated, None
        add_gather_pairs(program, rows, some, pairs, scales=scales, out_scales=some_scales)
        add_experts(program, some, self.gate_up, gated, pairs, x_scales=some_scales, epilogue=Epilogue.SILU_MUL)
        if inner_scales is not None:
            add_quantize(program, gated, INNER, inner, inner_scales, per_row=pairs.num_used)
        add_experts(program, inner, self.down, results, pairs, x_scales=inner_scales)
        add_combine(program, results, out, pairs)


def run(
    machine: Machine, layer: Layer, x: Tensor, logits: Tensor, num_used: int, *, normed: bool, threads: int = 2
) -> Tensor:
    """What is there when the layer was added to rows of ones."""
    pairs = make_pairs(len(x), num_experts=logits.shape[1], num_used=num_used)
    out = torch.ones(len(x), HIDDEN)
    machine.run(lambda program: layer.add(program, x, logits, out, pairs, normed=normed), len(x), threads=threads)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_experts", "num_used"), SIZES)
def test_experts_are_near_the_formula(machine: Machine, kind: str, num_experts: int, num_used: int) -> None:
    """Each row should get the weighted results of its likeliest experts, in steps of any size."""
    layer = Layer(kind, num_experts)
    for rows in ROWS:
        x, logits = torch.randn(rows, HIDDEN), torch.randn(rows, num_experts)
        x = x if kind == "float32" else x.bfloat16().float()
        for normed in (True, False):
            out = run(machine, layer, x, logits, num_used, normed=normed)
            expected = 1 + layer.expected(x, logits.softmax(dim=1), num_used, is_normalized=normed)
            error = (out - expected).abs().max() / (expected - 1).abs().max()
            assert float(error) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(machine: Machine, kind: str) -> None:
    """A row alone, in a step with others, and where all choose the same experts should get the same bits."""
    layer, x, logits = Layer(kind, 9), torch.randn(60, HIDDEN), torch.randn(60, 9)
    for shown in (logits, logits[:1].expand(60, 9).contiguous()):
        together = run(machine, layer, x, shown, 3, normed=True, threads=3)
        for row in (0, 17, 59):
            part = slice(row, row + 1)
            alone = run(machine, layer, x[part].contiguous(), shown[part].contiguous(), 3, normed=True, threads=1)
            assert torch.equal(alone[0], together[row])


def test_chooses_as_topk(machine: Machine) -> None:
    """Chosen experts should rise, be the likeliest, the lowest on a tie, and the pairs be sorted by expert."""
    logits = torch.randn(50, 20)
    logits[3] = 0.5
    pairs = make_pairs(50, num_experts=20, num_used=4)
    machine.run(lambda program: add_route(program, logits, pairs, is_normalized=True), 50, threads=2)
    expected = logits.topk(4).indices.sort().values.int()
    expected[3] = torch.arange(4, dtype=torch.int32)
    assert torch.equal(expected, pairs.chosen)
    torch.testing.assert_close(torch.ones(50), pairs.shares.sum(dim=1))
    sorted_pairs = sorted((int(expert), row) for row, few in enumerate(expected) for expert in few)
    assert [row for _, row in sorted_pairs] == pairs.row_of.tolist()
    counts = torch.bincount(expected.flatten(), minlength=20)
    assert torch.equal(counts.cumsum(0).int(), pairs.starts[1:])
    assert int(pairs.active[0]) == int((counts > 0).sum())


def test_a_broken_row_stays_alone(machine: Machine) -> None:
    """A row of NaN should give NaN, and its neighbours what they give without it."""
    layer, x, logits = Layer("float32", 6), torch.randn(5, HIDDEN), torch.randn(5, 6)
    expected = run(machine, layer, x, logits, 2, normed=True)
    x[2], logits[2] = torch.nan, torch.nan
    out = run(machine, layer, x, logits, 2, normed=True)
    assert bool(out[2].isnan().all())
    kept = [0, 1, 3, 4]
    assert torch.equal(expected[kept], out[kept])

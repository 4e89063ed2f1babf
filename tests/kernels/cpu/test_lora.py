"""The C ops of adapters against the reference, and row by row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.linear import add_linear, interleave, pack_float
from kernels.cpu.lora import LoraShape, LoraSlots, add_gate, add_lora, pack_factors
from kernels.cpu.ops import Epilogue, Step
from kernels.cpu.program import Program, address
from kernels.lora_matmul import NO_SLOT, AdapterRows, LoraWeight, lora_matmul_reference
from kernels.quantized_linear import quantize_rows
from tests.kernels.cpu.conftest import Machine, quantized_rows
from tests.kernels.cpu.guarded import GuardedTensor
from tests.kernels.lora_cases import PARTS, SLOTS, make_rows, make_weight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Sums are float32 whatever the factors are; A · x is rounded to what these are."""
MAX_RANK = 24
GATES = {Epilogue.SILU_MUL: F.silu, Epilogue.GELU_MUL: partial(F.gelu, approximate="tanh")}


def pack(weight: LoraWeight, shape: LoraShape) -> LoraSlots:
    """The slots of `weight`; those of rank 0 are left empty."""
    slots, starts, rank = LoraSlots(len(weight.ranks)), (0, *weight.ends), weight.rank
    for slot, used in enumerate(weight.ranks):
        parts = [
            (weight.a[slot, part * rank : part * rank + used], weight.b[slot, starts[part] : end, :used])
            if used
            else None
            for part, end in enumerate(weight.ends)
        ]
        slots.put(slot, pack_factors(shape, parts, weight.a.dtype))
    return slots


def make_step(rows: AdapterRows, num_rows: int) -> Step:
    return Step(
        num_rows=num_rows,
        num_groups=len(rows.slots),
        group_rows=address(rows.rows),
        group_starts=address(rows.starts),
        group_slots=address(rows.slots),
    )


def run(
    machine: Machine, x: Tensor, y: Tensor, weight: LoraWeight, slots: list[int], *, threads: int = 2,
    x_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Have the machine add to `y`."""
    parts = tuple(end - start for start, end in zip((0, *weight.ends), weight.ends, strict=False))
    shape = LoraShape(weight.a.shape[2], parts)
    packed, rows, program = pack(weight, shape), make_rows(slots), Program()
    shrunk = torch.full((len(slots), shape.shrunk_width(weight.rank)), torch.nan)
    add_lora(program, x, shape, packed, y, shrunk=shrunk, dtype=weight.a.dtype, x_scales=x_scales)
    machine.pools[threads].run(program, make_step(rows, len(slots)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ends", [*PARTS, (17,), (2000,)])
@pytest.mark.parametrize("slots", SLOTS)
def test_equals_reference(machine: Machine, dtype: torch.dtype, ends: tuple[int, ...], slots: list[int]) -> None:
    """Each row should gain its own adapter's product, and rows without one stay bit by bit; nothing beyond is read or
    written, be parts whole panels or not."""
    weight = make_weight(ends, 100, (3, 0, MAX_RANK), MAX_RANK, dtype)
    x = GuardedTensor(torch.randn(len(slots), 100).to(dtype))
    y = GuardedTensor(torch.randn(len(slots), ends[-1]))
    before = y.tensor.clone()
    expected = lora_matmul_reference(before, x.tensor, weight, slots)
    run(machine, x.tensor, y.tensor, weight, slots)
    torch.testing.assert_close(y.tensor, expected, rtol=1e-5, atol=TOLERANCE[dtype])
    for row, slot in enumerate(slots):
        assert torch.equal(y.tensor[row], before[row]) == (slot in (NO_SLOT, 1))


def test_reads_quantized_rows(machine: Machine) -> None:
    """Of int8 rows an adapter should see what they stand for."""
    weight = make_weight((48,), 100, (16,), 16, torch.bfloat16)
    values, scales = quantize_rows(torch.randn(5, 100))
    y = torch.randn(5, 48)
    expected = lora_matmul_reference(y, values.float() * scales.view(-1, 1), weight, [0] * 5)
    run(machine, quantized_rows(values), y, weight, [0] * 5, x_scales=scales.flatten().contiguous())
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=TOLERANCE[torch.bfloat16])


def test_rows_are_independent(machine: Machine) -> None:
    """A row should have the same bits alone, among others, and with any number of threads."""
    weight = make_weight((64, 80, 96), 576, (16, 4), 16, torch.bfloat16)
    slots = [0, 1, 1] * 15
    x, before = torch.randn(45, 576).bfloat16(), torch.randn(45, 96)
    whole = before.clone()
    run(machine, x, whole, weight, slots, threads=1)
    for threads in (2, 3):
        again = before.clone()
        run(machine, x, again, weight, slots, threads=threads)
        assert torch.equal(whole, again)
    for row in (0, 7, 44):
        alone = before[row : row + 1].clone()
        run(machine, x[row : row + 1], alone, weight, slots[row : row + 1])
        assert torch.equal(whole[row], alone[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [16, 100])
@pytest.mark.parametrize("epilogue", GATES)
def test_gate_of_sums_equals_a_linears(machine: Machine, dtype: torch.dtype, size: int, epilogue: Epilogue) -> None:
    """Storing sums, adding adapters and gating should give rows without an adapter the bits of the fused epilogue, and
    the others those of an adapter on each half."""
    slots = [NO_SLOT, 0, 0, NO_SLOT, 0]
    gate_up = pack_float(interleave(torch.randn(size, 64), torch.randn(size, 64)))
    padded = -(-size // 16) * 16
    x, fused, out = torch.randn(5, 64), torch.empty(5, padded, dtype=dtype), torch.empty(5, size, dtype=dtype)
    shape = LoraShape(64, (size, size), is_interleaved=True)
    weight = make_weight((size, 2 * size), 64, (5,), 5, torch.float32)
    sums, shrunk = torch.empty(5, shape.out_features), torch.full((5, shape.shrunk_width(5)), torch.nan)
    packed, rows, program = pack(weight, shape), make_rows(slots), Program()
    add_linear(program, x, gate_up, fused, epilogue=epilogue)
    add_linear(program, x, gate_up, sums)
    add_lora(program, x, shape, packed, sums, shrunk=shrunk, dtype=torch.float32)
    add_gate(program, sums, size, out, epilogue)
    machine.pools[2].run(program, make_step(rows, 5))
    plain = Program()
    plain_sums = torch.empty_like(sums)
    add_linear(plain, x, gate_up, plain_sums)
    machine.pools[1].run(plain, Step(num_rows=5))
    halves = plain_sums.view(5, -1, 2, 16).transpose(1, 2).reshape(5, 2, padded)[:, :, :size].flatten(1)
    gate, up = lora_matmul_reference(halves, x, weight, slots).chunk(2, dim=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, (GATES[epilogue](gate) * up).to(dtype), rtol=tolerance, atol=tolerance)
    for row in (0, 3):
        assert torch.equal(out[row], fused[row, :size])

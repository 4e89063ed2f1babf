"""Adapters for the CPU kernels: an adapter's factors in panels, slots that point to them, and the ops (lora.c).

A slot holds addresses only: what it points to must live as long as steps may use it, so `LoraSlots` holds on to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.linear import LANES, interleave, pack_float
from kernels.cpu.ops import Dtype, Epilogue, GateArgs, LoraArgs, LoraFactors, OpKind
from kernels.cpu.program import Program, address

_NO_PART = 2**63 - 1
_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16, torch.int8: Dtype.INT8}


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Of a projection: `in_features`, and the outputs of each of the parts that it was fused of; `is_interleaved`: two
    whose panels alternate, each padded to whole panels."""

    in_features: int
    parts: tuple[int, ...]
    is_interleaved: bool = False

    @property
    def is_apart(self) -> bool:
        """Whether each panel of outputs is of one part; else all are one, with a higher rank."""
        return self.is_interleaved or all(size % LANES == 0 for size in self.parts[:-1])

    @property
    def num_parts(self) -> int:
        """As the kernels see them."""
        return len(self.parts) if self.is_apart else 1

    @property
    def out_features(self) -> int:
        """All outputs, padding between interleaved panels included."""
        return 2 * _padded(self.parts[0]) if self.is_interleaved else sum(self.parts)

    def shrunk_width(self, max_rank: int) -> int:
        """Numbers of a row that A · x has at most."""
        return self.num_parts * _padded(max_rank if self.is_apart else max_rank * len(self.parts))


@dataclass(frozen=True, slots=True)
class PackedFactors:
    """One adapter's factors of a projection in panels; `rank` is padded."""

    a: Tensor
    b: Tensor
    rank: int

    def struct(self) -> LoraFactors:
        """What a slot holds; the tensors must outlive it."""
        return LoraFactors(a=address(self.a), b=address(self.b), rank=self.rank)


def pack_factors(
    shape: LoraShape, parts: Sequence[tuple[Tensor, Tensor] | None], dtype: torch.dtype
) -> PackedFactors | None:
    """The factors (A [rank, in], B [out, rank] with the scale in it) of each part, None where there are none.

    Args:
        dtype: of the panels, float32 or bfloat16.
    """
    ranks = [0 if part is None else len(part[0]) for part in parts]
    if not any(ranks):
        return None
    rank = _padded(max(ranks) if shape.is_apart else sum(ranks))
    a = torch.zeros(shape.num_parts, rank, shape.in_features)
    outer = []
    offset = 0
    for index, (size, part) in enumerate(zip(shape.parts, parts, strict=True)):
        made = torch.zeros(size, rank)
        if part is not None:
            numbers = slice(offset, offset + ranks[index])
            a[index if shape.is_apart else 0, numbers] = part[0].float()
            made[:, numbers] = part[1].float()
            offset += 0 if shape.is_apart else ranks[index]
        outer.append(made)
    b = interleave(*outer) if shape.is_interleaved else torch.cat(outer)
    return PackedFactors(_in_panels(a.flatten(0, 1), dtype), _in_panels(b, dtype), rank)


class LoraSlots:
    """What the ops of one projection find in each slot."""

    def __init__(self, num_slots: int) -> None:
        self.table = (LoraFactors * num_slots)()
        self._kept: list[PackedFactors | None] = [None] * num_slots

    def put(self, slot: int, factors: PackedFactors | None) -> None:
        """Have `slot` hold `factors`; no step that uses the slot may be running."""
        self._kept[slot] = factors
        self.table[slot] = LoraFactors() if factors is None else factors.struct()


def add_lora(
    program: Program, x: Tensor, shape: LoraShape, slots: LoraSlots, y: Tensor, *, shrunk: Tensor,
    dtype: torch.dtype, x_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Append y += B · (A · x) of the rows that have an adapter.

    Args:
        x: [rows, at least in] float32 or bfloat16, or int8 quantized rows with `x_scales` [rows].
        y: [rows, at least out] float32.
        shrunk: [rows, width] float32, which is overwritten; wide enough for every slot's rank.
        dtype: of the slots' panels.
    """
    firsts = [_NO_PART, _NO_PART]
    if shape.num_parts > 1 and not shape.is_interleaved:
        edges = torch.tensor(shape.parts).cumsum(0).tolist()
        firsts[: len(edges) - 1] = [edge // LANES for edge in edges[:-1]]
    args = LoraArgs(
        slots=ctypes.addressof(slots.table),
        x=address(x),
        x_scales=address(x_scales),
        shrunk=address(shrunk),
        y=address(y),
        in_features=shape.in_features,
        out_features=shape.out_features,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        shrunk_stride=shrunk.stride(0),
        num_parts=shape.num_parts,
        second_part=firsts[0],
        third_part=firsts[1],
        is_interleaved=shape.is_interleaved,
        dtype=_DTYPES[dtype],
        x_dtype=_DTYPES[x.dtype],
    )
    for kind in (OpKind.LORA_SHRINK, OpKind.LORA_EXPAND):
        program.add(kind, args, x, x_scales, slots, y, shrunk, label="lora")


def add_gate(program: Program, x: Tensor, width: int, out: Tensor, epilogue: Epilogue) -> None:
    """Append out = activation(gate) · up.

    Args:
        x: [rows, 2 · width padded to panels] float32, panels of gate and up alternating.
        width: of the result.
        out: [rows, at least width] float32 or bfloat16.
        epilogue: SILU_MUL or GELU_MUL.
    """
    args = GateArgs(in_=address(x), out=address(out), width=width, in_stride=x.stride(0), out_stride=out.stride(0),
                    out_dtype=_DTYPES[out.dtype], epilogue=epilogue)  # fmt: skip
    program.add(OpKind.GATE, args, x, out)


def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


def _in_panels(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return pack_float(weight.to(dtype)).panels

"""Adapters of a projection: y += B · (A · x), each row with the factors of its own adapter.

Layouts: x [rows, in], y [rows, out]. Adapters lie in *slots*: A [slots, parts · rank, in], B [slots, out, rank], with
the adapter's scale in B. A projection that was fused of several has a *part* for each: outputs of part p read rows
[p · rank, (p + 1) · rank) of A. An adapter of a lower rank has zeros behind.

Rows are grouped by slot, at most `GROUP_ROWS` a group (`AdapterRows`), so that factors are read once a group. Rows
of no adapter are in no group and stay as they are.

When which path runs: on CUDA the Triton kernels in `kernels/gpu/lora_matmul.py`; elsewhere a product in float32 for
each group, of exactly `GROUP_ROWS` rows: a row's result depends on no other row. The CPU kernels have their own
(`kernels/cpu/lora.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import uses_triton

GROUP_ROWS = 16
"""The least rows of a Triton dot product."""
NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows have which adapter. Groups without rows may stand behind the others.

    Attributes:
        rows: numbers of the rows that have one, group after group, int32.
        starts: [groups + 1] int32, where in `rows` each begins, and the end.
        slots: [groups] int32.
    """

    rows: Tensor
    starts: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class LoraWeight:
    """The factors of one projection in all slots.

    Attributes:
        a: [slots, parts · rank, in]. b: [slots, out, rank]; of one dtype.
        ends: of each part, behind its last output.
        ranks: the highest rank in each slot, 0: the slot does nothing here. On the host, for the torch path.
    """

    a: Tensor
    b: Tensor
    ends: tuple[int, ...]
    ranks: list[int]

    @property
    def rank(self) -> int:
        """Rows of A that a part has room for."""
        return int(self.b.shape[2])


def group_rows(slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], list[int], list[int]]:
    """What `AdapterRows` holds, of the slot of each row (`NO_SLOT`: none); in a group rows are in order."""
    order = np.argsort(slots, kind="stable")
    order = order[int((slots == NO_SLOT).sum()) :]
    starts, found = [0], []
    numbers, counts = np.unique(slots[order], return_counts=True)
    for slot, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        first = starts[-1]
        starts += [first + min(count, done) for done in range(GROUP_ROWS, count + GROUP_ROWS, GROUP_ROWS)]
        found += [slot] * -(-count // GROUP_ROWS)
    return order, starts, found


def most_groups(num_rows: int, num_slots: int) -> int:
    """The most groups of `num_rows` rows."""
    return min(num_rows, num_rows // GROUP_ROWS + num_slots)


def lora_matmul(y: Tensor, x: Tensor, weight: LoraWeight, rows: AdapterRows) -> None:
    """Add to `y` what each row's adapter makes of it.

    Args:
        y: [rows, out], contiguous rows. x: [rows, in].
        rows: on the device of `x`.
    """
    if y.shape != (x.shape[0], weight.b.shape[1]) or x.shape[1] != weight.a.shape[2]:
        raise ValueError(f"{list(x.shape)} → {list(y.shape)} does not go with factors {list(weight.a.shape)} and "
                         f"{list(weight.b.shape)}")  # fmt: skip
    if uses_triton(x):
        from kernels.gpu.lora_matmul import lora_matmul_triton

        lora_matmul_triton(y, x, weight, rows)
        return
    numbers, starts = rows.rows.long(), rows.starts.tolist()
    for slot, first, end in zip(rows.slots.tolist(), starts, starts[1:], strict=False):
        if first < end and weight.ranks[slot]:
            chosen = numbers[first:end]
            y[chosen] = (y[chosen].float() + _product(x[chosen], weight, slot)).to(y.dtype)


def lora_matmul_reference(y: Tensor, x: Tensor, weight: LoraWeight, slots: Sequence[int]) -> Tensor:
    """`y` + B · (A · x) row by row in float32; `slots` of the rows, `NO_SLOT`: none."""
    expected, rank, starts = y.clone(), weight.rank, (0, *weight.ends)
    for row, slot in enumerate(slots):
        if slot == NO_SLOT:
            continue
        inner = weight.a[slot].float() @ x[row].float()
        for part, (first, end) in enumerate(zip(starts, weight.ends, strict=False)):
            outer = weight.b[slot, first:end].float() @ inner[part * rank : (part + 1) * rank]
            expected[row, first:end] = (y[row, first:end].float() + outer).to(y.dtype)
    return expected


def _product(x: Tensor, weight: LoraWeight, slot: int) -> Tensor:
    """B · (A · x) of the rows of one group, [rows, out] float32."""
    num_rows, rank, parts = x.shape[0], weight.ranks[slot], len(weight.ends)
    a = weight.a[slot].view(parts, weight.rank, -1)[:, :rank].float()
    b = weight.b[slot, :, :rank].float()
    inner = F.linear(F.pad(x.float(), (0, 0, 0, GROUP_ROWS - num_rows)), a.flatten(0, 1)).view(GROUP_ROWS, parts, rank)
    starts = (0, *weight.ends)
    outer = [F.linear(inner[:, part], b[starts[part] : weight.ends[part]]) for part in range(parts)]
    return torch.cat(outer, dim=1)[:num_rows]

"""Factors of adapters and rows that have them, for the tests of every way of computing."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.lora_matmul import NO_SLOT, AdapterRows, LoraWeight, group_rows

PARTS = [(32,), (16, 48), (64, 80, 96), (40, 48, 56)]
"""Ends of parts of a projection."""
SLOTS = [[0], [NO_SLOT], [1, 0, NO_SLOT, 1], [2] * 17 + [NO_SLOT, 0] + [2] * 20]
"""Of the rows of a step."""


def make_weight(
    ends: tuple[int, ...], num_in: int, ranks: tuple[int, ...], max_rank: int, dtype: torch.dtype
) -> LoraWeight:
    """Random factors; those of a slot have numbers up to its rank."""
    a = torch.zeros(len(ranks), len(ends) * max_rank, num_in)
    b = torch.zeros(len(ranks), ends[-1], max_rank)
    for slot, rank in enumerate(ranks):
        a[slot].view(len(ends), max_rank, num_in)[:, :rank] = torch.randn(len(ends), rank, num_in) / num_in**0.5
        b[slot, :, :rank] = torch.randn(ends[-1], rank) / max(1, rank) ** 0.5
    return LoraWeight(a.to(dtype), b.to(dtype), ends, list(ranks))


def make_rows(slots: list[int], *, empty_groups: int = 0) -> AdapterRows:
    """The groups of rows with these slots, and some without rows behind them."""
    numbers, starts, found = group_rows(np.array(slots, dtype=np.int64))
    starts, found = starts + [starts[-1]] * empty_groups, found + [0] * empty_groups
    return AdapterRows(*(torch.tensor(values, dtype=torch.int32) for values in (numbers, starts, found)))


def make_xy(slots: list[int], weight: LoraWeight) -> tuple[Tensor, Tensor]:
    """Inputs and outputs of as many rows, views of something wider."""
    rows, num_in, num_out = len(slots), weight.a.shape[2], weight.b.shape[1]
    x, y = torch.randn(rows, num_in + 16), torch.randn(rows, num_out + 16)
    return x.to(weight.a.dtype)[:, :num_in], y.to(weight.a.dtype)[:, :num_out]

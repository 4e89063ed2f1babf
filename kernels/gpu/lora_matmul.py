"""Triton kernels of `kernels.lora_matmul`: shrink (A · x), then expand (B · that, added to y).

A program of either works on one group, rows of one slot. `in` is cut into splits of `SPLIT` numbers, whose sums the
second kernel adds up in order: a few rows keep a card busy, no sum depends on the batch, and no addition is atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import MIN_DOT, ceil_div, power_of_2
from kernels.lora_matmul import GROUP_ROWS, AdapterRows, LoraWeight

SPLIT = 1024  # numbers of `in` that a program of the first kernel takes
BLOCK_K = 64
BLOCK_N = 64  # outputs of a program of the second


@triton.jit
def _shrink_kernel(
    partial_ptr, x_ptr, a_ptr, rows_ptr, starts_ptr, slots_ptr, num_rows, stride_x_row, stride_a_slot,
    IN: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    group, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    if first == end:
        return
    slot = tl.load(slots_ptr + group).to(tl.int64)
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < end
    rows = tl.load(rows_ptr + places, mask=is_row, other=0).to(tl.int64)
    numbers = tl.arange(0, BLOCK_R)
    is_number = numbers < RANK
    a_at = a_ptr + slot * stride_a_slot + (part * RANK + numbers).to(tl.int64) * IN
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for begin in range(0, SPLIT, BLOCK_K):
        columns = split * SPLIT + begin + tl.arange(0, BLOCK_K)
        is_column = columns < IN
        x = tl.load(x_ptr + rows[:, None] * stride_x_row + columns[None, :],
                    mask=is_row[:, None] & is_column[None, :], other=0.0)  # fmt: skip
        a = tl.load(a_at[None, :] + columns[:, None], mask=is_number[None, :] & is_column[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    out_at = partial_ptr + (split * num_rows + places[:, None]).to(tl.int64) * WIDTH + part * RANK + numbers[None, :]
    tl.store(out_at, total, mask=is_row[:, None] & is_number[None, :])


@triton.jit
def _expand_kernel(
    y_ptr, partial_ptr, b_ptr, rows_ptr, starts_ptr, slots_ptr, num_rows, stride_y_row, stride_b_slot,
    END_0: tl.constexpr, END_1: tl.constexpr, END_2: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    if first == end:
        return
    slot = tl.load(slots_ptr + group).to(tl.int64)
    tiles_0: tl.constexpr = (END_0 + BLOCK_N - 1) // BLOCK_N
    tiles_1: tl.constexpr = tiles_0 + (END_1 - END_0 + BLOCK_N - 1) // BLOCK_N
    part = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_1).to(tl.int32)
    in_later = tl.where(part == 1, END_0 + (tile - tiles_0) * BLOCK_N, END_1 + (tile - tiles_1) * BLOCK_N)
    begin = tl.where(part == 0, tile * BLOCK_N, in_later)
    columns = begin + tl.arange(0, BLOCK_N)
    is_column = columns < tl.where(part == 0, END_0, tl.where(part == 1, END_1, END_2))
    places = first + tl.arange(0, BLOCK_M)
    is_row = places < end
    rows = tl.load(rows_ptr + places, mask=is_row, other=0).to(tl.int64)
    numbers = tl.arange(0, BLOCK_R)
    is_number = numbers < RANK
    inner_at = partial_ptr + places[:, None].to(tl.int64) * WIDTH + part * RANK + numbers[None, :]
    is_inner = is_row[:, None] & is_number[None, :]
    inner = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for split in range(SPLITS):
        inner += tl.load(inner_at + split * num_rows.to(tl.int64) * WIDTH, mask=is_inner, other=0.0)
    b_at = b_ptr + slot * stride_b_slot + columns[None, :].to(tl.int64) * RANK + numbers[:, None]
    b = tl.load(b_at, mask=is_number[:, None] & is_column[None, :], other=0.0)
    added = tl.dot(inner.to(b.dtype), b, input_precision="ieee")
    y_at = y_ptr + rows[:, None] * stride_y_row + columns[None, :]
    is_output = is_row[:, None] & is_column[None, :]
    y = tl.load(y_at, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y_at, (y + added).to(y_ptr.dtype.element_ty), mask=is_output)


def lora_matmul_triton(y: Tensor, x: Tensor, weight: LoraWeight, rows: AdapterRows) -> None:
    """As `kernels.lora_matmul.lora_matmul`."""
    assert x.stride(1) == y.stride(1) == 1, "rows are contiguous"
    assert weight.a.is_contiguous()
    assert weight.b.is_contiguous()
    num_groups, num_rows, rank = len(rows.slots), len(rows.rows), weight.rank
    if not num_groups or not num_rows:
        return
    num_in, parts = x.shape[1], len(weight.ends)
    splits, width = ceil_div(num_in, SPLIT), parts * rank
    partial = torch.empty((splits, num_rows, width), dtype=torch.float32, device=x.device)
    tables = (rows.rows, rows.starts, rows.slots, num_rows)
    block_r = power_of_2(rank, MIN_DOT)
    _shrink_kernel[(num_groups, parts, splits)](
        partial, x, weight.a, *tables, x.stride(0), weight.a.stride(0),
        IN=num_in, RANK=rank, WIDTH=width, SPLIT=SPLIT, BLOCK_M=GROUP_ROWS, BLOCK_R=block_r, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    ends = (*weight.ends, *(weight.ends[-1],) * (3 - parts))
    starts = (0, *weight.ends)
    num_tiles = sum(ceil_div(end - start, BLOCK_N) for start, end in zip(starts, weight.ends, strict=False))
    _expand_kernel[(num_groups, num_tiles)](
        y, partial, weight.b, *tables, y.stride(0), weight.b.stride(0),
        END_0=ends[0], END_1=ends[1], END_2=ends[2], RANK=rank, WIDTH=width, SPLITS=splits, BLOCK_M=GROUP_ROWS,
        BLOCK_R=block_r, BLOCK_N=BLOCK_N,
    )  # fmt: skip

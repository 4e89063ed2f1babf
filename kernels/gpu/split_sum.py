"""The end of a product whose inner dimension is cut into splits of a constant number of columns: each split's sums are
written in float32, then added up in order. With one split the result is written at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2

BLOCK = 512  # columns of a program of the sum


@triton.jit
def store_sums(
    sums, out_ptr, partial_ptr, bias_ptr, rows, columns, is_row, is_column, num_rows, num_columns,
    USE_SPLITS: tl.constexpr, USE_BIAS: tl.constexpr,
):  # fmt: skip
    """Write `sums` [M, N] float32 to where `add_splits` finds them, or, without splits, the result. Splits are the
    last axis of the grid."""
    is_element = is_row[:, None] & is_column[None, :]
    at = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    if USE_SPLITS:
        split = tl.program_id(2).to(tl.int64)
        tl.store(partial_ptr + split * num_rows * num_columns + at, sums, mask=is_element)
    else:
        if USE_BIAS:
            sums += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _add_splits_kernel(
    out_ptr, partial_ptr, bias_ptr, num_splits, num_elements, num_columns, BLOCK: tl.constexpr, USE_BIAS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    at = row * num_columns + columns
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        total += tl.load(partial_ptr + split * num_elements + at, mask=is_column, other=0.0)
    if USE_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=is_column)


def add_splits(out: Tensor, partial: Tensor, bias: Tensor | None) -> None:
    """Write the sum of `partial` [splits, rows, columns] float32 over its splits, and the bias, to `out`."""
    num_splits, num_rows, num_columns = partial.shape
    block = min(BLOCK, power_of_2(num_columns))
    _add_splits_kernel[(num_rows, ceil_div(num_columns, block))](
        out, partial, out if bias is None else bias, num_splits, num_rows * num_columns, num_columns,
        BLOCK=block, USE_BIAS=bias is not None,
    )  # fmt: skip


def make_partial(like: Tensor, num_splits: int) -> Tensor:
    """Room for the sums of `num_splits`; none is needed for one."""
    shape = (num_splits if num_splits > 1 else 0, *like.shape)
    return torch.empty(shape, dtype=torch.float32, device=like.device)

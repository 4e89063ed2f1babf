"""Triton kernel of `kernels.int4_matmul`, for few rows and for many.

A program serves a tile of rows and of outputs. It takes 128 columns at a time, 16 words an output: eight shifts give
eight tiles of 16 columns, each of which becomes floats of x's dtype in registers and meets its columns of x.

* **few rows** (at most 16, and at most 64): bound by the weight's bytes, so there have to be enough programs to ask for
  them: `in` is cut into splits of `SPLIT` columns, whose sums are added up in order.
* **many rows**: bound by products; a program walks all of `in`.

**A row's result does not depend on its batch within a kind**: splits are of constant size, from column 0 on, and added
up in a fixed order; a row of a product is independent of the others. The kinds may differ in last bits.

An integer becomes a float without a conversion, which cards do at a quarter of the rate or less: put into the last bits
of 2²³ it is 2²³ + n; 2²³ + zero is taken off, exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autotune import matmul_tile
from kernels.gpu.split_sum import add_splits, make_partial, store_sums
from kernels.launch import ceil_div

if TYPE_CHECKING:
    from kernels.int4_matmul import Int4Weight

# Columns of a split, part of the numbers: 8 KiB of weights for each 16 outputs; the sums that a split writes and the
# sum reads are 8 bytes a row and output for its 512 bytes of weights (1.6 % a row, mostly in the level-2 cache).
SPLIT = 1024


@triton.jit
def _load_steps(scales_ptr, zeros_ptr, at, is_group, USE_ZEROS: tl.constexpr):
    """(2²³ + zero, scale) of outputs of one group, float32 [N]; `is_group`: it is there."""
    if USE_ZEROS:
        base = tl.load(zeros_ptr + at, mask=is_group, other=0).to(tl.float32) + 8388608.0
    else:
        base = tl.full(at.shape, 8388616.0, tl.float32)
    return base, tl.load(scales_ptr + at, mask=is_group, other=0.0).to(tl.float32)


@triton.jit
def _add_block(
    sums, x_at, words_ptr, scales_ptr, zeros_ptr, block, columns, is_row, is_column, num_columns, in_features,
    GROUP: tl.constexpr, USE_ZEROS: tl.constexpr,
):  # fmt: skip
    """`sums` [M, N] and the products of 128 columns."""
    within = tl.arange(0, 16)
    words_at = words_ptr + (block * 16 + within).to(tl.int64)[:, None] * num_columns + columns[None, :]
    words = tl.load(words_at, mask=is_column[None, :], other=0)  # [16, N]
    for part in tl.static_range(8):
        if part * 16 % (GROUP or 128) == 0:
            group = (block * 128 // GROUP + part * 16 // GROUP) if GROUP else 0
            is_group = is_column & (block * 128 + part * 16 < in_features)
            base, scale = _load_steps(scales_ptr, zeros_ptr, group * num_columns + columns, is_group, USE_ZEROS)
        inner = block * 128 + part * 16 + within
        is_loaded = is_row[:, None] & (inner < in_features)[None, :]
        x = tl.load(x_at + inner[None, :], mask=is_loaded, other=0.0)  # [M, 16]
        numbers = (((words >> (4 * part)) & 15) | 0x4B000000).to(tl.float32, bitcast=True)
        weight = ((numbers - base[None, :]) * scale[None, :]).to(x.dtype)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _int4_matmul_kernel(
    out_ptr, partial_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr, num_rows, num_columns, in_features,
    stride_x_row, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr,
    USE_SPLITS: tl.constexpr, USE_ZEROS: tl.constexpr, USE_BIAS: tl.constexpr,
):  # fmt: skip
    """Rows × outputs of one split, which is BLOCKS · 128 columns. Row tiles are the grid's first axis: those that run
    together read the same words."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_at = x_ptr + (rows.to(tl.int64) * stride_x_row)[:, None]
    first, last = 0, tl.cdiv(in_features, 128)
    if USE_SPLITS:
        first = tl.program_id(2) * BLOCKS
        last = tl.minimum(first + BLOCKS, last)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in range(first, last):
        sums = _add_block(
            sums, x_at, words_ptr, scales_ptr, zeros_ptr, block, columns, is_row, is_column, num_columns, in_features,
            GROUP, USE_ZEROS,
        )  # fmt: skip
    store_sums(
        sums, out_ptr, partial_ptr, bias_ptr, rows, columns, is_row, is_column, num_rows, num_columns,
        USE_SPLITS, USE_BIAS,
    )  # fmt: skip


def int4_matmul_triton(x: Tensor, weight: Int4Weight, bias: Tensor | None) -> Tensor:
    """As `kernels.int4_matmul.int4_matmul`, whose checks are done."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    elif x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((x.shape[0], weight.out_features), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = matmul_tile(x.shape[0])
    num_splits = ceil_div(weight.in_features, SPLIT) if tile.is_split else 1
    partial = make_partial(out, num_splits)
    grid = (ceil_div(x.shape[0], tile.rows), ceil_div(weight.out_features, tile.columns), num_splits)
    _int4_matmul_kernel[grid](
        out, partial, x, weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        out if bias is None else bias, x.shape[0], weight.out_features, weight.in_features, x.stride(0),
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, GROUP=weight.group, BLOCKS=SPLIT // 128, USE_SPLITS=num_splits > 1,
        USE_ZEROS=weight.zeros is not None, USE_BIAS=bias is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        add_splits(out, partial, bias)
    return out

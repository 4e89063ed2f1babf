"""Triton kernel of `kernels.fp8_matmul`: kinds, splits and promises are those of `kernels/gpu/int4_matmul.py`.

fp8 numbers are read as bytes and moved to where fp16 has exponent and mantissa (`kernels/gpu/kv_quantize.py`): cards
before sm_89 have no conversion. What comes of it is 2⁻⁸ of the number, which the sums' scale makes good.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autotune import matmul_tile
from kernels.gpu.kv_quantize import FP8, as_bits, to_floats
from kernels.gpu.split_sum import add_splits, make_partial, store_sums
from kernels.launch import ceil_div

SPLIT = 1024  # columns of a split, part of the numbers
BLOCK_K = 64  # columns at once: two rows of a tile are a line of memory
_KIND = tl.constexpr(FP8)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_matmul_kernel(
    out_ptr, partial_ptr, x_ptr, weight_ptr, scales_ptr, bias_ptr, num_rows, num_columns, in_features, stride_x_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr,
    USE_SPLITS: tl.constexpr, USE_BIAS: tl.constexpr,
):  # fmt: skip
    """Rows × outputs of one split."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_at = x_ptr + (rows.to(tl.int64) * stride_x_row)[:, None]
    weight_at = weight_ptr + (columns.to(tl.int64) * in_features)[:, None]
    begin, end = 0, in_features
    if USE_SPLITS:
        begin = tl.program_id(2) * SPLIT
        end = tl.minimum(begin + SPLIT, in_features)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(begin, end, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        is_inner = (inner < in_features)[None, :]
        x = tl.load(x_at + inner[None, :], mask=is_row[:, None] & is_inner, other=0.0)  # [M, K]
        numbers = tl.load(weight_at + inner[None, :], mask=is_column[:, None] & is_inner, other=0)  # [N, K]
        weight = to_floats(numbers, _KIND).to(x.dtype)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    sums *= tl.load(scales_ptr + columns, mask=is_column, other=0.0)[None, :] * 256.0
    store_sums(
        sums, out_ptr, partial_ptr, bias_ptr, rows, columns, is_row, is_column, num_rows, num_columns,
        USE_SPLITS, USE_BIAS,
    )  # fmt: skip


def fp8_matmul_triton(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """As `kernels.fp8_matmul.fp8_matmul`, whose checks are done."""
    (num_rows, in_features), num_columns = x.shape, weight.shape[0]
    assert weight.is_contiguous(), "the weight is one run of memory"
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = matmul_tile(num_rows)
    num_splits = ceil_div(in_features, SPLIT) if tile.is_split else 1
    partial = make_partial(out, num_splits)
    _fp8_matmul_kernel[(ceil_div(num_rows, tile.rows), ceil_div(num_columns, tile.columns), num_splits)](
        out, partial, x, as_bits(weight), scales, out if bias is None else bias, num_rows, num_columns, in_features,
        x.stride(0), BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, SPLIT=SPLIT, USE_SPLITS=num_splits > 1,
        USE_BIAS=bias is not None, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        add_splits(out, partial, bias)
    return out

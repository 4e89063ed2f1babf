"""Triton kernel of `kernels.rms_norm`: a program holds one row, so it is read once and reduced in one fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autotune import row_warps
from kernels.launch import power_of_2


@triton.jit
def _rms_norm_kernel(
    out_ptr, x_ptr, residual_ptr, weight_ptr, eps, stride_x_row, stride_residual_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """The norm of a row of x, or of residual + x, rounded to their type and left in the residual."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < SIZE
    dtype = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=is_column, other=0.0).to(tl.float32)
    if USE_RESIDUAL:
        at = residual_ptr + row * stride_residual_row + columns
        rounded = (x + tl.load(at, mask=is_column, other=0.0).to(tl.float32)).to(dtype)
        tl.store(at, rounded, mask=is_column)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    normed = (x * scale).to(weight_ptr.dtype.element_ty).to(tl.float32) * weight.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, normed.to(dtype), mask=is_column)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm.rms_norm`."""
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `kernels.rms_norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    into = x if residual is None else residual
    assert weight.shape == (size,), f"x is {list(x.shape)}, the weight {list(weight.shape)}"
    assert weight.is_contiguous(), "the weight is one run of memory"
    assert x.stride(1) == 1 == into.stride(1), "a row of hidden states is contiguous"
    if rows:
        _rms_norm_kernel[(rows,)](
            out, x, into, weight, eps, x.stride(0), into.stride(0),
            SIZE=size, BLOCK=power_of_2(size), USE_RESIDUAL=residual is not None, num_warps=row_warps(size),
        )  # fmt: skip
    return out

"""Triton kernel of `kernels.rotary`: a program rotates some heads of one row in place, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2

if TYPE_CHECKING:
    from kernels.rotary import Turns

HEADS = 8  # of a program: with head size 128, 16 bytes of bfloat16 of each half for every one of 64 threads


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, num_heads, stride_x_row, stride_x_head, stride_turn_row,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The halves (a, b) become (a · cos − b · sin, b · cos + a · sin). Turns hold (cos, cos) and (−sin, sin)."""
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_dim = dims < HALF
    is_element = (heads < num_heads)[:, None] & is_dim[None, :]
    cos = tl.load(cos_ptr + row * stride_turn_row + dims, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * stride_turn_row + HALF + dims, mask=is_dim, other=0.0)[None, :]
    at = x_ptr + row * stride_x_row + heads[:, None] * stride_x_head + dims[None, :]
    first = tl.load(at, mask=is_element, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_element, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(dtype), mask=is_element)
    tl.store(at + HALF, (second * cos + first * sin).to(dtype), mask=is_element)


def rotary_triton(x: Tensor, turns: Turns) -> None:
    """As `kernels.rotary.rotary`."""
    rows, heads, size = x.shape
    assert x.stride(2) == 1 == turns.cos.stride(2), "a head is contiguous"
    assert turns.cos.stride() == turns.sin.stride(), "turns are made in one way"
    if not x.numel():
        return
    block_h = min(HEADS, power_of_2(heads))
    _rotary_kernel[(rows, ceil_div(heads, block_h))](
        x, turns.cos, turns.sin, heads, x.stride(0), x.stride(1), turns.cos.stride(0),
        HALF=size // 2, BLOCK_H=block_h, BLOCK_D=power_of_2(size // 2), num_warps=2,
    )  # fmt: skip

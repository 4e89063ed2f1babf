"""Triton kernel of `kernels.silu_mul`: one pass, in float32, rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2

BLOCK = 1024  # elements of a program; 8 of each operand a thread: one load of 16 bytes in bfloat16


@triton.jit
def _silu_mul_kernel(out_ptr, gate_up_ptr, stride_gate_up_row, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < SIZE
    gate_at = gate_up_ptr + row * stride_gate_up_row + columns
    gate = tl.load(gate_at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_at + SIZE, mask=is_column, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * SIZE + columns, result.to(out_ptr.dtype.element_ty), mask=is_column)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """As `kernels.silu_mul.silu_mul`, for two dimensions."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "a row of the projection is contiguous"
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(BLOCK, power_of_2(size))
    if out.numel():
        _silu_mul_kernel[(rows, ceil_div(size, block))](out, gate_up, gate_up.stride(0), SIZE=size, BLOCK=block)
    return out

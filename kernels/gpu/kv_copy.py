"""Triton kernel of `kernels.kv_copy`: a program moves a piece of one block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2

BLOCK = 4096  # elements of a program: 64 bytes of bfloat16 for each of 128 threads


@triton.jit
def _kv_copy_kernel(
    target_ptr, source_ptr, target_ids_ptr, source_ids_ptr, stride_target_block, stride_source_block,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    target_block = tl.load(target_ids_ptr + pair).to(tl.int64)
    source_block = tl.load(source_ids_ptr + pair).to(tl.int64)
    if target_block < 0:
        return
    elements = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_element = elements < SIZE
    moved = tl.load(source_ptr + source_block * stride_source_block + elements, mask=is_element, other=0.0)
    tl.store(target_ptr + target_block * stride_target_block + elements, moved, mask=is_element)


def kv_copy_triton(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """As `kernels.kv_copy.kv_copy`, whose checks are done, on one device."""
    size = source[0].numel()
    block = min(BLOCK, power_of_2(size))
    if source_ids.shape[0]:
        _kv_copy_kernel[(source_ids.shape[0], ceil_div(size, block))](
            target, source, target_ids, source_ids, target.stride(0), source.stride(0), SIZE=size, BLOCK=block
        )

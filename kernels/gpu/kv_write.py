"""Triton kernel of `kernels.kv_write`: a program writes one row's keys and values; it sees itself what is padding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import power_of_2

if TYPE_CHECKING:
    from kernels.kv_write import WriteSlots


@triton.jit
def _kv_write_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slots_ptr,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head,
    stride_key_block, stride_key_slot, stride_key_cache_head, stride_key_dim,
    stride_value_block, stride_value_slot, stride_value_cache_head, stride_value_dim,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE  # int64
    heads, dims = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    is_element = (heads < HEADS) & (dims < HEAD_SIZE)
    key = tl.load(key_ptr + row * stride_key_row + heads * stride_key_head + dims, mask=is_element, other=0.0)
    value = tl.load(value_ptr + row * stride_value_row + heads * stride_value_head + dims, mask=is_element, other=0.0)
    key_at = block * stride_key_block + offset * stride_key_slot + heads * stride_key_cache_head
    value_at = block * stride_value_block + offset * stride_value_slot + heads * stride_value_cache_head
    tl.store(key_cache_ptr + key_at + dims * stride_key_dim, key, mask=is_element)
    tl.store(value_cache_ptr + value_at + dims * stride_value_dim, value, mask=is_element)


def kv_write_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: WriteSlots) -> None:
    """As `kernels.kv_write.kv_write`, whose checks are done."""
    rows, heads, size = key.shape
    assert key.stride(2) == 1 == value.stride(2), "a head is contiguous"
    if rows:
        _kv_write_kernel[(rows,)](
            key, value, key_cache, value_cache, slots.slots, key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), *key_cache.stride(), *value_cache.stride(),
            HEADS=heads, HEAD_SIZE=size, BLOCK_SIZE=slots.block_size,
            BLOCK_H=power_of_2(heads), BLOCK_D=power_of_2(size), num_warps=2,
        )  # fmt: skip

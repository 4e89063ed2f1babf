"""Triton kernel of `kernels.kv_write`: a program writes one row's keys and values; it sees itself what is padding.

Into a cache of int8 or fp8 it quantizes them on the way: all heads of a row are in its registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.kv_quantize import PLAIN, as_bits, cache_kind, quantize_heads
from kernels.launch import power_of_2

if TYPE_CHECKING:
    from kernels.kv_quantize import KvScales
    from kernels.kv_write import WriteSlots


@triton.jit
def _kv_write_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, slots_ptr,
    stride_key_row, stride_key_head, stride_value_row, stride_value_head,
    stride_key_block, stride_key_slot, stride_key_cache_head, stride_key_dim,
    stride_value_block, stride_value_slot, stride_value_cache_head, stride_value_dim,
    stride_scale_block, stride_scale_slot, stride_scale_head,
    HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
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
    if KIND != 0:
        key, key_scale = quantize_heads(key, KIND == 2)
        value, value_scale = quantize_heads(value, KIND == 2)
        head = tl.arange(0, BLOCK_H)
        scale_at = block * stride_scale_block + offset * stride_scale_slot + head * stride_scale_head
        tl.store(key_scale_ptr + scale_at, key_scale, mask=head < HEADS)
        tl.store(value_scale_ptr + scale_at, value_scale, mask=head < HEADS)
    tl.store(key_cache_ptr + key_at + dims * stride_key_dim, key, mask=is_element)
    tl.store(value_cache_ptr + value_at + dims * stride_value_dim, value, mask=is_element)


def kv_write_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: WriteSlots, *,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """As `kernels.kv_write.kv_write`, whose checks are done."""
    rows, heads, size = key.shape
    assert key.stride(2) == 1 == value.stride(2), "a head is contiguous"
    kind = cache_kind(key_cache)
    key_scales, value_scales = (slots.slots, slots.slots) if scales is None else (scales.key, scales.value)
    assert key_scales.stride() == value_scales.stride()
    assert (kind == PLAIN) == (scales is None)
    if rows:
        _kv_write_kernel[(rows,)](
            key, value, as_bits(key_cache), as_bits(value_cache), key_scales, value_scales, slots.slots,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1), *key_cache.stride(),
            *value_cache.stride(), *(key_scales.stride() if scales is not None else (0, 0, 0)),
            HEADS=heads, HEAD_SIZE=size, BLOCK_SIZE=slots.block_size,
            BLOCK_H=power_of_2(heads), BLOCK_D=power_of_2(size), KIND=kind, num_warps=2,
        )  # fmt: skip

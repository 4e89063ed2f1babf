"""Put the keys and values of a step's tokens into the paged cache.

Layouts: key, value [rows, kv_heads, head_size]; caches are views [num_blocks, block_size, kv_heads, head_size] with
any strides; slot = block · block_size + offset. A row with slot −1 is padding and is not written. Into a cache of
another float dtype rows are rounded, into one of int8 or fp8 they are quantized (`kernels/kv_quantize.py`).
On CUDA the Triton kernel in `kernels/gpu/kv_write.py` runs, which never waits for the device.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from kernels.kv_quantize import KvScales, quantize_kv
from kernels.launch import uses_triton


class WriteSlots:
    """Where the rows of a step go; one for all layers, so that what follows from the slots is computed once.

    Args:
        slots: [rows] int64, each at most once; −1 for rows that are padding.
        block_size: tokens in a block.
    """

    def __init__(self, slots: Tensor, block_size: int) -> None:
        self.slots = slots
        self.block_size = block_size

    @cached_property
    def written(self) -> Tensor | None:
        """Rows that are not padding, [any] int64; None when no row is."""
        return (self.slots >= 0).nonzero().flatten() if bool((self.slots < 0).any()) else None

    @cached_property
    def index(self) -> tuple[Tensor, Tensor]:
        """(block, offset) of each written row, int64."""
        slots = self.slots if self.written is None else self.slots[self.written]
        return torch.div(slots, self.block_size, rounding_mode="floor"), slots % self.block_size


def kv_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: WriteSlots, *,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """Write `key` and `value` into the caches at `slots`; only the caches and their scales change.

    Args:
        key, value: [rows, kv_heads, head_size], any float dtype.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size], any strides.
        slots: of the rows.
        scales: of caches of int8 or fp8; None for others.
    """
    num_slots = slots.slots.shape[0]
    if key.shape != value.shape or key.shape[0] != num_slots or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(f"key {list(key.shape)}, {num_slots} slots, cache {list(key_cache.shape)}")
    if key_cache.shape[1] != slots.block_size:
        raise ValueError(f"slots for blocks of {slots.block_size} tokens, cache {list(key_cache.shape)}")
    if uses_triton(key):
        from kernels.gpu.kv_write import kv_write_triton

        return kv_write_triton(key, value, key_cache, value_cache, slots, scales=scales)
    return kv_write_reference(key, value, key_cache, value_cache, slots, scales=scales)


def kv_write_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: WriteSlots, *,
    scales: KvScales | None = None,
) -> None:  # fmt: skip
    """The same by indexed assignment."""
    if slots.written is not None:
        key, value = key[slots.written], value[slots.written]
    if scales is None:
        key_cache[slots.index] = key.to(key_cache.dtype)
        value_cache[slots.index] = value.to(value_cache.dtype)
        return
    for rows, cache, own_scales in ((key, key_cache, scales.key), (value, value_cache, scales.value)):
        numbers, found = quantize_kv(rows, cache.dtype)
        cache.view(torch.int8)[slots.index] = numbers.view(torch.int8)
        own_scales[slots.index] = found

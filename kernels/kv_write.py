"""Put the keys and values of a step's tokens into the paged cache.

Layouts: key, value [rows, kv_heads, head_size]; caches are views [num_blocks, block_size, kv_heads, head_size] with
any strides; slot = block · block_size + offset. A row with slot −1 is padding and is not written.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write `key` and `value` into the caches at `slots`; only the caches change.

    Args:
        key, value: [rows, kv_heads, head_size], of the caches' dtype.
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size], any strides.
        slots: [rows] int64, each at most once; −1 for rows that are padding.
    """
    if key.shape != value.shape or key.shape[0] != slots.shape[0] or key.shape[1:] != key_cache.shape[2:]:
        raise ValueError(f"key {list(key.shape)}, slots {list(slots.shape)}, cache {list(key_cache.shape)}")
    kv_write_reference(key, value, key_cache, value_cache, slots)


def kv_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """The same by indexed assignment."""
    if bool((slots < 0).any()):
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    block_size = key_cache.shape[1]
    index = (torch.div(slots, block_size, rounding_mode="floor"), slots % block_size)
    key_cache[index] = key
    value_cache[index] = value

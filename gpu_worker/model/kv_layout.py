"""The order inside a KV block; nothing else knows it.

A model declares groups of layers that share one block table (`KvGroup`; full attention only, one group so far). For
each layer the cache is one tensor of blocks, each one contiguous run of bytes (copy, swap and fork move it whole):

* token-major, [num_blocks, 2, block_size, kv_heads, head_size]: a block's keys, then its values, so that gathered
  blocks of a sequence are its keys in token order without another copy;
* packed, [num_blocks, block_elements]: in the order that the CPU kernels multiply in (kernels/cpu/kv_cache.py).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.kv_cache import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers `layers` share one block table. `window` None: they see the whole context."""

    layers: range
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes of the cache. All groups have blocks of the same size in bytes. `is_packed`: in the CPU kernels' order."""

    groups: tuple[KvGroup, ...]
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    is_packed: bool = False

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block id over all layers, keys and values."""
        return self.num_layers * math.prod(self._block_shape) * self.dtype.itemsize

    @property
    def _block_shape(self) -> tuple[int, ...]:
        if self.is_packed:
            return (self.kv_shape.block_elements,)
        return (2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def kv_shape(self) -> KvShape:
        """One layer's keys and values, as the CPU kernels see them."""
        return KvShape(
            kv_heads=self.num_kv_heads, head_size=self.head_size, block_size=self.block_size, dtype=self.dtype
        )

    def allocate(self, num_blocks: int, device: torch.device) -> KvCache:
        """A cache of `num_blocks` blocks, zeroed. On CPU a block takes memory only once it is written."""
        shape = (num_blocks, *self._block_shape)
        if device.type == "cpu":
            return KvCache([_map_zeros(shape, dtype=self.dtype) for _ in range(self.num_layers)])
        return KvCache([torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(self.num_layers)])


class KvCache:
    """The blocks of all layers."""

    def __init__(self, layers: list[Tensor]) -> None:
        self._layers = layers

    @property
    def num_blocks(self) -> int:
        return int(self._layers[0].shape[0])

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    def blocks(self, layer: int) -> Tensor:
        """All of a layer, in the layout's order."""
        return self._layers[layer]

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_size], a view; token-major only."""
        return self._layers[layer][:, 0]

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_size], a view; token-major only."""
        return self._layers[layer][:, 1]


def _map_zeros(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """`torch.zeros` on CPU, of untouched pages: torch writes its zeros, which for the default cache of 4 GiB takes
    seconds at the start, and memory that most servers never fill."""
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # the tensor keeps `pages` alive

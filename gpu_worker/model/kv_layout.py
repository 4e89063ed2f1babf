"""The order inside a KV block; nothing else knows it.

A model declares groups of layers that share one block table (`KvGroup`; one group of all layers so far). For
each layer the cache is one tensor of blocks, each one contiguous run of bytes (swap moves it whole):

* token-major, [num_blocks, 2, block_size, kv_heads, head_size]: a block's keys, then its values, so that gathered
  blocks of a sequence are its keys in token order without another copy; of int8 or fp8 numbers the block's bytes
  [2, block_size, kv_heads, head_size] and behind them their scales, fp16 [2, kv_heads, block_size];
* packed, [num_blocks, block_elements]: in the order that the CPU kernels multiply in (kernels/cpu/kv_cache.py).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.kv_cache import KvShape
from kernels.kv_quantize import SCALE_DTYPE, KvScales, is_quantized
from shared.errors import ConfigError

KV_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""What `--kv-cache-dtype` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers `layers` share one block table. `window`: none of their queries sees more tokens, itself among them; None:
    some see the whole context."""

    layers: range
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Sizes of the cache. All groups have blocks of the same size in bytes. `dtype`: of keys and values. `is_packed`:
    in the CPU kernels' order."""

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
        return self.num_layers * math.prod(self._block_shape) * self._storage_dtype.itemsize

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are numbers with scales."""
        return is_quantized(self.dtype)

    def allocate_host(self, num_blocks: int, *, is_pinned: bool) -> Tensor:
        """Memory of the host for `num_blocks` block ids, [num_blocks, layers, a layer's block], zeroed. A block takes
        memory only once it is written, unless all is pinned, for copies from and to a GPU. Raises `ConfigError`."""
        shape = (num_blocks, self.num_layers, *self._block_shape)
        host = _map_zeros(shape, dtype=self._storage_dtype, flag="--swap-space")
        if is_pinned:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0)):
                raise ConfigError(f"--swap-space: the system pins no {host.nbytes} bytes; lower it")
        return host

    @property
    def _storage_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def _block_shape(self) -> tuple[int, ...]:
        if self.is_packed:
            return (self.kv_shape.block_elements,)
        if self.is_quantized:
            return (2 * self.block_size * self.num_kv_heads * (self.head_size + SCALE_DTYPE.itemsize),)
        return (2, self.block_size, self.num_kv_heads, self.head_size)

    @property
    def kv_shape(self) -> KvShape:
        """One layer's keys and values, as the CPU kernels see them."""
        return KvShape(
            kv_heads=self.num_kv_heads, head_size=self.head_size, block_size=self.block_size, dtype=self.dtype
        )

    def allocate(self, num_blocks: int, device: torch.device) -> KvCache:
        """A cache of `num_blocks` blocks, zeroed. On CPU a block takes memory only once it is written."""
        shape, dtype = (num_blocks, *self._block_shape), self._storage_dtype
        if device.type == "cpu":
            return KvCache(self, [_map_zeros(shape, dtype=dtype) for _ in range(self.num_layers)])
        return KvCache(self, [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)])


class KvCache:
    """The blocks of all layers, in the order of `layout`."""

    def __init__(self, layout: KvLayout, layers: list[Tensor]) -> None:
        self._layout = layout
        self._layers = layers

    @property
    def num_blocks(self) -> int:
        return int(self._layers[0].shape[0])

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def device(self) -> torch.device:
        return self._layers[0].device

    @property
    def block_bytes(self) -> int:
        """Of one block id over all layers."""
        return self._layout.block_bytes

    def blocks(self, layer: int) -> Tensor:
        """All of a layer, in the layout's order; of a quantized cache, bytes."""
        return self._layers[layer]

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_size] of the layout's dtype, a view; token-major only."""
        return self._numbers(layer)[:, 0]

    def values(self, layer: int) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_size] of the layout's dtype, a view; token-major only."""
        return self._numbers(layer)[:, 1]

    def scales(self, layer: int) -> KvScales | None:
        """Views of a quantized cache's scales; None of any other. Token-major only."""
        layout = self._layout
        if not layout.is_quantized:
            return None
        first = 2 * layout.block_size * layout.num_kv_heads * layout.head_size
        rows = self._layers[layer][:, first:].view(SCALE_DTYPE)
        both = rows.view(-1, 2, layout.num_kv_heads, layout.block_size).transpose(2, 3)
        return KvScales(both[:, 0], both[:, 1])

    def _numbers(self, layer: int) -> Tensor:
        """[num_blocks, 2, block_size, kv_heads, head_size]"""
        layout, blocks = self._layout, self._layers[layer]
        if not layout.is_quantized:
            return blocks
        shape = (2, layout.block_size, layout.num_kv_heads, layout.head_size)
        return blocks[:, : math.prod(shape)].view(layout.dtype).view(-1, *shape)


def _map_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, flag: str = "--kv-cache-memory-bytes") -> Tensor:
    """`torch.zeros` on CPU, of untouched pages: torch writes its zeros, which for the default cache of 4 GiB takes
    seconds at the start, and memory that most servers never fill."""
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"KV cache: the system gives no {num_bytes} bytes at a time ({error.strerror}); lower {flag}"
        ) from None
    return torch.frombuffer(pages, dtype=dtype).view(shape)  # the tensor keeps `pages` alive

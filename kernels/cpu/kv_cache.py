"""The layout of one layer's keys and values in a block of the CPU kernels' cache, and its translation to plain tensors.

A block holds [kv_heads][keys, values]: bfloat16 keys [head_size/2][block_size][2] and values
[ceil(block_size/2)][head_size][2], or float32 keys [head_size][block_size] and values [block_size][head_size]. Why: see
kv_cache.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.build import CpuKernelsUnavailable
from kernels.cpu.ops import Dtype

MAX_HEAD_SIZE = 256
_DTYPES = {torch.bfloat16: Dtype.BF16, torch.float32: Dtype.F32}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Sizes of one layer's keys and values.

    Args:
        kv_heads: of the layer.
        head_size: a multiple of 16, at most 256.
        block_size: tokens in a block; multiples of 16 are read in place, others are copied first.
        dtype: of the cache and of the queries: bfloat16 or float32.

    Raises:
        CpuKernelsUnavailable: the kernels don't have this head size or dtype.
    """

    kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.head_size % 16 or not 0 < self.head_size <= MAX_HEAD_SIZE:
            raise CpuKernelsUnavailable(f"head size {self.head_size} is not a multiple of 16 up to {MAX_HEAD_SIZE}")
        if self.dtype not in _DTYPES:
            raise CpuKernelsUnavailable(f"a cache of {self.dtype}; the CPU kernels have bfloat16 and float32")

    @property
    def cache_dtype(self) -> Dtype:
        """As the ops' arguments name it."""
        return _DTYPES[self.dtype]

    @property
    def block_elements(self) -> int:
        """Elements of one layer's block."""
        return self.kv_heads * self.head_size * (self.block_size + self.value_rows * self.pair)

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.block_elements * self.dtype.itemsize

    @property
    def pair(self) -> int:
        """Elements that an instruction multiplies and adds at once: 2 in bfloat16."""
        return 4 // self.dtype.itemsize

    @property
    def value_rows(self) -> int:
        """Rows of values in a block, the last one half empty where a bfloat16 block has an odd size."""
        return -(-self.block_size // self.pair)


def pack_blocks(keys: Tensor, values: Tensor, shape: KvShape) -> Tensor:
    """The blocks that hold `keys` and `values`: [blocks, block_elements] of their dtype.

    Args:
        keys, values: [blocks, block_size, kv_heads, head_size] of `shape`.

    Raises:
        ValueError: they are of other sizes or another dtype.
    """
    expected = (shape.block_size, shape.kv_heads, shape.head_size)
    if keys.shape[1:] != expected or values.shape != keys.shape or {keys.dtype, values.dtype} != {shape.dtype}:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} of {keys.dtype} are not of {shape}")
    padded = F.pad(values, (0, 0, 0, 0, 0, -shape.block_size % shape.pair))
    heads, size, pair = shape.kv_heads, shape.head_size, shape.pair
    key_parts = keys.reshape(-1, shape.block_size, heads, size // pair, pair).permute(0, 2, 3, 1, 4).flatten(2)
    value_parts = padded.reshape(-1, shape.value_rows, pair, heads, size).permute(0, 3, 1, 4, 2).flatten(2)
    return torch.cat((key_parts, value_parts), dim=2).flatten(1)


def unpack_blocks(blocks: Tensor, shape: KvShape) -> tuple[Tensor, Tensor]:
    """Keys and values, each [blocks, block_size, kv_heads, head_size], of `blocks` [blocks, block_elements]; copies."""
    heads, size, tokens, pair = shape.kv_heads, shape.head_size, shape.block_size, shape.pair
    parts = blocks.reshape(len(blocks), heads, -1)
    keys, values = parts[:, :, : size * tokens], parts[:, :, size * tokens :]
    plain_keys = keys.reshape(-1, heads, size // pair, tokens, pair).permute(0, 3, 1, 2, 4).flatten(3)
    plain_values = values.reshape(-1, heads, shape.value_rows, size, pair).permute(0, 2, 4, 1, 3).flatten(1, 2)
    return plain_keys, plain_values[:, :tokens].contiguous()

"""The layout of one layer's keys and values in a block of the CPU kernels' cache, and its translation to plain tensors.

A block holds [kv_heads][keys, values]: bfloat16 keys [head_size/2][block_size][2] and values
[ceil(block_size/2)][head_size][2], or float32 keys [head_size][block_size] and values [block_size][head_size]. Why: see
kv_cache.h. Blocks of int8 and fp8 are bytes: numbers in the order of float32, and behind each head's its fp16 scales
[keys, values][block_size].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.build import CpuKernelsUnavailable
from kernels.cpu.ops import Dtype
from kernels.kv_quantize import SCALE_DTYPE, KvScales, is_quantized

MAX_HEAD_SIZE = 256
_DTYPES = {
    torch.bfloat16: Dtype.BF16,
    torch.float32: Dtype.F32,
    torch.int8: Dtype.INT8,
    torch.float8_e4m3fn: Dtype.FP8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Sizes of one layer's keys and values.

    Args:
        kv_heads: of the layer.
        head_size: a multiple of 16, at most 256.
        block_size: tokens in a block; multiples of 16 are read in place, others are copied first.
        dtype: of the cache: bfloat16, float32, int8 or float8_e4m3fn.

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
            raise CpuKernelsUnavailable(f"a cache of {self.dtype}; the CPU kernels have bfloat16, float32, int8, fp8")

    @property
    def cache_dtype(self) -> Dtype:
        """As the ops' arguments name it."""
        return _DTYPES[self.dtype]

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are numbers with scales."""
        return is_quantized(self.dtype)

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of the tensor that holds the blocks; bytes, where numbers and scales lie in them."""
        return torch.uint8 if self.is_quantized else self.dtype

    @property
    def query_dtype(self) -> torch.dtype:
        """Of the queries: bfloat16 for a cache of it, else float32."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    @property
    def block_elements(self) -> int:
        """Elements of `storage_dtype` in one layer's block."""
        scale_bytes = 2 * SCALE_DTYPE.itemsize * self.block_size if self.is_quantized else 0
        return self.kv_heads * (self.head_size * (self.block_size + self.value_rows * self.pair) + scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.block_elements * self.storage_dtype.itemsize

    @property
    def pair(self) -> int:
        """Elements that an instruction multiplies and adds at once: 2 in bfloat16."""
        return 2 if self.dtype == torch.bfloat16 else 1

    @property
    def value_rows(self) -> int:
        """Rows of values in a block, the last one half empty where a bfloat16 block has an odd size."""
        return -(-self.block_size // self.pair)


def pack_blocks(keys: Tensor, values: Tensor, shape: KvShape, scales: KvScales | None = None) -> Tensor:
    """The blocks that hold `keys` and `values`: [blocks, block_elements] of the shape's storage dtype.

    Args:
        keys, values: [blocks, block_size, kv_heads, head_size] of `shape`.
        scales: of int8 and fp8, [blocks, block_size, kv_heads] each.

    Raises:
        ValueError: they are of other sizes or another dtype.
    """
    expected = (shape.block_size, shape.kv_heads, shape.head_size)
    if keys.shape[1:] != expected or values.shape != keys.shape or {keys.dtype, values.dtype} != {shape.dtype}:
        raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} of {keys.dtype} are not of {shape}")
    keys, values = keys.view(shape.storage_dtype), values.view(shape.storage_dtype)
    padded = F.pad(values, (0, 0, 0, 0, 0, -shape.block_size % shape.pair))
    heads, size, pair = shape.kv_heads, shape.head_size, shape.pair
    key_parts = keys.reshape(-1, shape.block_size, heads, size // pair, pair).permute(0, 2, 3, 1, 4).flatten(2)
    value_parts = padded.reshape(-1, shape.value_rows, pair, heads, size).permute(0, 3, 1, 4, 2).flatten(2)
    parts = [key_parts, value_parts]
    if scales is not None:
        both = torch.stack((scales.key.transpose(1, 2), scales.value.transpose(1, 2)), dim=2)
        parts.append(both.flatten(2).view(torch.uint8))
    return torch.cat(parts, dim=2).flatten(1)


def unpack_blocks(blocks: Tensor, shape: KvShape) -> tuple[Tensor, Tensor]:
    """Keys and values, each [blocks, block_size, kv_heads, head_size], of `blocks` [blocks, block_elements]; copies."""
    heads, size, tokens, pair = shape.kv_heads, shape.head_size, shape.block_size, shape.pair
    parts = blocks.reshape(len(blocks), heads, -1)
    values_at, scales_at = size * tokens, size * (tokens + shape.value_rows * pair)
    keys, values = parts[:, :, :values_at], parts[:, :, values_at:scales_at]
    plain_keys = keys.reshape(-1, heads, size // pair, tokens, pair).permute(0, 3, 1, 2, 4).flatten(3)
    plain_values = values.reshape(-1, heads, shape.value_rows, size, pair).permute(0, 2, 4, 1, 3).flatten(1, 2)
    return plain_keys.contiguous().view(shape.dtype), plain_values[:, :tokens].contiguous().view(shape.dtype)


def unpack_scales(blocks: Tensor, shape: KvShape) -> KvScales:
    """Scales of quantized `blocks` [blocks, block_elements]; copies."""
    heads, tokens = shape.kv_heads, shape.block_size
    parts = blocks.reshape(len(blocks), heads, -1)[:, :, 2 * shape.head_size * tokens :]
    both = parts.contiguous().view(SCALE_DTYPE).view(-1, heads, 2, tokens).permute(2, 0, 3, 1)
    return KvScales(both[0], both[1])

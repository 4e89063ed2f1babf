"""The sizes that kernels are launched with: a table with reasons, nothing is tried out when a worker starts.

Why a table: trying out takes seconds a shape at the first request that has it, and two workers of one cell that
picked differently would give other last bits for the same request. `quire bench gpu` times the kernels against
their limit; whoever changes a line here runs it before and after and writes down the card.

No card has run these yet. Each line was chosen from its resource report (docs/kernels.md): no spills in bfloat16 and
float16, and room for at least two programs a multiprocessor where the kernel is bound by memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.launch import MIN_DOT, power_of_2

# Keys of one split of a decode row, part of the numbers. 256 keys of one KV head are 128 KiB at head size 128: 64
# splits of one 16k sequence with one KV head are work for half of a card, and the partial results that a split writes
# and the combination reads are 8 · group bytes for every 1,024 bytes of keys and values (6 % at group 8).
SPLIT_TOKENS = 256
# Keys and values of the next tile are under way while one is worked on. Five stages, since a tile's block ids have to
# be there before its keys can be asked for: with 3 or 4 stages triton 3.7.1 keeps one buffer of keys and asks for the
# next tile only when this one is done (to see it: count the local_alloc of keys in the compiled kernel's ttgir).
NUM_STAGES = 5
COMBINED_SPLITS = 16  # taken at once by the combination, part of the numbers


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Sizes of a program of paged attention: `rows` folded query rows (query × head of the group), `keys` at once."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def decode_tile(dtype: torch.dtype, head_size: int, group: int, *, is_quantized: bool = False) -> AttentionTile:
    """For chunks whose folded rows fit into one tile of the least size: bound by memory. Numbers that become floats
    pass through registers, of which 64 keys, and 32 with 4 warps, take too many at head size 128.

    Args:
        is_quantized: keys and values are int8 or fp8 numbers.
    """
    rows = power_of_2(group, MIN_DOT)
    if dtype == torch.float32 or head_size > 128:
        return AttentionTile(rows, keys=16, num_warps=8, num_stages=2)
    if is_quantized and head_size > 64:
        return AttentionTile(rows, keys=32, num_warps=8, num_stages=NUM_STAGES)
    return AttentionTile(rows, keys=64, num_warps=4, num_stages=NUM_STAGES)


def prompt_tile(
    dtype: torch.dtype, head_size: int, group: int, capability: int, *, is_quantized: bool = False
) -> AttentionTile:
    """For longer chunks: bound by arithmetic. sm_80 spills with 64 keys at head size 128, sm_90 (whose products read
    both operands from shared memory) does not. Quantized keys and values take registers to become floats: 32 keys, and
    on sm_80 half of the rows at head size 128. float32 has no tensor cores to feed: small tiles.

    Args:
        capability: the card's major compute capability.
        is_quantized: keys and values are int8 or fp8 numbers.
    """
    if dtype == torch.float32:
        return AttentionTile(power_of_2(group, 32), keys=16, num_warps=8, num_stages=2)
    if head_size > 128:
        return AttentionTile(power_of_2(group, 64), keys=32, num_warps=8, num_stages=2)
    keys = 64 if (capability >= 9 or head_size <= 64) and not is_quantized else 32
    rows = 64 if is_quantized and capability < 9 and head_size > 64 else 128
    return AttentionTile(power_of_2(group, rows), keys=keys, num_warps=8, num_stages=NUM_STAGES)


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Sizes of a program of a product. `is_split`: `in` is cut into splits."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    is_split: bool


def matmul_tile(num_rows: int) -> MatmulTile:
    """Up to 64 rows the weight's bytes are the bound: narrow tiles and splits, so that 4096 × 4096 is work for 256
    programs. Beyond, products are: 128 × 128."""
    if num_rows <= MIN_DOT:
        return MatmulTile(MIN_DOT, columns=64, num_warps=4, num_stages=4, is_split=True)
    if num_rows <= 64:
        return MatmulTile(64, columns=64, num_warps=4, num_stages=3, is_split=True)
    return MatmulTile(128, columns=128, num_warps=8, num_stages=3, is_split=False)


def expert_tile(num_pairs: int, num_experts: int) -> MatmulTile:
    """Pairs of (row, expert) and outputs of a program: the least rows while an expert has fewer on average, where its
    weights' bytes are the bound; 64 beyond."""
    if num_pairs <= MIN_DOT * num_experts:
        return MatmulTile(MIN_DOT, columns=64, num_warps=4, num_stages=4, is_split=False)
    return MatmulTile(64, columns=128, num_warps=8, num_stages=3, is_split=False)


def row_warps(width: int) -> int:
    """Warps of a program that holds one row of `width` elements: at most 16 elements a thread up to 16,384."""
    return min(16, max(1, power_of_2(width) // 512))


@cache
def major_capability(device: torch.device) -> int:
    """Of the card; 9 for a CPU, where the interpreter runs."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9

"""Adds rotary embedding, KV write and attention to a program, and sizes the buffers that they share.

A model's program holds one `add_attention_plan` a step (one for each window that its layers have) and, for each layer,
`add_rotary_kv` and `add_attention`. All of them take the same `AttentionBuffers`, but for the plan. What is computed,
and in which order: attention.h.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.kv_cache import KvShape
from kernels.cpu.ops import AttentionArgs, Dtype, OpKind, RotaryKvArgs, Step
from kernels.cpu.program import Pool, Program, address
from kernels.paged_attention import PagedBatch

SPLIT = 512
"""Keys that one tile of a split sequence reads; as in attention.h."""
_MIN_PARTIALS = 1024
"""(row, split) pairs with room of their own. Only what keeps the last thread busy is split, so a step uses few: this is
4 MB for 14 heads of 64 and 17 MB for 32 heads of 128, taken from the machine when used. A step that would need more
leaves some sequences whole."""
_PLAN_HEADER_BYTES, _PLAN_TILE_BYTES = 16, 24
_OUT_DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """A layer's attention: query heads of `kv.head_size` over KV heads, of which each serves heads / kv_heads.
    `window`: keys that a row sees at most, its own the last of them; None: all up to its own.

    Raises:
        ValueError: heads is not a multiple of the KV heads.
    """

    heads: int
    kv: KvShape
    window: int | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv.kv_heads:
            raise ValueError(f"{self.heads} heads are no multiple of {self.kv.kv_heads} KV heads")

    @property
    def qkv_width(self) -> int:
        """Elements of a row of queries, keys and values."""
        return (self.heads + 2 * self.kv.kv_heads) * self.kv.head_size


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    """What a program's attention works in; one for all layers with the same window.

    Attributes:
        query: [max_rows, heads, head_size] in the cache's query dtype.
        plan: the step's tiles.
        partial: results of splits, float32.
        max_partials: (row, split) pairs that `plan` and `partial` have room for.
    """

    query: Tensor
    plan: Tensor
    partial: Tensor
    max_partials: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of queries and of keys: weights [head_size] float32, `eps` added to the mean square."""

    query: Tensor
    key: Tensor
    eps: float


def make_buffers(shape: AttentionShape, max_rows: int, max_context: int) -> AttentionBuffers:
    """Buffers for steps of up to `max_rows` rows over contexts of up to `max_context` tokens."""
    splits = -(-max_context // SPLIT)
    max_partials = min(max_rows * splits, max(_MIN_PARTIALS, splits)) if splits > 1 else 0
    return AttentionBuffers(
        query=torch.empty((max_rows, shape.heads, shape.kv.head_size), dtype=shape.kv.query_dtype),
        plan=torch.zeros(plan_bytes(max_rows, max_partials), dtype=torch.uint8),
        partial=torch.empty(max_partials * shape.heads * (shape.kv.head_size + 2)),
        max_partials=max_partials,
    )


def with_own_plan(buffers: AttentionBuffers) -> AttentionBuffers:
    """The same buffers with another plan, for layers with another window."""
    return replace(buffers, plan=torch.zeros_like(buffers.plan))


def plan_bytes(max_rows: int, max_partials: int) -> int:
    """Size of a plan; attention_plan_bytes in attention_plan.c."""
    return _PLAN_HEADER_BYTES + (2 * max_rows + 3 * max_partials) * _PLAN_TILE_BYTES


def add_rotary_kv(
    program: Program,
    shape: AttentionShape,
    buffers: AttentionBuffers,
    qkv: Tensor,
    *,
    cos_sin: Tensor,
    cache: Tensor,
    scale: float,
    head_norms: HeadNorms | None = None,
) -> None:
    """Norm and rotate queries and keys, and write keys and values into the cache at the rows' slots.

    Args:
        qkv: [max_rows, qkv_width] float32: queries, keys, values.
        cos_sin: [positions, head_size] float32, from `make_cos_sin`.
        cache: [num_blocks, block_elements] of the storage dtype: one layer's part of every block, any distance apart.
        scale: factor of the scores.
        head_norms: None: heads are rotated as they are.
    """
    query_norm, key_norm = (None, None) if head_norms is None else (head_norms.query, head_norms.key)
    for norm in (query_norm, key_norm):
        assert norm is None or (norm.dtype, norm.shape) == (torch.float32, (shape.kv.head_size,))
    args = RotaryKvArgs(
        qkv=address(_checked(qkv, torch.float32, shape.qkv_width)),
        cos_sin=address(_checked(cos_sin, torch.float32, shape.kv.head_size)),
        query=address(buffers.query),
        query_norm=address(query_norm),
        key_norm=address(key_norm),
        eps=0.0 if head_norms is None else head_norms.eps,
        heads=shape.heads,
        query_scale=scale * math.log2(math.e),
        **_cache_fields(shape, cache),
    )
    program.add(OpKind.ROTARY_KV, args, qkv, cos_sin, buffers.query, cache, query_norm, key_norm)


def add_attention_plan(program: Program, shape: AttentionShape, buffers: AttentionBuffers) -> None:
    """Cut the step into tiles; before the first `add_attention` of the same buffers."""
    args = AttentionArgs(
        heads=shape.heads, kv_heads=shape.kv.kv_heads, window=shape.window or 0, **_buffer_fields(buffers)
    )
    program.add(OpKind.ATTENTION_PLAN, args, buffers.plan)


def add_attention(
    program: Program, shape: AttentionShape, buffers: AttentionBuffers, cache: Tensor, out: Tensor
) -> None:
    """Attend from the buffers' queries over the cache.

    Args:
        cache: as for `add_rotary_kv`, with the step's own keys and values in it.
        out: [max_rows, at least heads · head_size] float32 or bfloat16, rows any distance apart.
    """
    args = AttentionArgs(
        out=address(out),
        heads=shape.heads,
        out_stride=out.stride(0),
        out_dtype=_OUT_DTYPES[out.dtype],
        window=shape.window or 0,
        **_buffer_fields(buffers),
        **_cache_fields(shape, cache),
    )
    for kind in (OpKind.ATTENTION, OpKind.ATTENTION_MERGE):
        program.add(kind, args, buffers.query, buffers.plan, buffers.partial, cache, out)


def rotary_kv(
    pool: Pool,
    shape: AttentionShape,
    qkv: Tensor,
    *,
    cos_sin: Tensor,
    cache: Tensor,
    scale: float,
    positions: Tensor,
    slots: Tensor,
    head_norms: HeadNorms | None = None,
) -> Tensor:
    """Rotated queries times scale · log2(e), [rows, heads, head_size]; `cache` gets keys and values. One op by itself.

    Args:
        qkv, cos_sin, cache, scale, head_norms: as for `add_rotary_kv`.
        positions, slots: [rows] int64; slot −1: not written.
    """
    buffers = make_buffers(shape, len(qkv), 1)
    program = Program()
    add_rotary_kv(program, shape, buffers, qkv, cos_sin=cos_sin, cache=cache, scale=scale, head_norms=head_norms)
    pool.run(program, Step(num_rows=len(qkv), positions=address(positions), slots=address(slots)))
    return buffers.query


def paged_attention(
    pool: Pool, shape: AttentionShape, query: Tensor, *, cache: Tensor, batch: PagedBatch, out: Tensor
) -> None:
    """Attention of `query` into `out` [rows, at least heads · head_size]. A program of its own.

    Args:
        query: [rows, heads, head_size] of the cache's query dtype, times scale · log2(e).
        cache: as for `add_rotary_kv`.
        batch: the chunks, as for `kernels.paged_attention`.
    """
    starts, contexts, tables = (
        x.int().contiguous() for x in (batch.query_starts, batch.context_lens, batch.block_tables)
    )
    buffers = make_buffers(shape, len(query), int(contexts.max()))
    buffers.query.copy_(query)
    program = Program()
    add_attention_plan(program, shape, buffers)
    add_attention(program, shape, buffers, cache, out)
    step = Step(
        num_rows=len(query),
        num_sequences=len(contexts),
        query_starts=address(starts),
        context_lens=address(contexts),
        block_tables=address(tables),
        table_stride=tables.shape[1],
    )
    pool.run(program, step)


def _cache_fields(shape: AttentionShape, cache: Tensor) -> dict[str, int | None]:
    _checked(cache, shape.kv.storage_dtype, shape.kv.block_elements)
    return {
        "cache": address(cache),
        "kv_heads": shape.kv.kv_heads,
        "head_size": shape.kv.head_size,
        "block_size": shape.kv.block_size,
        "block_stride": cache.stride(0),
        "cache_dtype": shape.kv.cache_dtype,
    }


def _buffer_fields(buffers: AttentionBuffers) -> dict[str, int | None]:
    return {
        "query": address(buffers.query),
        "plan": address(buffers.plan),
        "partial": address(buffers.partial),
        "max_rows": len(buffers.query),
        "max_partials": buffers.max_partials,
    }


def _checked(tensor: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """`tensor`, whose rows must be of `width` consecutive elements.

    Raises:
        ValueError: they are not, or of another dtype.
    """
    if tensor.dtype != dtype or tensor.dim() != 2 or tensor.shape[1] != width or tensor.stride(1) != 1:
        raise ValueError(f"{list(tensor.shape)} of {tensor.dtype}, where rows of {width} {dtype} are needed")
    return tensor

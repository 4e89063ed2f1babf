"""Triton kernels of `kernels.paged_attention`: one kernel for decode rows and for prompt chunks, and a combination.

A program serves one KV head and some rows of one sequence. The query heads that read that KV head are folded into
its rows (row m = query m // group, head m % group), so that keys and values are read once for all of them and a dot
product has at least the 16 rows that it needs. The grid is a list of work items:

* **short chunks** (folded rows fit into the least tile: decode rows, drafts): an item is a *split* of
  `SPLIT_TOKENS` keys; `_combine_kernel` then adds up a sequence's splits in order. A sequence of one split is written
  by its item.
* **long chunks**: an item is a tile of query rows, which walks all keys from position 0 to its last row's.

With a window, splits and key tiles before that of an item's first row are left out; splits and tiles still begin where
they do without one. Keys before that row's window are not loaded, nor are their blocks' ids: other sequences may own
them.

**A row's result does not depend on its batch.** Which kind a chunk is, where its splits begin and how its rows fall
into tiles follow from the chunk alone; tile sizes are those of the kind; keys are taken in tiles of constant size
from a split's start, and splits are combined in tiles of constant size from the first. There is no atomic addition.
Not promised: the same last bits for a prompt that is cut elsewhere (short and long chunks add in another order).

Numbers of an int8 or fp8 cache become floats of the query's dtype in registers: keys exactly, their scores are
multiplied by the key's scale; values times their scale, rounded. Softcapped scores (`kernels.softcap`) are capped
behind that, in powers of 2 like all scores here: so is the cap.

Items are laid out on the device (`_lay_out`), once a step for all layers: the host needs upper bounds only
(`BatchExtent`), so a captured graph stays true while contexts grow within them. To look up an item's sequence from
running sums is the idea of vLLM's unified attention kernel; here each kind has its own list, made before the launch,
so that programs do not search.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.autotune import COMBINED_SPLITS, SPLIT_TOKENS, AttentionTile, decode_tile, major_capability, prompt_tile
from kernels.gpu.kv_quantize import as_bits, cache_kind, load_scales, to_floats
from kernels.launch import MIN_DOT, power_of_2

if TYPE_CHECKING:
    from kernels.kv_quantize import KvScales
    from kernels.paged_attention import PagedBatch


LOG2_E = math.log2(math.e)


@triton.jit
def _empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `_attend` begins with: no values, no best score, no weights."""
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return tl.zeros((BLOCK_M, BLOCK_D), tl.float32), best, tl.zeros((BLOCK_M,), tl.float32)


@triton.jit
def _cap_scores(scores, cap):
    """cap · tanh(scores / cap), tanh from an exponential and a division."""
    small = tl.exp2(tl.abs(scores) * (-2.8853900817779268 / cap))  # 2 / ln 2
    capped = (1.0 - small) / (1.0 + small) * cap
    return tl.where(scores < 0.0, -capped, capped)


@triton.jit
def _attend(
    state, query, key_ptr, value_ptr, table_ptr, begin, end, first, limit, positions, scale, softcap,
    stride_key_block, stride_key_slot, stride_key_dim, stride_value_block, stride_value_slot, stride_value_dim,
    key_scale_ptr, value_scale_ptr, stride_scale_block, stride_scale_slot,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_MASK: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, USE_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Take keys begin .. end (of which those before `first` and from `limit` on are none) into `state`: weighted values
    [M, D], the best score [M] (in powers of 2) and the sum of weights [M]. Without a mask all rows see all of these
    keys."""
    acc, best, total = state
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < limit if USE_MASK else tl.full((BLOCK_N,), 1, tl.int1)
        if USE_MASK and WINDOW:
            is_key = is_key & (keys >= first)
        is_loaded = is_key[:, None] & (dims < HEAD_SIZE)[None, :]
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = keys % BLOCK_SIZE
        key_at = (blocks * stride_key_block + slots * stride_key_slot)[:, None] + dims[None, :] * stride_key_dim
        key = tl.load(key_ptr + key_at, mask=is_loaded, other=0)  # [N, D]
        key = (key if KIND == 0 else to_floats(key, KIND)).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [M, N]
        scale_at = blocks * stride_scale_block + slots * stride_scale_slot
        if KIND != 0:
            scores = scores * load_scales(key_scale_ptr + scale_at, is_key, KIND)[None, :]
        if USE_SOFTCAP:
            scores = _cap_scores(scores, softcap)
        if USE_MASK:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        if USE_MASK and WINDOW:
            scores = tl.where(keys[None, :] > positions[:, None] - WINDOW, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that sees none of the keys so far
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        value_at = (blocks * stride_value_block + slots * stride_value_slot)[:, None] + dims[None, :] * stride_value_dim
        value = tl.load(value_ptr + value_at, mask=is_loaded, other=0)  # [N, D]
        if KIND != 0:
            value_scales = load_scales(value_scale_ptr + scale_at, is_key, KIND)
            value = to_floats(value, KIND).to(tl.float32) * value_scales[:, None]
        value = value.to(query.dtype)
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    return acc, best, total


@triton.jit
def _edges(
    first_key, limit, first_position, first_seen, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Two ranges of keys, one behind the other: those that all rows see, and tiles in which some row ends. With a
    window all are of the second: a third range, of tiles in which windows begin, takes registers that sm_80 has not."""
    if WINDOW:
        masked_from = tl.maximum(first_key, first_seen // BLOCK_N * BLOCK_N)
    else:
        num_seen = tl.maximum(tl.minimum(first_position + 1, limit) - first_key, 0)
        masked_from = first_key + num_seen // BLOCK_N * BLOCK_N
    return first_key, masked_from, limit


@triton.jit(do_not_specialize=["num_sequences"])  # else the numbers 1 and 16 would be compiled anew, while users wait
def _paged_attention_kernel(
    out_ptr, partial_ptr, stats_ptr, query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr,
    query_starts_ptr, context_lens_ptr, table_ptr, item_starts_ptr, item_sequences_ptr, num_sequences, scale, softcap,
    stride_query_row, stride_query_head, stride_key_block, stride_key_slot, stride_key_head, stride_key_dim,
    stride_value_block, stride_value_slot, stride_value_head, stride_value_dim, stride_scale_block, stride_scale_slot,
    stride_scale_head, stride_table, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_SPLITS: tl.constexpr, KIND: tl.constexpr, WINDOW: tl.constexpr, USE_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One item and KV head. The longest tiles of a prompt come last in it, so those items are taken from the end."""
    item = tl.program_id(0) if USE_SPLITS else tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(item_sequences_ptr + item).to(tl.int64)
    if sequence >= num_sequences:
        return
    part, first_row = item - tl.load(item_starts_ptr + sequence), tl.load(query_starts_ptr + sequence)
    num_rows, context = tl.load(query_starts_ptr + sequence + 1) - first_row, tl.load(context_lens_ptr + sequence)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    first_query = 0 if USE_SPLITS else part * QUERIES
    first_position = context - num_rows + first_query
    first_seen = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW else 0
    first_key = (part + first_seen // SPLIT) * SPLIT if USE_SPLITS else 0
    limit = tl.minimum(first_key + SPLIT if USE_SPLITS else first_position + QUERIES, context)
    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = first_query + m // GROUP
    is_row = (m < QUERIES * GROUP) & (queries < num_rows)
    is_element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    rows, heads = (first_row + queries).to(tl.int64), kv_head * GROUP + m % GROUP
    query_at = (rows * stride_query_row + heads * stride_query_head)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=is_element, other=0.0)  # [M, D]
    state = _empty_state(BLOCK_M, BLOCK_D)
    edges = _edges(first_key, limit, first_position, first_seen, BLOCK_N, WINDOW)
    for USE_MASK in tl.static_range(1 if WINDOW else 0, 2):
        state = _attend(
            state, query, key_ptr + kv_head * stride_key_head, value_ptr + kv_head * stride_value_head,
            table_ptr + sequence * stride_table, edges[USE_MASK], edges[USE_MASK + 1], first_seen, limit,
            context - num_rows + queries, scale, softcap, stride_key_block, stride_key_slot, stride_key_dim,
            stride_value_block, stride_value_slot, stride_value_dim, key_scale_ptr + kv_head * stride_scale_head,
            value_scale_ptr + kv_head * stride_scale_head, stride_scale_block, stride_scale_slot,
            HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D, USE_MASK, KIND, WINDOW, USE_SOFTCAP,
        )  # fmt: skip
    acc, best, total = state
    if USE_SPLITS and tl.cdiv(context, SPLIT) - first_seen // SPLIT > 1:
        cells = (item.to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + m
        tl.store(partial_ptr + cells[:, None] * HEAD_SIZE + dims[None, :], acc, mask=is_element)
        tl.store(stats_ptr + cells * 2, best, mask=is_row)
        tl.store(stats_ptr + cells * 2 + 1, total, mask=is_row)
    else:
        out_at = ((rows * tl.num_programs(1) * GROUP + heads) * HEAD_SIZE)[:, None] + dims[None, :]
        tl.store(out_ptr + out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_element)


@triton.jit
def _combine_kernel(
    out_ptr, partial_ptr, stats_ptr, query_starts_ptr, context_lens_ptr, item_starts_ptr,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One folded row of a short chunk with several splits: its splits' results added up in order, BLOCK_S at once."""
    sequence, kv_head, m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence)
    num_rows = tl.load(query_starts_ptr + sequence + 1) - first_row
    context = tl.load(context_lens_ptr + sequence)
    num_splits, first_split = tl.cdiv(context, SPLIT), 0
    if WINDOW:
        first_split = tl.maximum(context - num_rows - WINDOW + 1, 0) // SPLIT
    if (num_rows > BLOCK_M // GROUP) | (m >= num_rows * GROUP) | (num_splits - first_split <= 1):
        return
    item = tl.load(item_starts_ptr + sequence) - first_split
    dims = tl.arange(0, BLOCK_D)
    best, total = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(first_split // BLOCK_S * BLOCK_S, num_splits, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        is_split = (splits < num_splits) & (splits >= first_split)
        cells = ((item + splits).to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + m
        split_best = tl.load(stats_ptr + cells * 2, mask=is_split, other=float("-inf"))
        split_total = tl.load(stats_ptr + cells * 2 + 1, mask=is_split, other=0.0)
        is_loaded = is_split[:, None] & (dims < HEAD_SIZE)[None, :]
        partial = tl.load(partial_ptr + cells[:, None] * HEAD_SIZE + dims[None, :], mask=is_loaded, other=0.0)
        new_best = tl.maximum(best, tl.max(split_best, 0))
        shift = new_best  # finite without a window: every row sees key 0, which is in the first split
        if WINDOW:
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights, shrink = tl.exp2(split_best - shift), tl.exp2(best - shift)
        total = total * shrink + tl.sum(weights * split_total, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * partial, 0)
        best = new_best
    row = (first_row + m // GROUP).to(tl.int64)
    out_at = (row * tl.num_programs(1) * GROUP + kv_head * GROUP + m % GROUP) * HEAD_SIZE + dims
    tl.store(out_ptr + out_at, (acc / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_SIZE)


@dataclass(frozen=True, slots=True)
class _Items:
    """Work items of one kind of chunk: `starts` [sequences] int32, each sequence's first item; `sequences`
    [items] int32, each item's sequence (past the last item: the number of sequences)."""

    starts: Tensor
    sequences: Tensor


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step's layers of one shape share. None: no chunk can be of that kind. `partial` [short items, kv_heads,
    rows, head_size] and `stats` [short items, kv_heads, rows, 2] hold what splits found; float32."""

    short: _Items | None
    long: _Items | None
    partial: Tensor
    stats: Tensor


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    *,
    kv_scales: KvScales | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As `kernels.paged_attention.paged_attention`, whose checks are done."""
    heads, kv_heads, head_size = query.shape[1], key_cache.shape[2], query.shape[2]
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    group = heads // kv_heads
    capability, is_quantized = major_capability(query.device), kv_scales is not None
    short_tile = decode_tile(query.dtype, head_size, group, is_quantized=is_quantized)
    long_tile = prompt_tile(query.dtype, head_size, group, capability, is_quantized=is_quantized)
    shape = (group, kv_heads, head_size, short_tile.rows, long_tile.rows, window)
    work = batch.launch_plans.get(shape)
    if work is None:
        work = batch.launch_plans[shape] = _plan_work(batch, *shape)
    for items, tile in ((work.long, long_tile), (work.short, short_tile)):
        if items is not None:
            _launch(
                out, query, key_cache, value_cache, kv_scales, batch, work, items, tile, scale, window or 0, softcap
            )
    if work.short is not None and batch.extent.max_context > SPLIT_TOKENS:
        num_rows = min(batch.extent.max_rows, short_tile.rows // group) * group
        _combine_kernel[(batch.num_sequences, kv_heads, num_rows)](
            out, work.partial, work.stats, batch.query_starts, batch.context_lens, work.short.starts,
            GROUP=group, HEAD_SIZE=head_size, SPLIT=SPLIT_TOKENS, BLOCK_M=short_tile.rows, BLOCK_S=COMBINED_SPLITS,
            BLOCK_D=power_of_2(head_size), WINDOW=window or 0, num_warps=4,
        )  # fmt: skip
    return out


def _launch(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, kv_scales: KvScales | None, batch: PagedBatch,
    work: _Work, items: _Items, tile: AttentionTile, scale: float, window: int, softcap: float | None,
) -> None:  # fmt: skip
    kv_heads, head_size = key_cache.shape[2:]
    key_scales, value_scales = (out, out) if kv_scales is None else (kv_scales.key, kv_scales.value)
    scale_strides = (0, 0, 0) if kv_scales is None else key_scales.stride()
    assert kv_scales is None or scale_strides == value_scales.stride()
    _paged_attention_kernel[(items.sequences.shape[0], kv_heads)](
        out, work.partial, work.stats, query, as_bits(key_cache), as_bits(value_cache), key_scales, value_scales,
        batch.query_starts, batch.context_lens, batch.block_tables, items.starts, items.sequences,
        batch.num_sequences, scale * LOG2_E, (softcap or 0.0) * LOG2_E, query.stride(0), query.stride(1),
        *key_cache.stride(), *value_cache.stride(), *scale_strides, batch.block_tables.stride(0),
        GROUP=query.shape[1] // kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=batch.block_size, SPLIT=SPLIT_TOKENS,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=power_of_2(head_size, MIN_DOT), USE_SPLITS=items is work.short,
        KIND=cache_kind(key_cache), WINDOW=window, USE_SOFTCAP=softcap is not None,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _plan_work(
    batch: PagedBatch, group: int, kv_heads: int, head_size: int, short_rows: int, long_rows: int, window: int | None
) -> _Work:
    """The items of `batch`, and room for what its splits find."""
    extent, num_sequences = batch.extent, batch.num_sequences
    lengths, contexts = batch.query_starts.diff(), batch.context_lens
    max_short, tile_queries = short_rows // group, long_rows // group
    is_long = lengths > max_short
    short = long = None
    num_splits = 0
    if extent.max_rows > max_short:
        counts = torch.where(is_long, (lengths + tile_queries - 1) // tile_queries, 0)
        long = _lay_out(counts, extent.total_rows // tile_queries + num_sequences)
    if extent.min_rows <= max_short:
        counts = (contexts + SPLIT_TOKENS - 1) // SPLIT_TOKENS
        num_splits = extent.total_context // SPLIT_TOKENS + num_sequences
        if window is not None:
            counts = counts - (contexts - lengths - window + 1).clamp(min=0) // SPLIT_TOKENS
            num_splits = min(num_splits, num_sequences * ((window + max_short - 2) // SPLIT_TOKENS + 2))
        counts = torch.where(is_long | (lengths <= 0), 0, counts)
        short = _lay_out(counts, num_splits)
    partial, stats = (
        torch.empty((num_splits, kv_heads, short_rows, width), dtype=torch.float32, device=contexts.device)
        for width in (head_size, 2)
    )
    return _Work(short, long, partial, stats)


def _lay_out(counts: Tensor, max_items: int) -> _Items:
    """`counts[s]` items for each sequence, one sequence after another; no wait for the device."""
    ends = counts.cumsum(0)
    items = torch.arange(max_items, device=counts.device)
    return _Items(
        starts=(ends - counts).to(torch.int32), sequences=torch.searchsorted(ends, items, right=True, out_int32=True)
    )

"""Triton kernels of `kernels.paged_attention`: one kernel for decode rows and for prompt chunks, and a combination.

A program serves one KV head and some rows of one sequence. The query heads that read that KV head are folded into
its rows (row m = query m // group, head m % group), so that keys and values are read once for all of them and a dot
product has at least the 16 rows that it needs. The grid is a list of work items:

* **short chunks** (folded rows fit into the least tile: decode rows, drafts): an item is a *split* of
  `SPLIT_TOKENS` keys; `_combine_kernel` then adds up a sequence's splits in order. A sequence of one split is written
  by its item.
* **long chunks**: an item is a tile of query rows, which walks all keys from position 0 to its last row's.

**A row's result does not depend on its batch.** Which kind a chunk is, where its splits begin and how its rows fall
into tiles follow from the chunk alone; tile sizes are those of the kind; keys are taken in tiles of constant size
from a split's start, and splits are combined in tiles of constant size from the first. There is no atomic addition.
Not promised: the same last bits for a prompt that is cut elsewhere (short and long chunks add in another order).

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
from kernels.launch import MIN_DOT, power_of_2

if TYPE_CHECKING:
    from kernels.paged_attention import PagedBatch


@triton.jit
def _attend(
    state, query, key_ptr, value_ptr, table_ptr, begin, end, limit, positions, scale,
    stride_key_block, stride_key_slot, stride_key_dim, stride_value_block, stride_value_slot, stride_value_dim,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_MASK: tl.constexpr,
):  # fmt: skip
    """Take keys begin .. end (of which those from `limit` on are none) into `state`: weighted values [M, D], the best
    score [M] (in powers of 2) and the sum of weights [M]. Without a mask all rows see all of these keys."""
    acc, best, total = state
    dims = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < limit if USE_MASK else tl.full((BLOCK_N,), 1, tl.int1)
        is_loaded = is_key[:, None] & (dims < HEAD_SIZE)[None, :]
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slots = keys % BLOCK_SIZE
        key_at = (blocks * stride_key_block + slots * stride_key_slot)[:, None] + dims[None, :] * stride_key_dim
        key = tl.load(key_ptr + key_at, mask=is_loaded, other=0.0)  # [N, D]
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale  # [M, N]
        if USE_MASK:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that sees none of the keys so far
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(best - shift)
        value_at = (blocks * stride_value_block + slots * stride_value_slot)[:, None] + dims[None, :] * stride_value_dim
        value = tl.load(value_ptr + value_at, mask=is_loaded, other=0.0)  # [N, D]
        acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    return acc, best, total


@triton.jit(do_not_specialize=["num_sequences"])  # else the numbers 1 and 16 would be compiled anew, while users wait
def _paged_attention_kernel(
    out_ptr, partial_ptr, stats_ptr, query_ptr, key_ptr, value_ptr,
    query_starts_ptr, context_lens_ptr, table_ptr, item_starts_ptr, item_sequences_ptr, num_sequences, scale,
    stride_query_row, stride_query_head, stride_key_block, stride_key_slot, stride_key_head, stride_key_dim,
    stride_value_block, stride_value_slot, stride_value_head, stride_value_dim, stride_table,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, USE_SPLITS: tl.constexpr,
):  # fmt: skip
    """One item and KV head. The longest tiles of a prompt come last in it, so those items are taken from the end."""
    item = tl.program_id(0) if USE_SPLITS else tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.load(item_sequences_ptr + item).to(tl.int64)
    if sequence >= num_sequences:
        return
    part = item - tl.load(item_starts_ptr + sequence)
    first_row = tl.load(query_starts_ptr + sequence)
    num_rows = tl.load(query_starts_ptr + sequence + 1) - first_row
    context = tl.load(context_lens_ptr + sequence)
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    first_query, first_key = (0, part * SPLIT) if USE_SPLITS else (part * QUERIES, 0)
    limit = tl.minimum(first_key + SPLIT if USE_SPLITS else context - num_rows + first_query + QUERIES, context)
    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    queries = first_query + m // GROUP
    is_row = (m < QUERIES * GROUP) & (queries < num_rows)
    is_element = is_row[:, None] & (dims < HEAD_SIZE)[None, :]
    rows, heads = (first_row + queries).to(tl.int64), kv_head * GROUP + m % GROUP
    query_at = (rows * stride_query_row + heads * stride_query_head)[:, None] + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=is_element, other=0.0)  # [M, D]
    state = (tl.zeros((BLOCK_M, BLOCK_D), tl.float32), tl.full((BLOCK_M,), float("-inf"), tl.float32),
             tl.zeros((BLOCK_M,), tl.float32))  # fmt: skip
    first_position = context - num_rows + first_query
    num_seen = tl.maximum(tl.minimum(first_position + 1, limit) - first_key, 0)  # by all rows
    masked_from = first_key + num_seen // BLOCK_N * BLOCK_N
    for USE_MASK in tl.static_range(2):
        state = _attend(
            state, query, key_ptr + kv_head * stride_key_head, value_ptr + kv_head * stride_value_head,
            table_ptr + sequence * stride_table, masked_from if USE_MASK else first_key,
            limit if USE_MASK else masked_from, limit, context - num_rows + queries, scale, stride_key_block,
            stride_key_slot, stride_key_dim, stride_value_block, stride_value_slot, stride_value_dim,
            HEAD_SIZE, BLOCK_SIZE, BLOCK_N, BLOCK_D, USE_MASK,
        )  # fmt: skip
    acc, best, total = state
    if USE_SPLITS and context > SPLIT:
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
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One folded row of a short chunk with several splits: its splits' results added up in order, BLOCK_S at once."""
    sequence, kv_head, m = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_row = tl.load(query_starts_ptr + sequence)
    num_rows = tl.load(query_starts_ptr + sequence + 1) - first_row
    num_splits = tl.cdiv(tl.load(context_lens_ptr + sequence), SPLIT)
    if (num_rows > BLOCK_M // GROUP) | (m >= num_rows * GROUP) | (num_splits <= 1):
        return
    item = tl.load(item_starts_ptr + sequence)
    dims = tl.arange(0, BLOCK_D)
    best, total = float("-inf"), 0.0
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, BLOCK_S):
        splits = start + tl.arange(0, BLOCK_S)
        is_split = splits < num_splits
        cells = ((item + splits).to(tl.int64) * tl.num_programs(1) + kv_head) * BLOCK_M + m
        split_best = tl.load(stats_ptr + cells * 2, mask=is_split, other=float("-inf"))
        split_total = tl.load(stats_ptr + cells * 2 + 1, mask=is_split, other=0.0)
        is_loaded = is_split[:, None] & (dims < HEAD_SIZE)[None, :]
        partial = tl.load(partial_ptr + cells[:, None] * HEAD_SIZE + dims[None, :], mask=is_loaded, other=0.0)
        new_best = tl.maximum(best, tl.max(split_best, 0))  # finite: every row sees key 0, which is in the first split
        weights, shrink = tl.exp2(split_best - new_best), tl.exp2(best - new_best)
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
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """As `kernels.paged_attention.paged_attention`, whose checks are done."""
    heads, kv_heads, head_size = query.shape[1], key_cache.shape[2], query.shape[2]
    if query.stride(2) != 1:
        query = query.contiguous()
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    group = heads // kv_heads
    short_tile = decode_tile(query.dtype, head_size, group)
    long_tile = prompt_tile(query.dtype, head_size, group, major_capability(query.device))
    shape = (group, kv_heads, head_size, short_tile.rows, long_tile.rows)
    work = batch.launch_plans.get(shape)
    if work is None:
        work = batch.launch_plans[shape] = _plan_work(batch, *shape)
    for items, tile in ((work.long, long_tile), (work.short, short_tile)):
        if items is not None:
            _launch(out, query, key_cache, value_cache, batch, work, items, tile, scale)
    if work.short is not None and batch.extent.max_context > SPLIT_TOKENS:
        num_rows = min(batch.extent.max_rows, short_tile.rows // group) * group
        _combine_kernel[(batch.num_sequences, kv_heads, num_rows)](
            out, work.partial, work.stats, batch.query_starts, batch.context_lens, work.short.starts,
            GROUP=group, HEAD_SIZE=head_size, SPLIT=SPLIT_TOKENS, BLOCK_M=short_tile.rows, BLOCK_S=COMBINED_SPLITS,
            BLOCK_D=power_of_2(head_size), num_warps=4,
        )  # fmt: skip
    return out


def _launch(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, work: _Work, items: _Items,
    tile: AttentionTile, scale: float,
) -> None:  # fmt: skip
    kv_heads, head_size = key_cache.shape[2:]
    _paged_attention_kernel[(items.sequences.shape[0], kv_heads)](
        out, work.partial, work.stats, query, key_cache, value_cache, batch.query_starts, batch.context_lens,
        batch.block_tables, items.starts, items.sequences, batch.num_sequences, scale * math.log2(math.e),
        query.stride(0), query.stride(1), *key_cache.stride(), *value_cache.stride(), batch.block_tables.stride(0),
        GROUP=query.shape[1] // kv_heads, HEAD_SIZE=head_size, BLOCK_SIZE=batch.block_size, SPLIT=SPLIT_TOKENS,
        BLOCK_M=tile.rows, BLOCK_N=tile.keys, BLOCK_D=power_of_2(head_size, MIN_DOT), USE_SPLITS=items is work.short,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _plan_work(batch: PagedBatch, group: int, kv_heads: int, head_size: int, short_rows: int, long_rows: int) -> _Work:
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
        counts = torch.where(is_long | (lengths <= 0), 0, (contexts + SPLIT_TOKENS - 1) // SPLIT_TOKENS)
        num_splits = extent.total_context // SPLIT_TOKENS + num_sequences
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

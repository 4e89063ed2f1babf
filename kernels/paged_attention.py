"""Causal attention of a ragged batch of chunks over the paged KV cache: chunked prefill and decode are one op.

For the query at position p of a sequence: softmax(scale · q · K[0..p]ᵀ) · V[0..p]. Keys and values are read from the
cache, those of the chunk itself too (write them first), so that a token's result does not depend on how its prompt
was cut. Queries are grouped over KV heads (GQA): query head h reads KV head h // (heads // kv_heads). With a *window*
it is K[p − window + 1 .. p]; of a chunk, blocks that lie wholly before its first row's window are not read, so that
they may have got other owners.

Layouts: query and result [rows, heads, head_size], the chunks one after another; caches are views [num_blocks,
block_size, kv_heads, head_size] with any strides; a block table row lists a sequence's blocks in token order.

When which path runs:

* CUDA: the Triton kernels in `kernels/gpu/paged_attention.py`; a row's result does not depend on its batch.
* CPU, float32: `_attend_in_tiles`. **A row's bits do not depend on its batch, its chunk or the block size**: keys are
  taken in tiles of constant size from position 0, each tile's products have the same inner and outer sizes whatever
  the context, a tile that a row cannot see adds exact zeros (exp(−inf)), the order of tiles is fixed, and query rows
  are padded to a multiple of 8. That last number is measured (torch 2.13.0, MKL 2024.2, 1 and 2 threads): batched
  products with 1, 2, 3, 5, 6, 7 or 9 rows differ in their last bits from the same rows among others; multiples of 8
  up to 512 rows over 1 to 64 products are all equal, for head sizes 16, 64, 128.
* CPU with softcapped scores: the same in every dtype, in float32.
* CPU, other dtypes: torch's fused attention. All decode rows of similar context go in one call, with the query heads
  of a KV head as its query rows: one query row a head is a trap (16 ms instead of 0.85 ms at 8 sequences of 1024).

A cache of another dtype than the query's is converted to it as it is read; one of int8 or fp8 is dequantized, which is
exact for float32 queries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.kv_quantize import KvScales, dequantize_kv
from kernels.launch import uses_triton
from kernels.softcap import softcap as softcap_scores

KEY_TILE = 128  # part of the numbers: changing it changes last bits
_ROW_MULTIPLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchExtent:
    """What the host knows of a batch's sizes without asking the device; launches are sized by it. `min_rows` must not
    be above, all others not below the truth, so that a captured graph may be replayed for smaller batches.

    Attributes:
        min_rows, max_rows: of one chunk. total_rows: of all chunks.
        max_context, total_context: keys of one sequence, and of all.
    """

    min_rows: int
    max_rows: int
    total_rows: int
    max_context: int
    total_context: int


class PagedBatch:
    """Which query rows belong to which sequence and where its keys lie; one for all layers of a step.

    Args:
        query_starts: [sequences + 1] int32; rows query_starts[s] .. query_starts[s + 1] are sequence s's chunk.
        context_lens: [sequences] int32; keys of each sequence, its chunk's included (the chunk is the last of them).
        block_tables: [sequences, any] int32; entries past a sequence's last block are never read.
        block_size: tokens in a block.
        extent: None: read from the tensors when a kernel wants it, which waits for the device.

    Attributes:
        launch_plans: what a launcher keeps for the other layers of the step.
    """

    def __init__(
        self,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        block_size: int,
        extent: BatchExtent | None = None,
    ) -> None:
        self.query_starts = query_starts
        self.context_lens = context_lens
        self.block_tables = block_tables
        self.block_size = block_size
        self.launch_plans: dict[Hashable, Any] = {}
        self._extent = extent
        self._groups: dict[int | None, list[_Group]] = {}

    @property
    def num_sequences(self) -> int:
        return int(self.context_lens.shape[0])

    @cached_property
    def extent(self) -> BatchExtent:
        """Bounds of the sizes, known on the host."""
        if self._extent is not None:
            return self._extent
        lengths = [rows for _, rows, _ in self.chunks()]
        contexts = [context for _, _, context in self.chunks()]
        return BatchExtent(
            min_rows=min(lengths, default=0),
            max_rows=max(lengths, default=0),
            total_rows=sum(lengths),
            max_context=max(contexts, default=0),
            total_context=sum(contexts),
        )

    def groups(self, window: int | None) -> list[_Group]:
        """Sequences that are computed together in layers with `window`."""
        if window not in self._groups:
            self._groups[window] = _make_groups(self, window)
        return self._groups[window]

    def chunks(self) -> list[tuple[int, int, int]]:
        """(first row, rows, context) of each sequence."""
        starts, contexts = self.query_starts.tolist(), self.context_lens.tolist()
        return [(a, b - a, c) for a, b, c in zip(starts, starts[1:], contexts, strict=False)]


@dataclass(frozen=True, slots=True)
class _Group:
    """`sequences` with `num_rows` query rows each and `num_keys` keys, whole tiles from a tile's begin on.

    Attributes:
        rows: which query rows: a slice, or [sequences · num_rows] int64 where they are not consecutive.
        clear: range of the keys that all rows see.
        block_ids: [sequences · blocks] int64, padded with whatever block.
        num_skipped: slots of the first block before the first key.
        is_visible: [sequences, num_rows, num_keys] bool, which keys a query row sees.
        stale: int64 indices into the gathered [sequences · blocks · block_size] slots that hold no key that is read.
    """

    num_sequences: int
    num_rows: int
    num_keys: int
    rows: slice | Tensor
    clear: range
    block_ids: Tensor
    num_skipped: int
    is_visible: Tensor
    stale: Tensor


def paged_attention(
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
    """Attention of each query row over its sequence's keys up to its own: [rows, heads, head_size], query's dtype.

    Args:
        query: [rows, heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size], any strides; of any float dtype, or of
            int8 or fp8.
        batch: the chunks; rows past its last chunk (padding) give zeros.
        scale: factor of the scores.
        kv_scales: of caches of int8 or fp8; None for others.
        window: keys that a row sees at most, its own the last of them; None: all up to its own.
        softcap: scores become softcap · tanh(score / softcap) (`kernels.softcap`); None: they stay.

    Raises:
        ValueError: heads is not a multiple of kv_heads, or sizes disagree.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if heads % kv_heads or query.shape[2] != key_cache.shape[3] or key_cache.shape[1] != batch.block_size:
        raise ValueError(f"query {list(query.shape)} does not fit a cache of {list(key_cache.shape)}")
    if uses_triton(query):
        from kernels.gpu.paged_attention import paged_attention_triton

        return paged_attention_triton(
            query, key_cache, value_cache, batch, scale, kv_scales=kv_scales, window=window, softcap=softcap
        )
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    is_tiled = query.dtype == torch.float32 or softcap is not None
    dtype = torch.float32 if is_tiled else query.dtype
    for group in batch.groups(window):
        grouped = query[group.rows].view(group.num_sequences, group.num_rows, heads, -1).to(dtype)
        keys = _gather(key_cache, None if kv_scales is None else kv_scales.key, group, dtype)
        values = _gather(value_cache, None if kv_scales is None else kv_scales.value, group, dtype)
        if is_tiled:
            attended = _attend_in_tiles(grouped, keys, values, group, scale, cap=softcap)
        else:
            attended = _attend_fused(grouped, keys, values, group, scale)
        out[group.rows] = attended.flatten(0, 1).to(out.dtype)
    return out


def paged_attention_reference(
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
    """The formula, one query row at a time, in float32."""
    if kv_scales is not None:
        key_cache, value_cache = dequantize_kv(key_cache, kv_scales.key), dequantize_kv(value_cache, kv_scales.value)
    out = torch.zeros_like(query)
    repeats = query.shape[1] // key_cache.shape[2]
    for sequence, (first, rows, context) in enumerate(batch.chunks()):
        blocks = batch.block_tables[sequence, : -(-context // batch.block_size)].long()
        blocks[: first_key(context - rows, window) // batch.block_size] = 0
        keys, values = (
            cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(repeats, dim=1)
            for cache in (key_cache, value_cache)
        )
        for row in range(rows):
            position = context - rows + row
            seen = slice(first_key(position, window), position + 1)
            scores = torch.einsum("hd,khd->hk", query[first + row].float(), keys[seen]) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            out[first + row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]).to(out.dtype)
    return out


def first_key(position: int, window: int | None) -> int:
    """Position of the first key that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def _attend_in_tiles(
    query: Tensor, keys: Tensor, values: Tensor, group: _Group, scale: float, *, cap: float | None
) -> Tensor:
    """Online softmax over constant key tiles; see the module's note for why each size is what it is.

    Args:
        query: [S, rows, heads, D]; keys, values: [S, num_keys, kv_heads, D].
    """
    num_sequences, num_rows, _, _ = query.shape
    kv_heads = keys.shape[2]
    folded = _fold(query, kv_heads)
    wanted = folded.shape[1]
    folded = F.pad(folded, (0, 0, 0, -wanted % _ROW_MULTIPLE)) * scale
    key_tiles, value_tiles = _to_tiles(keys), _to_tiles(values)
    # Not −inf: a row that sees nothing of its first tiles keeps its zeros, where −inf less −inf were NaN.
    best = folded.new_full((folded.shape[0], folded.shape[1], 1), torch.finfo(folded.dtype).min)
    total, mixed = torch.zeros_like(best), torch.zeros_like(folded)
    for tile in range(key_tiles.shape[0]):
        scores = torch.bmm(folded, key_tiles[tile].transpose(1, 2))
        if cap is not None:
            scores = softcap_scores(scores, cap)
        if tile * KEY_TILE < group.clear.start or (tile + 1) * KEY_TILE > group.clear.stop:
            is_hidden = ~group.is_visible[:, :, tile * KEY_TILE : (tile + 1) * KEY_TILE]
            view = scores[:, :wanted].view(num_sequences, kv_heads, num_rows, -1, KEY_TILE)
            view.masked_fill_(is_hidden[:, None, :, None], -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, shrink = torch.exp(scores - new_best), torch.exp(best - new_best)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, value_tiles[tile])
        best = new_best
    return _unfold((mixed / total)[:, :wanted], num_sequences, num_rows)


def _attend_fused(query: Tensor, keys: Tensor, values: Tensor, group: _Group, scale: float) -> Tensor:
    """torch's fused attention: decode rows with GQA folded into the query rows, or the chunk of one sequence."""
    num_sequences, num_rows, heads, size = query.shape
    kv_heads = keys.shape[2]
    if num_rows == 1:
        folded = query.view(num_sequences, kv_heads, -1, size)
        out = F.scaled_dot_product_attention(
            folded, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.is_visible[:, None], scale=scale
        )
        return out.reshape(num_sequences, 1, heads, size)
    split = query.view(num_rows, kv_heads, -1, size).permute(1, 2, 0, 3)
    shared = (kv_heads, heads // kv_heads, group.num_keys, size)
    own_keys, own_values = (x[0].transpose(0, 1)[:, None].expand(shared) for x in (keys, values))
    out = F.scaled_dot_product_attention(split, own_keys, own_values, attn_mask=group.is_visible[0], scale=scale)
    return out.permute(2, 0, 1, 3).reshape(1, num_rows, heads, size)


def _fold(query: Tensor, kv_heads: int) -> Tensor:
    """[S, rows, heads, D] → [S · kv_heads, rows · (heads // kv_heads), D]."""
    num_sequences, num_rows, heads, size = query.shape
    split = query.view(num_sequences, num_rows, kv_heads, heads // kv_heads, size)
    return split.transpose(1, 2).reshape(num_sequences * kv_heads, -1, size)


def _unfold(folded: Tensor, num_sequences: int, num_rows: int) -> Tensor:
    """The reverse of `_fold`."""
    size = folded.shape[-1]
    split = folded.view(num_sequences, -1, num_rows, folded.shape[1] // num_rows, size)
    return split.transpose(1, 2).reshape(num_sequences, num_rows, -1, size)


def _to_tiles(keys: Tensor) -> Tensor:
    """[S, num_keys, kv_heads, D] → [tiles, S · kv_heads, KEY_TILE, D], contiguous."""
    num_sequences, num_keys, kv_heads, size = keys.shape
    split = keys.view(num_sequences, num_keys // KEY_TILE, KEY_TILE, kv_heads, size).permute(1, 0, 3, 2, 4)
    return split.reshape(-1, num_sequences * kv_heads, KEY_TILE, size)


def _gather(cache: Tensor, scales: Tensor | None, group: _Group, dtype: torch.dtype) -> Tensor:
    """[S, num_keys, kv_heads, D] of `dtype` from the cache, zeros where there is no key (stale slots may hold NaN)."""
    if scales is None:
        blocks = cache.index_select(0, group.block_ids).to(dtype)
    else:
        numbers = cache.view(torch.int8).index_select(0, group.block_ids).view(cache.dtype)
        blocks = dequantize_kv(numbers, scales.index_select(0, group.block_ids)).to(dtype)
    slots = blocks.flatten(0, 1)
    slots.index_fill_(0, group.stale, 0)
    first = group.num_skipped
    return slots.view(group.num_sequences, -1, *cache.shape[2:])[:, first : first + group.num_keys]


def _make_groups(batch: PagedBatch, window: int | None) -> list[_Group]:
    """Decode rows of equal padded context together; every longer chunk by itself."""
    members: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, (first, rows, context) in enumerate(batch.chunks()):
        if rows:
            begin = first_key(context - rows, window) // KEY_TILE * KEY_TILE
            end = -(-context // KEY_TILE) * KEY_TILE
            members[rows, begin, end, sequence if rows > 1 else -1].append((sequence, first, context))
    return [_make_group(batch, window, key[0], range(*key[1:3]), found) for key, found in members.items()]


def _make_group(
    batch: PagedBatch, window: int | None, rows: int, keys: range, members: list[tuple[int, int, int]]
) -> _Group:
    """The group of `members` (sequence, first row, context), whose keys lie in `keys`."""
    device, size = batch.block_tables.device, batch.block_size
    blocks = range(keys.start // size, -(-keys.stop // size))
    sequences = torch.tensor([sequence for sequence, _, _ in members], device=device)
    contexts = torch.tensor([context for _, _, context in members], device=device)
    firsts = torch.tensor([first_key(context - rows, window) for _, _, context in members], device=device)
    positions = (contexts[:, None] - rows + torch.arange(rows, device=device))[:, :, None]
    tables = batch.block_tables.new_zeros((len(members), len(blocks))).long()
    known = min(blocks.stop, batch.block_tables.shape[1]) - blocks.start
    tables[:, :known] = batch.block_tables[sequences, blocks.start : blocks.start + known]
    starts = torch.arange(blocks.start, blocks.stop, device=device) * size
    is_owned = (starts < contexts[:, None]) & (starts + size > firsts[:, None])
    slots = torch.arange(blocks.start * size, blocks.stop * size, device=device)
    seen = torch.arange(keys.start, keys.stop, device=device)
    is_visible = seen <= positions
    if window is not None:
        is_visible &= seen > positions - window
    lengths = [context for _, _, context in members]
    return _Group(
        num_sequences=len(members),
        num_rows=rows,
        num_keys=len(keys),
        rows=_query_rows([first for _, first, _ in members], rows, device),
        clear=range(first_key(max(lengths) - 1, window) - keys.start, min(lengths) - rows + 1 - keys.start),
        block_ids=tables.where(is_owned, 0).flatten(),
        num_skipped=keys.start - blocks.start * size,
        is_visible=is_visible,
        stale=((slots >= contexts[:, None]) | (slots < firsts[:, None])).flatten().nonzero().flatten(),
    )


def _query_rows(firsts: list[int], count: int, device: torch.device) -> slice | Tensor:
    """`count` rows from each of `firsts` on; a slice, which copies nothing, if they follow one another."""
    start = firsts[0]
    if firsts == list(range(start, start + len(firsts) * count, count)):
        return slice(start, start + len(firsts) * count)
    return (torch.tensor(firsts, device=device)[:, None] + torch.arange(count, device=device)).flatten()

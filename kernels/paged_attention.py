"""Causal attention of a ragged batch of chunks over the paged KV cache: chunked prefill and decode are one op.

For the query at position p of a sequence: softmax(scale · q · K[0..p]ᵀ) · V[0..p]. Keys and values are read from the
cache, those of the chunk itself too (write them first), so that a token's result does not depend on how its prompt
was cut. Queries are grouped over KV heads (GQA): query head h reads KV head h // (heads // kv_heads).

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
* CPU, other dtypes: torch's fused attention. All decode rows of similar context go in one call, with the query heads
  of a KV head as its query rows: one query row a head is a trap (16 ms instead of 0.85 ms at 8 sequences of 1024).
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

from kernels.launch import uses_triton

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

    @cached_property
    def groups(self) -> list[_Group]:
        """Sequences that are computed together."""
        return _make_groups(self)

    def chunks(self) -> list[tuple[int, int, int]]:
        """(first row, rows, context) of each sequence."""
        starts, contexts = self.query_starts.tolist(), self.context_lens.tolist()
        return [(a, b - a, c) for a, b, c in zip(starts, starts[1:], contexts, strict=False)]


@dataclass(frozen=True, slots=True)
class _Group:
    """`sequences` with `num_rows` query rows each and keys padded to `num_keys`.

    Attributes:
        rows: which query rows: a slice, or [sequences · num_rows] int64 where they are not consecutive.
        first_position: of any query row; all rows see the keys up to there.
        block_ids: [sequences · blocks] int64, padded with whatever block.
        is_visible: [sequences, num_rows, num_keys] bool, which keys a query row sees.
        stale: int64 indices into the gathered [sequences · blocks · block_size] slots that hold no key.
    """

    num_sequences: int
    num_rows: int
    num_keys: int
    rows: slice | Tensor
    first_position: int
    block_ids: Tensor
    is_visible: Tensor
    stale: Tensor


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """Attention of each query row over its sequence's keys up to its own: [rows, heads, head_size], query's dtype.

    Args:
        query: [rows, heads, head_size].
        key_cache, value_cache: [num_blocks, block_size, kv_heads, head_size], any strides, query's dtype.
        batch: the chunks; rows past its last chunk (padding) give zeros.
        scale: factor of the scores.

    Raises:
        ValueError: heads is not a multiple of kv_heads, or sizes disagree.
    """
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    if heads % kv_heads or query.shape[2] != key_cache.shape[3] or key_cache.shape[1] != batch.block_size:
        raise ValueError(f"query {list(query.shape)} does not fit a cache of {list(key_cache.shape)}")
    if uses_triton(query):
        from kernels.gpu.paged_attention import paged_attention_triton

        return paged_attention_triton(query, key_cache, value_cache, batch, scale)
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    attend = _attend_in_tiles if query.dtype == torch.float32 else _attend_fused
    for group in batch.groups:
        grouped = query[group.rows].view(group.num_sequences, group.num_rows, heads, -1)
        keys = _gather(key_cache, group)
        values = _gather(value_cache, group)
        out[group.rows] = attend(grouped, keys, values, group, scale).flatten(0, 1)
    return out


def paged_attention_reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PagedBatch, scale: float
) -> Tensor:
    """The formula, one query row at a time, in float32."""
    out = torch.zeros_like(query)
    repeats = query.shape[1] // key_cache.shape[2]
    for sequence, (first, rows, context) in enumerate(batch.chunks()):
        blocks = batch.block_tables[sequence, : -(-context // batch.block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:context].float().repeat_interleave(repeats, dim=1)
            for cache in (key_cache, value_cache)
        )
        for row in range(rows):
            seen = context - rows + row + 1
            scores = torch.einsum("hd,khd->hk", query[first + row].float(), keys[:seen]) * scale
            out[first + row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[:seen]).to(out.dtype)
    return out


def _attend_in_tiles(query: Tensor, keys: Tensor, values: Tensor, group: _Group, scale: float) -> Tensor:
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
    best = folded.new_full((folded.shape[0], folded.shape[1], 1), -torch.inf)
    total, mixed = torch.zeros_like(best), torch.zeros_like(folded)
    for tile in range(key_tiles.shape[0]):
        scores = torch.bmm(folded, key_tiles[tile].transpose(1, 2))
        if group.first_position < (tile + 1) * KEY_TILE - 1:
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


def _gather(cache: Tensor, group: _Group) -> Tensor:
    """[S, num_keys, kv_heads, D] from the cache, zeros where there is no key (stale slots may hold NaN)."""
    blocks = cache.index_select(0, group.block_ids)
    slots = blocks.flatten(0, 1)
    slots.index_fill_(0, group.stale, 0)
    return slots.view(group.num_sequences, -1, *cache.shape[2:])[:, : group.num_keys]


def _make_groups(batch: PagedBatch) -> list[_Group]:
    """Decode rows of equal padded context together; every longer chunk by itself."""
    members: dict[tuple[int, int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, (first, rows, context) in enumerate(batch.chunks()):
        if rows:
            num_keys = -(-context // KEY_TILE) * KEY_TILE
            members[rows, num_keys, sequence if rows > 1 else -1].append((sequence, first, context))
    return [_make_group(batch, rows, num_keys, found) for (rows, num_keys, _), found in members.items()]


def _make_group(batch: PagedBatch, rows: int, num_keys: int, members: list[tuple[int, int, int]]) -> _Group:
    device, num_blocks = batch.block_tables.device, -(-num_keys // batch.block_size)
    sequences = torch.tensor([sequence for sequence, _, _ in members], device=device)
    contexts = torch.tensor([context for _, _, context in members], device=device)
    positions = contexts[:, None] - rows + torch.arange(rows, device=device)
    tables = batch.block_tables.new_zeros((len(members), num_blocks)).long()
    known = min(num_blocks, batch.block_tables.shape[1])
    tables[:, :known] = batch.block_tables[sequences, :known]
    slots = torch.arange(num_blocks * batch.block_size, device=device)
    is_owned = torch.arange(num_blocks, device=device) * batch.block_size < contexts[:, None]
    return _Group(
        num_sequences=len(members),
        num_rows=rows,
        num_keys=num_keys,
        rows=_query_rows([first for _, first, _ in members], rows, device),
        first_position=min(context for _, _, context in members) - rows,
        block_ids=tables.where(is_owned, 0).flatten(),
        is_visible=torch.arange(num_keys, device=device) <= positions[:, :, None],
        stale=(slots >= contexts[:, None]).flatten().nonzero().flatten(),
    )


def _query_rows(firsts: list[int], count: int, device: torch.device) -> slice | Tensor:
    """`count` rows from each of `firsts` on; a slice, which copies nothing, if they follow one another."""
    start = firsts[0]
    if firsts == list(range(start, start + len(firsts) * count, count)):
        return slice(start, start + len(firsts) * count)
    return (torch.tensor(firsts, device=device)[:, None] + torch.arange(count, device=device)).flatten()

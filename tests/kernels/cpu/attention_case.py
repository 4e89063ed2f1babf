"""Makes batches over a paged cache for the tests of the C attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.cpu.attention import AttentionShape, paged_attention
from kernels.cpu.kv_cache import KvShape, pack_blocks
from kernels.cpu.program import Pool
from kernels.kv_quantize import KvScales, is_quantized, quantize_kv
from kernels.paged_attention import PagedBatch, paged_attention_reference

SCALE = 0.125
GARBAGE = 0x7F  # NaN of fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries (scaled, as `rotary_kv` leaves them) and caches of a batch; all slots that hold no key hold NaN (of a
    quantized cache their scales do)."""

    query: Tensor
    keys: Tensor
    values: Tensor
    batch: PagedBatch
    scales: KvScales | None = None
    window: int | None = None

    @property
    def kv(self) -> KvShape:
        """Of the caches."""
        _, block_size, kv_heads, head_size = self.keys.shape
        return KvShape(kv_heads=kv_heads, head_size=head_size, block_size=block_size, dtype=self.keys.dtype)

    def pack(self) -> Tensor:
        """Blocks as the kernels read them."""
        return pack_blocks(self.keys, self.values, self.kv, self.scales)

    def run(self, pool: Pool, out: Tensor | None = None) -> Tensor:
        """[rows, heads, head_size] float32, or into `out`."""
        _, heads, size = self.query.shape
        result = torch.full((len(self.query), heads * size), torch.nan) if out is None else out
        shape = AttentionShape(heads=heads, kv=self.kv, window=self.window)
        paged_attention(pool, shape, self.query, cache=self.pack(), batch=self.batch, out=result)
        return result.unflatten(1, (-1, size))

    def reference(self) -> Tensor:
        """The formula in float32. log2(e) is in the queries already."""
        query, keys, values = (x.float() for x in (self.query, self.keys, self.values))
        return paged_attention_reference(
            query, keys, values, self.batch, math.log(2.0), kv_scales=self.scales, window=self.window
        )

    def part(self, sequence: int, rows: slice) -> Case:
        """`rows` of one sequence's chunk, as a batch of its own in which only the keys they see are known."""
        first, length, context = self.batch.chunks()[sequence]
        start, stop, _ = rows.indices(length)
        batch = PagedBatch(
            torch.tensor([0, stop - start]),
            torch.tensor([context - length + stop]),
            self.batch.block_tables[sequence : sequence + 1],
            self.batch.block_size,
        )
        return replace(self, query=self.query[first + start : first + stop], batch=batch)


def make_case(
    contexts: list[int],
    chunk_lens: list[int],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    shuffle_seed: int = 0,
) -> Case:
    """Sequences whose contents depend on their index only, in blocks shuffled by `shuffle_seed`."""
    max_blocks = -(-max(contexts) // block_size)
    num_blocks = max_blocks * len(contexts) + 3
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(shuffle_seed))
    caches, scales = _stale(num_blocks, block_size, kv_heads, head_size, dtype)
    query_dtype = torch.float32 if scales else dtype
    tables = torch.full((len(contexts), max_blocks + 1), 2**30, dtype=torch.int32)
    queries = []
    for i, (context, length) in enumerate(zip(contexts, chunk_lens, strict=True)):
        generator = torch.Generator().manual_seed(100 + i)
        blocks = ids[i * max_blocks : i * max_blocks + -(-context // block_size)]
        tables[i, : len(blocks)] = blocks.int()
        positions = torch.arange(context)
        slots = blocks[positions // block_size], positions % block_size
        for half, cache in enumerate(caches):
            content = torch.randn(context, kv_heads, head_size, generator=generator)
            if scales:
                numbers, scales[half][slots] = quantize_kv(content, dtype)
                cache.view(torch.int8)[slots] = numbers.view(torch.int8)
            else:
                cache[slots] = content.to(dtype)
        whole = torch.randn(context, kv_heads * group, head_size, generator=generator)
        queries.append((whole[context - length :] * SCALE * math.log2(math.e)).to(query_dtype))
    starts = torch.tensor([0, *torch.tensor(chunk_lens).cumsum(0).tolist()], dtype=torch.int32)
    batch = PagedBatch(starts, torch.tensor(contexts, dtype=torch.int32), tables, block_size)
    made = KvScales(scales[0], scales[1]) if scales else None
    return Case(query=torch.cat(queries), keys=caches[0], values=caches[1], batch=batch, scales=made)


def _stale(
    num_blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Caches of keys and of values, and their scales if there are any, that hold nothing."""
    shape = (num_blocks, block_size, kv_heads)
    if not is_quantized(dtype):
        return [torch.full((*shape, head_size), torch.nan, dtype=dtype) for _ in range(2)], []
    numbers = [torch.full((*shape, head_size), GARBAGE, dtype=torch.int8).view(dtype) for _ in range(2)]
    return numbers, [torch.full(shape, torch.nan, dtype=torch.float16) for _ in range(2)]

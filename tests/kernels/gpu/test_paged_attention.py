"""Triton's paged attention against its reference, and its promise that a row depends on its own sequence only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.autotune import COMBINED_SPLITS, SPLIT_TOKENS
from kernels.gpu.paged_attention import paged_attention_triton
from kernels.kv_quantize import LIMITS, KvScales, quantize_kv
from kernels.paged_attention import BatchExtent, PagedBatch, paged_attention_reference
from tests.kernels.gpu.device import DEVICE, assert_near, map_blocks, needs_device

pytestmark = needs_device
SCALE = 0.125


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A batch over one cache [num_blocks, 2, block_size, kv_heads, head_size]; blocks that nobody owns, and slots past
    each context, hold NaN."""

    query: Tensor
    blocks: Tensor
    batch: PagedBatch
    scales: Tensor | None = None
    window: int | None = None
    softcap: float | None = None

    def run(self) -> Tensor:
        return paged_attention_triton(
            self.query, self.blocks[:, 0], self.blocks[:, 1], self.batch, SCALE, kv_scales=halves(self.scales),
            window=self.window, softcap=self.softcap,
        )  # fmt: skip

    def reference(self) -> Tensor:
        batch = self.batch
        tensors = (batch.query_starts.cpu(), batch.context_lens.cpu(), batch.block_tables.cpu())
        moved = PagedBatch(*tensors, batch.block_size)
        blocks = self.blocks.cpu()
        scales = None if self.scales is None else halves(self.scales.cpu())
        return paged_attention_reference(
            self.query.cpu(), blocks[:, 0], blocks[:, 1], moved, SCALE, kv_scales=scales, window=self.window,
            softcap=self.softcap,
        )  # fmt: skip


def halves(scales: Tensor | None) -> KvScales | None:
    """Of [num_blocks, 2, block_size, kv_heads]."""
    return None if scales is None else KvScales(scales[:, 0], scales[:, 1])


def quantize(case: Case, dtype: torch.dtype) -> Case:
    """The same batch over a cache of int8 or fp8; what was NaN has whatever number and a NaN for a scale."""
    numbers, scales = quantize_kv(case.blocks.cpu(), dtype)
    stale = scales.isnan()
    numbers.view(torch.int8)[stale] = 127
    scales = scales.transpose(2, 3).contiguous().transpose(2, 3)
    return replace(case, blocks=numbers.to(DEVICE), scales=scales.to(DEVICE))


def make_case(
    chunks: list[tuple[int, int]],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffle_seed: int = 0,
    names: list[int] | None = None,
) -> Case:
    """Sequences of (context, rows of the chunk) whose contents depend on their name only, which is their index unless
    `names` says otherwise. Queries are a view of a wider tensor, as those of a fused projection are."""
    max_blocks = -(-max(context for context, _ in chunks) // block_size)
    num_blocks = max_blocks * len(chunks) + 3
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(shuffle_seed))
    blocks = torch.full((num_blocks, 2, block_size, kv_heads, head_size), torch.nan, dtype=dtype)
    tables = torch.full((len(chunks), max_blocks + 1), 2**30, dtype=torch.int32)
    queries = []
    for i, (context, rows) in enumerate(chunks):
        generator = torch.Generator().manual_seed(100 + (names[i] if names else i))
        own = ids[i * max_blocks : i * max_blocks + -(-context // block_size)]
        tables[i, : len(own)] = own.int()
        positions = torch.arange(context)
        for half in range(2):
            values = torch.randn(context, kv_heads, head_size, generator=generator).to(dtype)
            blocks[own[positions // block_size], half, positions % block_size] = values
        queries.append(torch.randn(rows, kv_heads * group + 3, head_size, generator=generator).to(dtype))
    starts = torch.tensor([0, *torch.tensor([rows for _, rows in chunks]).cumsum(0)], dtype=torch.int32)
    contexts = torch.tensor([context for context, _ in chunks], dtype=torch.int32)
    batch = PagedBatch(starts.to(DEVICE), contexts.to(DEVICE), tables.to(DEVICE), block_size)
    query = torch.cat(queries).to(DEVICE)[:, : kv_heads * group]
    return Case(query=query, blocks=blocks.to(DEVICE), batch=batch)


@pytest.mark.parametrize(
    ("dtype", "group", "head_size", "block_size"),
    [
        (torch.bfloat16, 1, 64, 8),
        (torch.bfloat16, 4, 128, 16),
        (torch.bfloat16, 7, 64, 32),
        (torch.bfloat16, 8, 128, 8),
        (torch.float16, 4, 64, 16),
        (torch.float16, 7, 128, 32),
        (torch.float32, 3, 80, 24),
        (torch.float32, 8, 64, 16),
    ],
)
def test_equals_reference(dtype: torch.dtype, group: int, head_size: int, block_size: int) -> None:
    """Decode rows, drafts, whole prompts and later chunks of awkward sizes should equal the formula."""
    contexts = [1, 63, 100, block_size - 1, block_size, block_size + 1, SPLIT_TOKENS + 1]
    chunks = [*((context, 1) for context in contexts), (100, 2), (63, 63), (100, 33), (block_size + 1, block_size + 1)]
    case = make_case(chunks, group=group, head_size=head_size, block_size=block_size, dtype=dtype, kv_heads=1)
    assert_near(case.reference(), case.run())


def test_tiles_and_splits_end_anywhere() -> None:
    """Contexts and chunks one below, at and above a split's or a tile's end should equal the formula."""
    around = [(SPLIT_TOKENS + i, 1) for i in (-1, 0, 1)] + [(2 * SPLIT_TOKENS + 1, 3)]
    tiles = [(31, 31), (32, 32), (33, 33), (SPLIT_TOKENS + 7, 65)]
    case = make_case(around + tiles, kv_heads=1, dtype=torch.float16)
    assert_near(case.reference(), case.run())


@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 40), (torch.float16, None)])
def test_softcapped_scores(dtype: torch.dtype, window: int | None) -> None:
    """Capped scores should give what the formula gives, in decode rows and prompts, with a window and over int8; plain
    ones should not."""
    chunks = [(1, 1), (SPLIT_TOKENS + 9, 2), (100, 33)]
    plain = replace(make_case(chunks, kv_heads=1, dtype=dtype), window=window)
    plain = replace(plain, query=plain.query * 6)
    case = replace(plain, softcap=3.0)
    assert_near(case.reference(), case.run())
    assert (plain.reference().float() - case.reference().float()).abs().max() > 0.2
    if dtype == torch.float16:
        quantized = quantize(case, torch.int8)
        assert_near(quantized.reference(), quantized.run())


def test_long_contexts_are_combined() -> None:
    """More splits than the combination takes at once should equal the formula."""
    case = make_case([(SPLIT_TOKENS * COMBINED_SPLITS + 1, 2), (5, 1)], kv_heads=1, dtype=torch.float16)
    assert_near(case.reference(), case.run())


def test_alone_equals_in_a_batch() -> None:
    """A sequence should get the same bits alone and among others, whatever those are."""
    chunks, sizes = [(300, 1), (17, 1), (100, 40), (270, 3)], {"group": 7, "kv_heads": 1, "dtype": torch.bfloat16}
    together = make_case(chunks, **sizes).run().split([rows for _, rows in chunks])
    for i, chunk in enumerate(chunks):
        assert torch.equal(together[i], make_case([chunk], names=[i], **sizes).run())


def test_blocks_may_lie_anywhere() -> None:
    """Another order of blocks, and another block size, should give equal results."""
    chunks = [(100, 1), (33, 33), (260, 3)]
    expected = make_case(chunks, kv_heads=1).run()
    assert torch.equal(expected, make_case(chunks, kv_heads=1, shuffle_seed=9).run())
    assert torch.equal(expected, make_case(chunks, kv_heads=1, block_size=8).run())


def test_block_ids_beyond_32_bits() -> None:
    """A block whose offset in elements does not fit into 32 bits should be read where it lies."""
    block = (2, 16, 2, 64)
    far = 2**31 // 4096 + 5
    case = make_case([(20, 1), (40, 33)])
    blocks = map_blocks(far + case.blocks.shape[0], *block)
    blocks[far:] = case.blocks.bfloat16()
    batch = case.batch
    is_known = batch.block_tables < 2**30
    tables = torch.where(is_known, batch.block_tables + far, batch.block_tables)
    moved = Case(
        query=case.query.bfloat16(),
        blocks=blocks,
        batch=PagedBatch(batch.query_starts, batch.context_lens, tables, batch.block_size),
    )
    near = replace(case, query=moved.query, blocks=case.blocks.bfloat16())
    assert torch.equal(near.run(), moved.run())


@pytest.mark.parametrize("cache_dtype", list(LIMITS))
@pytest.mark.parametrize(
    ("dtype", "group", "head_size", "block_size"),
    [(torch.bfloat16, 7, 64, 16), (torch.float16, 1, 80, 8), (torch.float32, 4, 64, 24)],
)
def test_quantized_equals_reference(
    cache_dtype: torch.dtype, dtype: torch.dtype, group: int, head_size: int, block_size: int
) -> None:
    """Decode rows, prompts and later chunks over int8 and fp8 should equal the formula over what these stand for, and
    have the same bits alone and in other blocks."""
    chunks = [(1, 1), (63, 1), (100, 40), (block_size + 1, block_size + 1), (SPLIT_TOKENS + 9, 2)]
    sizes = {"group": group, "kv_heads": 2, "head_size": head_size, "block_size": block_size, "dtype": dtype}
    case = quantize(make_case(chunks, **sizes), cache_dtype)
    out = case.run()
    assert_near(case.reference(), out)
    assert torch.equal(out, quantize(make_case(chunks, shuffle_seed=5, **sizes), cache_dtype).run())
    alone = quantize(make_case(chunks[2:3], names=[2], **sizes), cache_dtype).run()
    assert torch.equal(out[2:42], alone)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_of_another_float_dtype(cache_dtype: torch.dtype) -> None:
    """Keys and values should be converted to the query's dtype as they are read."""
    case = make_case([(100, 40), (17, 1)])
    case = replace(case, blocks=case.blocks.to(cache_dtype))
    assert_near(case.reference(), case.run())


def test_padding_rows_give_zeros() -> None:
    """Rows past the last chunk belong to nobody and should be zero."""
    case = make_case([(20, 1), (40, 33)])
    query = torch.cat((case.query, torch.full((3, *case.query.shape[1:]), torch.nan, device=DEVICE)))
    out = replace(case, query=query).run()
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    assert torch.equal(out[:-3], case.run())


def test_bounds_may_be_wide() -> None:
    """A launch sized for larger batches, as a captured graph's is, should give the same bits; a chunk of no rows (a
    sequence that is not there) should do no harm."""
    chunks = [(300, 1), (40, 33), (16, 0)]
    case = make_case(chunks)
    extent = BatchExtent(min_rows=0, max_rows=64, total_rows=200, max_context=1000, total_context=3000)
    batch = PagedBatch(
        case.batch.query_starts, case.batch.context_lens, case.batch.block_tables, case.batch.block_size, extent
    )
    assert torch.equal(case.run(), replace(case, batch=batch).run())

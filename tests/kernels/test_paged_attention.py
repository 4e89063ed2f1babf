"""Paged attention against its reference, and its promise that a row depends on its own sequence only.

Block ids whose offsets overflow int32 would need a cache of more than 2³¹ elements (8 GiB): not tested here; offsets
are computed by torch's own 64-bit indexing.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import KEY_TILE, PagedBatch, paged_attention, paged_attention_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SIZES = (1, 15, 16, 17, 63, 100, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Query and caches of a batch; blocks that nobody owns, and slots past each context, hold NaN."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PagedBatch

    def run(self) -> Tensor:
        return paged_attention(self.query, self.key_cache, self.value_cache, self.batch, 0.125)

    def reference(self) -> Tensor:
        return paged_attention_reference(self.query, self.key_cache, self.value_cache, self.batch, 0.125)


def make_case(
    contexts: list[int],
    chunk_lens: list[int],
    *,
    group: int = 4,
    kv_heads: int = 2,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    shuffle_seed: int = 0,
) -> Case:
    """Sequences whose contents depend on their index only, in blocks shuffled by `shuffle_seed`."""
    size, max_blocks = 64, -(-max(contexts) // block_size)
    num_blocks = max_blocks * len(contexts) + 3
    ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(shuffle_seed))
    caches = [torch.full((num_blocks, block_size, kv_heads, size), torch.nan, dtype=dtype) for _ in range(2)]
    tables = torch.full((len(contexts), max_blocks + 1), 2**30, dtype=torch.int32)
    queries = []
    for i, (context, length) in enumerate(zip(contexts, chunk_lens, strict=True)):
        generator = torch.Generator().manual_seed(100 + i)
        blocks = ids[i * max_blocks : i * max_blocks + -(-context // block_size)]
        tables[i, : len(blocks)] = blocks.int()
        positions = torch.arange(context)
        for cache in caches:
            values = torch.randn(context, kv_heads, size, generator=generator).to(dtype)
            cache[blocks[positions // block_size], positions % block_size] = values
        whole = torch.randn(context, kv_heads * group, size, generator=generator).to(dtype)
        queries.append(whole[context - length :])
    starts = torch.tensor([0, *torch.tensor(chunk_lens).cumsum(0).tolist()], dtype=torch.int32)
    batch = PagedBatch(starts, torch.tensor(contexts, dtype=torch.int32), tables, block_size)
    return Case(query=torch.cat(queries), key_cache=caches[0], value_cache=caches[1], batch=batch)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("block_size", [8, 16, 32, 24])
def test_equals_reference(dtype: torch.dtype, group: int, block_size: int) -> None:
    """Mixed decode rows, whole prompts and later chunks of all awkward sizes should equal the formula."""
    contexts = [*SIZES, *SIZES, *SIZES]
    lengths = [*(1 for _ in SIZES), *SIZES, *((size + 1) // 2 for size in SIZES)]
    case = make_case(contexts, lengths, group=group, block_size=block_size, dtype=dtype)
    torch.testing.assert_close(case.run(), case.reference(), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_softcapped_scores_equal_reference(dtype: torch.dtype) -> None:
    """Capped scores should give what the formula gives, in any dtype and with a window; plain ones should not."""
    case = make_case([1, 17, 200, 129], [1, 9, 1, 129], dtype=dtype)
    arguments = (case.query * 6, case.key_cache, case.value_cache, case.batch, 0.125)
    for window in (None, 40):
        actual = paged_attention(*arguments, window=window, softcap=3.0)
        expected = paged_attention_reference(*arguments, window=window, softcap=3.0)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])
        plain = paged_attention_reference(*arguments, window=window)
        assert (plain - expected).abs().max() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_alone_equals_in_a_batch(group: int) -> None:
    """In float32 a sequence should get the same bits alone and among others."""
    contexts, lengths = [200, 17, 130, 1, 200, 64, 90], [1, 1, 40, 1, 200, 1, 1]
    whole = make_case(contexts, lengths, group=group)
    together = whole.run().split(lengths)
    for i, length in enumerate(lengths):
        first = sum(lengths[:i])
        batch = PagedBatch(
            torch.tensor([0, length]), torch.tensor([contexts[i]]), whole.batch.block_tables[i : i + 1], 16
        )
        query = whole.query[first : first + length]
        alone = paged_attention(query, whole.key_cache, whole.value_cache, batch, 0.125)
        assert torch.equal(together[i], alone)


def test_chunks_equal_the_whole() -> None:
    """In float32 the rows of a prompt should have the same bits in whatever chunks it is computed."""
    context = 290
    whole = make_case([context], [context]).run()
    for chunk in (1, 7, 16, 100):
        for end in range(chunk, context, chunk * 5):
            part = make_case([context], [context])
            batch = PagedBatch(
                torch.tensor([0, chunk]), torch.tensor([end]), part.batch.block_tables, part.batch.block_size
            )
            rows = slice(end - chunk, end)
            out = paged_attention(part.query[rows], part.key_cache, part.value_cache, batch, 0.125)
            assert torch.equal(whole[rows], out)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_blocks_may_lie_anywhere(dtype: torch.dtype) -> None:
    """Another order of blocks, and in float32 another block size, should give equal results."""
    contexts, lengths = [100, 33, 260], [1, 33, 7]
    expected = make_case(contexts, lengths, dtype=dtype).run()
    assert torch.equal(expected, make_case(contexts, lengths, dtype=dtype, shuffle_seed=9).run())
    for block_size in (8, 32, 256):
        actual = make_case(contexts, lengths, dtype=dtype, block_size=block_size).run()
        assert dtype != torch.float32 or torch.equal(expected, actual)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])


def test_padding_rows_give_zeros() -> None:
    """Rows past the last chunk belong to nobody and should be zero."""
    case = make_case([20, 5], [1, 1])
    query = torch.cat((case.query, torch.full((3, *case.query.shape[1:]), torch.nan)))
    out = paged_attention(query, case.key_cache, case.value_cache, case.batch, 0.125)
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert torch.equal(out[:2], case.run())


def test_wrong_sizes_are_refused() -> None:
    """Heads that are no multiple of the KV heads, or another block size, should be refused."""
    case = make_case([20], [1])
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(case.query[:, :7], case.key_cache, case.value_cache, case.batch, 1.0)
    other = PagedBatch(case.batch.query_starts, case.batch.context_lens, case.batch.block_tables, 8)
    with pytest.raises(ValueError, match="does not fit"):
        paged_attention(case.query, case.key_cache, case.value_cache, other, 1.0)

"""Torch attention over a window: against the formula, which is transformers', without a look at what fell out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from kernels.paged_attention import KEY_TILE, PagedBatch, first_key, paged_attention, paged_attention_reference
from tests.kernels.test_paged_attention import TOLERANCE, Case, make_case
from tests.kernels.windows import free_early


@pytest.mark.parametrize("window", [1, 2, 17, 40])
def test_the_window_is_that_of_transformers(window: int) -> None:
    """Each query should see the keys that transformers' mask lets it see."""
    is_seen = sliding_window_causal_mask_function(window)
    for position in range(50):
        expected = [key for key in range(50) if is_seen(0, 0, torch.tensor(position), torch.tensor(key))]
        assert expected == list(range(first_key(position, window), position + 1))


def attend(case: Case, window: int) -> torch.Tensor:
    batch = free_early(case.batch, window, len(case.key_cache))
    return paged_attention(case.query, case.key_cache, case.value_cache, batch, 0.125, window=window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("window", "block_size"), [(1, 16), (17, 8), (KEY_TILE, 24), (KEY_TILE + 1, 16), (200, 32), (1000, 16)]
)
def test_equals_reference(dtype: torch.dtype, window: int, block_size: int) -> None:
    """Decode rows, whole prompts and later chunks should equal the formula, with blocks of NaN in place of those that
    fell out of the window."""
    case = make_case([300, 17, 290, 1, 130, 300], [1, 1, 30, 1, 130, 1], block_size=block_size, dtype=dtype)
    expected = paged_attention_reference(case.query, case.key_cache, case.value_cache, case.batch, 0.125, window=window)
    torch.testing.assert_close(attend(case, window), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("window", [17, KEY_TILE + 1])
def test_chunks_equal_the_whole(window: int) -> None:
    """In float32 the rows of a prompt should have the same bits in whatever chunks it is computed, and in a batch."""
    context = 290
    case = make_case([context], [context])
    whole = attend(case, window)
    for chunk in (1, 7, 100):
        for end in range(chunk, context, chunk * 5 + 20):
            batch = PagedBatch(torch.tensor([0, chunk]), torch.tensor([end]), case.batch.block_tables, 16)
            part = replace(case, query=case.query[end - chunk : end], batch=batch)
            assert torch.equal(whole[end - chunk : end], attend(part, window))
    many = make_case([290, 200, 17, 290], [1, 40, 17, 1])
    together = attend(many, window).split([1, 40, 17, 1])
    alone = PagedBatch(torch.tensor([0, 40]), torch.tensor([200]), many.batch.block_tables[1:2], 16)
    assert torch.equal(together[1], attend(replace(many, query=many.query[1:41], batch=alone), window))

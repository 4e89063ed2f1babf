"""Triton's paged attention over a window: against its reference, without a look at what fell out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.autotune import COMBINED_SPLITS, SPLIT_TOKENS
from tests.kernels.gpu.device import assert_near, needs_device
from tests.kernels.gpu.test_paged_attention import Case, make_case, quantize
from tests.kernels.windows import free_early

pytestmark = needs_device
CHUNKS = [(1, 1), (100, 1), (SPLIT_TOKENS + 9, 1), (2 * SPLIT_TOKENS + 1, 3), (200, 33), (90, 90)]


def windowed(case: Case, window: int) -> Case:
    """`case` with a window, and with blocks of NaN in place of those that fell out of it."""
    return replace(case, window=window, batch=free_early(case.batch, window, len(case.blocks)))


@pytest.mark.parametrize(
    ("window", "dtype", "group", "block_size"),
    [
        (1, torch.bfloat16, 7, 16),
        (17, torch.float32, 3, 24),
        (64, torch.float16, 4, 8),
        (65, torch.bfloat16, 1, 32),
        (SPLIT_TOKENS, torch.bfloat16, 7, 16),
        (SPLIT_TOKENS + 30, torch.float32, 4, 16),
    ],
)
def test_equals_reference(window: int, dtype: torch.dtype, group: int, block_size: int) -> None:
    """Decode rows, drafts, whole prompts and later chunks should equal the formula."""
    case = windowed(make_case(CHUNKS, group=group, kv_heads=1, block_size=block_size, dtype=dtype), window)
    assert_near(case.reference(), case.run())


def test_quantized_equals_reference() -> None:
    """So should they over int8, where what fell out has NaN for scales."""
    case = windowed(quantize(make_case(CHUNKS, kv_heads=1), torch.int8), 70)
    assert_near(case.reference(), case.run())


@pytest.mark.parametrize("window", [20, SPLIT_TOKENS * 2])
def test_alone_equals_in_a_batch(window: int) -> None:
    """A sequence should get the same bits alone and among others; a draft that begins a split, or as many splits as are
    combined at once, before its last row should equal the formula."""
    begin = SPLIT_TOKENS * COMBINED_SPLITS
    chunks = [(300, 1), (100, 40), (SPLIT_TOKENS + window, 3), (begin + window, 3)]
    sizes = {"group": 4, "kv_heads": 1, "dtype": torch.float16}
    case = windowed(make_case(chunks, **sizes), window)
    out = case.run()
    assert_near(case.reference(), out)
    for i, together in enumerate(out.split([rows for _, rows in chunks])):
        assert torch.equal(together, windowed(make_case(chunks[i : i + 1], names=[i], **sizes), window).run())

"""A model with a sliding window, over HTTP, in a cache that is much smaller than its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.advise.command import look
from quire.bench.model_shapes import SHAPES
from quire.bench.random_model import write_random_model
from tests.e2e.cell import Cell
from tests.e2e.reference import GreedyReference
from tests.e2e.test_equality import BYTES_PER_TOKEN, make_bodies, read_token_ids
from tests.faults.checker import check_at_rest, read_metrics
from tests.faults.streams import follow_all
from tests.waiting import wait_until_async

WINDOW, STEP_TOKENS, NUM_BLOCKS = 64, 64, 12
PROMPTS = [[(7 * i + number) % 490 for i in range(length)] for number, length in enumerate((1500, 40, 700))]


@pytest.mark.slow
async def test_long_requests_run_in_the_blocks_of_their_window(start_cell: Callable[..., Cell], tmp_path: Path) -> None:
    """Requests of up to 1,564 tokens should be let in by a cell whose cache holds 192, with the reference's tokens; and
    `quire advise` should see that its workers take no --swap-space."""
    shape = replace(SHAPES["test"], architecture="MistralForCausalLM", window=WINDOW)
    folder = write_random_model(shape, tmp_path / "test-mistral")
    cell = start_cell(
        f"--kv-cache-memory-bytes={NUM_BLOCKS * 16 * BYTES_PER_TOKEN}",
        f"--max-num-batched-tokens={STEP_TOKENS}",
        model=folder,
    )
    records = await follow_all(cell.url, make_bodies(PROMPTS, "test-mistral"), timeout_s=300)
    assert {record.ending for record in records.values()} == {"done"}, [r.error for r in records.values() if r.error]
    reference = GreedyReference(folder)
    for prompt, actual in zip(PROMPTS, await read_token_ids(cell.redis_url, records), strict=True):
        assert reference.explain_mismatch(prompt, actual) == ""
    await check_at_rest(cell.redis_url, cell.url)

    async def most_used() -> float:
        return (await read_metrics(cell.url))["quire:most_blocks_used"]

    await wait_until_async(most_used, description="a report of blocks that were used")
    assert await most_used() <= NUM_BLOCKS
    seen = (await asyncio.to_thread(look, (cell.url + "/metrics",), 0, "")).settings
    assert (seen.sliding_window, seen.num_swap_blocks, seen.lacks_swap) == (WINDOW, 0, False)

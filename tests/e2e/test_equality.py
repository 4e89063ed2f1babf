"""Forty-eight requests at once in a cache too small for them give, token for token, what `transformers` gives alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.ids import RequestId
from shared.log import TokenEntry, decode_entries
from shared.redis_bus import open_bus
from tests.e2e.cell import Cell
from tests.e2e.reference import GreedyReference
from tests.faults.checker import check_at_rest, wait_for_preemptions
from tests.faults.streams import StreamRecord, follow_all
from tests.waiting import wait_until_async

PROMPT_SEED = 20261129
NUM_REQUESTS = 48
NUM_TOKENS = 64
MIN_PREEMPTIONS = 5
POOL_TOKENS = 640
"""Room for one request of full length, or a few shorter ones; all together need about 10,000 tokens."""
SWAP_TOKENS = 200
"""Room in host memory for one or two of them."""
SLOW_PROMPTS = "--failpoints=worker.in_prefill=sleep:0.01"
"""A step with prompt tokens takes as long as that of a model of some size: else requests may end as fast as they come,
and none is preempted."""
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
"""Of the `test` model: K and V, layers, KV heads, head size, fp32."""
SMOLLM2_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4

MATRIX = [(block_size, budget) for block_size in (8, 16, 32) for budget in (32, 100, 512)]
IN_MAKE_TEST = {(8, 100), (16, 32), (32, 512)}


def make_prompts(low: int, high: int) -> list[list[int]]:
    """Prompts of 16 to 512 token ids in [low, high), from the committed seed; many short ones and few long, so that
    several share the small cache and grow into each other's blocks."""
    rng = random.Random(PROMPT_SEED)
    lengths = [16 + round(496 * rng.random() ** 3) for _ in range(NUM_REQUESTS)]
    return [[rng.randrange(low, high) for _ in range(length)] for length in lengths]


def make_bodies(prompts: list[list[int]], model: str) -> dict[str, dict[str, Any]]:
    return {
        str(i): {
            "model": model,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for i, prompt in enumerate(prompts)
    }


async def read_token_ids(redis_url: str, records: dict[str, StreamRecord]) -> list[list[int]]:
    """The token ids that the log holds for each stream."""
    bus = open_bus(redis_url)
    try:
        logs = [await bus.read_log(RequestId(record.request_id)) for record in records.values()]
    finally:
        await bus.close()
    return [[e.token_id for e in decode_entries(log) if isinstance(e, TokenEntry)] for log in logs]


async def check_equality(cell: Cell, prompts: list[list[int]], model: str, reference: GreedyReference) -> None:
    """All streams end, their tokens equal the reference's, preemption was at work, and nothing is left."""
    records = await follow_all(cell.url, make_bodies(prompts, model), timeout_s=600)
    assert {record.ending for record in records.values()} == {"done"}, [r.error for r in records.values() if r.error]
    actual = await read_token_ids(cell.redis_url, records)
    assert [len(token_ids) for token_ids in actual] == [NUM_TOKENS] * len(prompts)
    mismatches = [reference.explain_mismatch(*pair) for pair in zip(prompts, actual, strict=True)]
    assert [text for text in mismatches if text] == []
    await wait_for_preemptions(cell.url, MIN_PREEMPTIONS)
    await check_at_rest(cell.redis_url, cell.url)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> GreedyReference:
    return GreedyReference(model_folder)


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    ("block_size", "budget"),
    [pytest.param(*pair, marks=() if pair in IN_MAKE_TEST else pytest.mark.slow) for pair in MATRIX],
)
async def test_tokens_equal_transformers(
    start_cell: Callable[..., Cell], reference: GreedyReference, block_size: int, budget: int, kernels: str
) -> None:
    """Paged, chunked, batched and preempted, each request should give the reference's tokens, with the C kernels where
    the machine has them, and without."""
    cell = start_cell(
        f"--cpu-kernels={kernels}",
        f"--block-size={block_size}",
        f"--max-num-batched-tokens={budget}",
        f"--kv-cache-memory-bytes={POOL_TOKENS * BYTES_PER_TOKEN}",
        "--max-model-len=640",
        "--admission-headroom=0",
        SLOW_PROMPTS,
    )
    await check_equality(cell, make_prompts(10, 500), "test-llama", reference)


@pytest.mark.parametrize(
    ("kernels", "num_requests"),
    [("auto", 16), *(pytest.param(kernels, NUM_REQUESTS, marks=pytest.mark.slow) for kernels in ("auto", "off"))],
)
async def test_tokens_equal_transformers_after_swaps(
    start_cell: Callable[..., Cell], reference: GreedyReference, kernels: str, num_requests: int
) -> None:
    """With little room in host memory, so that some are swapped and some computed again, tokens should be the
    reference's, too, and `/metrics` tell of blocks that were copied both ways, with none left at the end."""
    cell = start_cell(
        f"--cpu-kernels={kernels}",
        "--block-size=8",
        f"--kv-cache-memory-bytes={POOL_TOKENS * BYTES_PER_TOKEN}",
        f"--swap-space={SWAP_TOKENS * BYTES_PER_TOKEN / 2**30}",
        "--preemption-mode=swap",
        "--max-model-len=640",
        "--admission-headroom=0",
        SLOW_PROMPTS,
    )
    await check_equality(cell, make_prompts(10, 500)[:num_requests], "test-llama", reference)

    async def are_told() -> bool:
        counted = await read_labels(cell.url)
        return min(counted['direction="out"'], counted['direction="in"'], counted['way="swap"']) > 0

    await wait_until_async(are_told, description="a report of copies both ways")


async def read_labels(url: str) -> dict[str, float]:
    """What the counters of swap say, by their second label."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {label: float(value) for label, value in re.findall(r'_total\{.*((?:direction|way)="\w+").*\} (.*)', text)}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_default_models_tokens_equal_transformers(start_cell: Callable[..., Cell]) -> None:
    """SmolLM2 in a cache of a few requests should give the reference's tokens, too."""
    cell = start_cell(
        f"--kv-cache-memory-bytes={POOL_TOKENS * SMOLLM2_BYTES_PER_TOKEN}",
        "--max-model-len=640",
        "--admission-headroom=0",
        "--num-threads=2",
        model=None,
    )
    reference = GreedyReference(Path(cell.state["model"]))
    await check_equality(cell, make_prompts(300, 30_000), cell.model_name, reference)

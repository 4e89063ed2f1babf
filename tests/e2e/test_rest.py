"""After any mix of finished, cancelled, refused and failed requests, nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import aiohttp

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, read_metrics
from tests.faults.kinds import KINDS
from tests.faults.streams import follow

NUM_REQUESTS = 120


async def test_a_mix_of_everything_leaves_nothing(start_cell: Callable[..., Cell]) -> None:
    """Requests that finish, leave, are refused or pass their deadline, in a tiny cache, should all be gone at rest."""
    cell = start_cell("--workers=2", "--kv-cache-memory-bytes=655360", "--max-model-len=1200", "--request-timeout-s=3")
    rng = random.Random(5)
    url = cell.url + "/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        records = await asyncio.gather(*(_one(session, url, rng) for _ in range(NUM_REQUESTS)))
    endings = {record.ending for record in records}
    assert {"done", "left", "error"} <= endings
    await check_at_rest(cell.redis_url, cell.url, timeout_s=15)
    metrics = await read_metrics(cell.url)
    assert metrics["quire:requests_finished_total"] > 0
    assert metrics["quire:requests_cancelled_total"] > 0
    assert metrics["quire:requests_failed_total"] > 0


async def _one(session: aiohttp.ClientSession, url: str, rng: random.Random) -> Any:
    body = dict(rng.choice(list(KINDS.values())))
    fate = rng.random()
    leave_after = rng.randint(1, 30) if fate < 0.3 else None
    if fate > 0.9:
        body |= {"temperature": 9}
    elif fate > 0.7:
        body |= {"max_tokens": 1000, "prompt": [rng.randrange(10, 500) for _ in range(150)]}
    await asyncio.sleep(rng.random() * 2)
    return await follow(session, url, body, leave_after=leave_after)

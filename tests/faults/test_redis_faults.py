"""Redis dies and comes back, forgets everything, or refuses writes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import aiohttp
import pytest
import redis.asyncio

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow, follow_all
from tests.waiting import wait_until_async

StartCell = Callable[..., Cell]


async def _wait_events(record: StreamRecord, count: int) -> None:
    async def has_come() -> bool:
        return record.num_events >= count

    await wait_until_async(has_come, description=f"{count} events", timeout_s=30)


def _check_accepted(records: dict[str, StreamRecord], undisturbed: dict[str, StreamRecord], *, at_least: int) -> None:
    """Whatever was not refused with 503 at the door went to its undisturbed end; `at_least` so many."""
    accepted = {kind: record for kind, record in records.items() if record.status != 503}
    assert len(accepted) >= at_least
    for kind, record in accepted.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])


@pytest.mark.case(89)
@pytest.mark.parametrize("after_events", [0, 5, 25])
async def test_streams_survive_a_crash_of_redis(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord], after_events: int
) -> None:
    """kill -9 of Redis under load: with `appendfsync always` no accepted request and no token should be lost."""
    cell = start_cell("--workers=2")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        url = cell.url + "/v1/completions"
        followed = asyncio.gather(*(follow(session, url, KINDS[k], record=r) for k, r in records.items()))
        await _wait_events(records["greedy"], after_events)
        old = cell.kill("redis", signal.SIGKILL)
        cell.wait_restarted("redis", old)
        await followed
    _check_accepted(records, undisturbed, at_least=1 if after_events else 0)
    await check_at_rest(cell.redis_url, cell.url, timeout_s=20)


async def test_the_service_comes_back_after_flushall(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord]
) -> None:
    """When everything is gone, each open request should end with an error, and the next one be served."""
    cell = start_cell("--workers=2", "--worker-lease-s=1.5")
    client = redis.asyncio.from_url(cell.redis_url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        record = StreamRecord()
        body = KINDS["greedy"] | {"max_tokens": 3000}
        followed = asyncio.create_task(follow(session, cell.url + "/v1/completions", body, record=record))
        await _wait_events(record, 5)
        await client.flushall()
        await client.aclose()
        await followed
    assert record.ending == "error"

    async def is_ready() -> bool:
        async with aiohttp.ClientSession() as session, session.get(cell.url + "/ready") as response:
            return response.status == 200

    await wait_until_async(is_ready, description="a ready cell", timeout_s=30)
    records = await follow_all(cell.url, {"greedy": KINDS["greedy"]})
    assert records["greedy"].ending == "done"
    check_stream(records["greedy"], undisturbed["greedy"])


async def test_refused_writes_pause_streams(start_cell: StartCell, undisturbed: dict[str, StreamRecord]) -> None:
    """While Redis refuses writes, streams should pause and new work get 503; afterwards all go on to their end."""
    cell = start_cell("--workers=2")
    client = redis.asyncio.from_url(cell.redis_url)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        url = cell.url + "/v1/completions"
        followed = asyncio.gather(*(follow(session, url, KINDS[k], record=r) for k, r in records.items()))
        await _wait_events(records["greedy"], 5)
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1mb")
        refused = await follow(session, url, KINDS["seeded"])
        assert (refused.status, refused.ending) == (503, "error")
        await client.config_set("maxmemory", "0")
        await client.aclose()
        await followed
    _check_accepted(records, undisturbed, at_least=1)
    await check_at_rest(cell.redis_url, cell.url, timeout_s=20)

"""A gateway dies: its streams go on through another one, and those nobody comes back for end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import aiohttp
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow, follow_all
from tests.waiting import wait_until_async

StartCell = Callable[..., Cell]
ORPHAN_TTL_S = 2


@pytest.fixture
def two_gateways(start_cell: StartCell) -> StartCell:
    return lambda *flags: start_cell("--gateways=2", f"--orphan-ttl-s={ORPHAN_TTL_S}", *flags)


async def _resume(session: aiohttp.ClientSession, url: str, record: StreamRecord) -> StreamRecord:
    headers = {"Last-Event-ID": record.last_event_id}
    return await follow(session, f"{url}/v1/streams/{record.request_id}", None, record=record, headers=headers)


async def _has_events(records: dict[str, StreamRecord], count: int) -> bool:
    return sum(record.num_events for record in records.values()) >= count


@pytest.mark.parametrize("kind", ["greedy", "seeded-top-p", "n-2", "stop-string", "repetition"])
async def test_a_stream_resumes_at_every_event(cell: Cell, undisturbed: dict[str, StreamRecord], kind: str) -> None:
    """A client that left after any number of events should get exactly the rest, by the id of the last one."""
    total = undisturbed[kind].num_events
    async with aiohttp.ClientSession() as session:
        for leave_after in sorted({1, 2, 3, total // 2, total - 2, total - 1}):
            key = {"Idempotency-Key": f"{kind}-{leave_after}"}
            url = cell.url + "/v1/completions"
            record = await follow(session, url, KINDS[kind], leave_after=leave_after, headers=key)
            assert record.ending == "left"
            record = await _resume(session, cell.url, record)
            check_stream(record, undisturbed[kind])
            assert record.ending == "done"
    await check_at_rest(cell.redis_url, cell.url)


async def test_streams_resume_through_another_gateway(
    two_gateways: StartCell, undisturbed: dict[str, StreamRecord]
) -> None:
    """kill -9 of a gateway in mid-stream should cost the client a reconnect and no token."""
    cell = two_gateways()
    first, second = cell.state["urls"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        streams = [follow(session, first + "/v1/completions", KINDS[k], record=r) for k, r in records.items()]
        followed = asyncio.gather(*streams)
        await wait_until_async(lambda: _has_events(records, 30), description="30 events")
        cell.kill("gateway-0", signal.SIGKILL)
        await followed
        cut = [record for record in records.values() if record.ending == "cut" and record.request_id]
        assert cut, "every stream had ended before the kill"
        await asyncio.gather(*(_resume(session, second, record) for record in cut))
    for kind, record in records.items():
        if record.request_id:
            check_stream(record, undisturbed[kind])
            assert record.ending == "done"


async def test_an_orphan_ends_by_itself(two_gateways: StartCell) -> None:
    """A stream whose gateway died and that nobody resumes should be cancelled after the orphan time."""
    cell = two_gateways("--failpoints=gateway.before_write=kill@3")
    body = KINDS["greedy"] | {"max_tokens": 3000}
    async with aiohttp.ClientSession() as session:
        record = await follow(session, cell.state["urls"][0] + "/v1/completions", body)
    assert record.ending == "cut"
    await check_at_rest(cell.redis_url, cell.state["urls"][1], timeout_s=ORPHAN_TTL_S + 12, counters=False)


@pytest.mark.parametrize("armed", ["gateway.before_submit=kill@2", "bus.submit.reply=kill@2"])
async def test_a_gateway_that_dies_around_the_submit_leaves_nothing(two_gateways: StartCell, armed: str) -> None:
    """A request whose gateway died before its first byte should end by itself, and the others be served."""
    cell = two_gateways(f"--failpoints={armed}")
    urls = cell.state["urls"]
    records = await follow_all(urls[0], {"a": KINDS["greedy"], "b": KINDS["seeded"]})
    assert "cut" in {record.ending for record in records.values()}
    await check_at_rest(cell.redis_url, urls[1], timeout_s=ORPHAN_TTL_S + 12, counters=False)


async def test_a_gateway_that_dies_while_cancelling_leaves_nothing(two_gateways: StartCell) -> None:
    """The client has left, the cancel was never written: the request should end as an orphan."""
    cell = two_gateways("--failpoints=gateway.before_end=kill@1")
    urls = cell.state["urls"]
    async with aiohttp.ClientSession() as session:
        body = KINDS["greedy"] | {"max_tokens": 3000}
        await follow(session, urls[0] + "/v1/completions", body, leave_after=5)
    await check_at_rest(cell.redis_url, urls[1], timeout_s=ORPHAN_TTL_S + 12, counters=False)

"""What requests cost while workers and gateways die, sequences are preempted and clients leave."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from functools import reduce

import aiohttp
import pytest

from shared.ids import RequestId
from shared.redis_bus import open_bus
from shared.work_time import NO_WORK, WorkTime
from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, read_metrics
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow
from tests.waiting import wait_until_async

LEASE_S = 1.5
TIGHT = ("--kv-cache-memory-bytes=655360", "--max-model-len=500")


async def read_records(redis_url: str, ids: list[str]) -> tuple[dict[str, WorkTime], dict[str, int], WorkTime]:
    """By request: worker time and attempts; and the time of all tenants."""
    bus = open_bus(redis_url)
    try:
        records = await bus.load_records([RequestId(i) for i in ids])
        tenants = await bus.read_worked()
    finally:
        await bus.close()
    known = {str(r.summary.request_id): r for r in records if r is not None}
    assert len(known) == len(ids)
    total = reduce(WorkTime.plus, tenants.values(), NO_WORK)
    return {i: r.worked for i, r in known.items()}, {i: r.attempt for i, r in known.items()}, total


@pytest.mark.slow
async def test_nothing_is_lost_or_counted_twice(start_cell: Callable[..., Cell]) -> None:
    """With a worker and a gateway killed, preemptions, a client that leaves and streams that are resumed, the tenant
    should be charged what its requests are, no more than workers worked, and each answer say what its record says."""
    cell = start_cell("--workers=2", "--gateways=2", "--price-per-hour=3600", f"--worker-lease-s={LEASE_S}", *TIGHT)
    began, (first, second) = time.monotonic(), cell.state["urls"]
    fields = {"max_tokens": 300, "include_cost": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        records = [StreamRecord() for _ in range(8)]
        leaving = StreamRecord()
        followed = [
            asyncio.ensure_future(
                follow(session, url + "/v1/completions", KINDS["greedy"] | fields | {"prompt": [20 + i] * 60}, record=r)
            )
            for i, (r, url) in enumerate(zip(records, [first, second] * 4, strict=True))
        ]
        await follow(session, second + "/v1/completions", KINDS["seeded"] | fields, record=leaving, leave_after=20)

        async def are_under_way() -> bool:
            return all(record.num_events > 30 for record in records[:2])

        await wait_until_async(are_under_way, description="streams under way", timeout_s=30)
        cell.kill("worker-0", signal.SIGKILL)
        cell.kill("gateway-0", signal.SIGKILL)
        await asyncio.gather(*followed)
        for record in records:
            if record.ending != "done":
                headers = {"Last-Event-ID": record.last_event_id} if record.event_ids else {}
                await follow(session, f"{second}/v1/streams/{record.request_id}", None, record=record, headers=headers)
    assert [record.ending for record in records] == ["done"] * 8
    await check_at_rest(cell.redis_url, second, counters=False)
    ids = [record.request_id for record in (*records, leaving)]
    worked, attempts, total = await read_records(cell.redis_url, ids)
    assert total == reduce(WorkTime.plus, worked.values(), NO_WORK)
    assert 0 < total.seconds <= 2 * (time.monotonic() - began)
    assert max(attempts.values()) > 1
    assert all(min(work) > 0 for work in worked.values())
    for record in records:
        assert record.usage is not None
        assert record.usage["worker_seconds"] == worked[record.request_id].seconds
        assert record.usage["cost"] == pytest.approx(record.usage["worker_seconds"])  # 3600 an hour
    metrics = await read_metrics(second)
    for name in ("quire:worker_seconds_total", "quire:cost_total"):
        assert metrics[name] == pytest.approx(total.seconds)

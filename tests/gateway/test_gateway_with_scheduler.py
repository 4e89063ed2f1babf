"""The gateway together with the real scheduler; only the model is scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.service import SchedulerService
from shared.bus import Bus
from shared.clock import MonotonicClock
from shared.config import SchedulerConfig
from tests.faults.streams import follow
from tests.gateway.conftest import TEXT, SiteMaker
from tests.waiting import wait_until_async

COMPLETIONS = "/v1/completions"


@asynccontextmanager
async def scheduler(bus: Bus) -> AsyncIterator[None]:
    """A scheduler that leads."""
    stop = asyncio.Event()
    service = SchedulerService(bus, SchedulerConfig(), MonotonicClock(), SchedulerMetrics())
    running = asyncio.create_task(service.run(stop))
    yield
    stop.set()
    await running


async def test_requests_go_all_the_way(bus: Bus, make_site: SiteMaker) -> None:
    """Concurrent requests should be scheduled, streamed and ended by the real scheduler, and readiness follow it."""
    site = await make_site(bus=bus, leads=False)
    async with scheduler(bus):

        async def is_ready() -> bool:
            return (await site.get("/ready"))[0] == 200

        await wait_until_async(is_ready, description="/ready is 200")
        body = {"prompt": "hi", "max_tokens": 50, "stream": True}
        records = await asyncio.gather(*(follow(site.http, site.base_url + COMPLETIONS, body) for _ in range(6)))
        assert [(record.texts, record.ending) for record in records] == [({0: TEXT}, "done")] * 6
    await site.worker.stop()
    await bus.bye(site.worker.worker_id)


async def test_a_stream_outlives_its_gateway(bus: Bus, make_site: SiteMaker) -> None:
    """After one gateway has gone by a drain, another should give the rest of its stream."""
    first = await make_site(bus=bus, leads=False, drain_s=0.0)
    async with scheduler(bus):
        second = await make_site(bus=bus, leads=False, worker={"model": "idle", "fingerprint": "idle"})
        first.worker.step_s = 0.05
        body = {"prompt": "hi", "max_tokens": 50, "stream": True}
        running = asyncio.create_task(follow(first.http, first.base_url + COMPLETIONS, body))

        async def flows() -> bool:
            return first.worker.num_steps > 2

        await wait_until_async(flows, description="tokens flow")
        await first.app.drain()
        record = await running
        assert record.ending == "cut"
        headers = {"Last-Event-ID": record.last_event_id}
        url = f"{second.base_url}/v1/streams/{record.request_id}"
        record = await follow(second.http, url, None, record=record, headers=headers)
        assert (record.texts, record.ending) == ({0: TEXT}, "done")
    for site in (first, second):
        await site.worker.stop()
        await bus.bye(site.worker.worker_id)

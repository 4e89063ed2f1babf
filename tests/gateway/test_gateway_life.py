"""Readiness, draining, and the gateway as a process."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gateway.health import HealthSettings, HealthView
from quire.embedded_redis import EmbeddedRedis
from shared import failpoints
from shared.bus import Bus, LeaderPulse, WorkerPulse
from shared.clock import ManualClock
from shared.errors import BusUnavailable
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import WorkerHello
from shared.redis_link import RedisLink
from tests.faults.streams import StreamRecord, follow
from tests.gateway.conftest import TEXT, Site, SiteMaker
from tests.gateway.scripted_worker import PlainLeader, ScriptedWorker
from tests.gateway.tiny_model import END
from tests.waiting import wait_until_async

COMPLETIONS = "/v1/completions"
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = HealthSettings(worker_lease_s=3.0, leader_lease_s=1.5)
HELLO = WorkerHello(worker_id=WorkerId("w:1"), model="tiny", fingerprint="f", dtype="float32", device="cpu",
                    max_model_len=512, block_size=16, num_blocks=64, max_num_seqs=8, pid=1, host="h")  # fmt: skip


class Counters(MemoryBus):
    """A memory bus whose counters a test sets by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.leader = LeaderPulse(token="t", beat=1)
        self.worker: WorkerPulse | None = WorkerPulse(hello=HELLO, beat=1, num_steps=1, has_work=False)
        self.is_up = True

    async def read_leader(self) -> LeaderPulse:
        if not self.is_up:
            raise BusUnavailable("away")
        return self.leader

    async def read_workers(self) -> list[WorkerPulse]:
        return [self.worker] if self.worker else []

    def move(self, *, leader: int = 1, worker: int = 1, steps: int = 1) -> None:
        """Raise the counters."""
        self.leader = dataclasses.replace(self.leader, beat=self.leader.beat + leader)
        if self.worker:
            self.worker = dataclasses.replace(
                self.worker, beat=self.worker.beat + worker, num_steps=self.worker.num_steps + steps
            )


async def watch(bus: Counters, view: HealthView, clock: ManualClock, seconds: float, **moves: int) -> None:
    """Poll for `seconds` while the counters move as given."""
    for _ in range(int(seconds / 0.25)):
        clock.advance(0.25)
        bus.move(**moves)
        await view.poll()


@pytest.fixture
async def counters() -> tuple[Counters, HealthView, ManualClock]:
    bus, clock = Counters(), ManualClock()
    view = HealthView(bus, clock, SETTINGS)
    assert view.why_not_ready() == ["bus unreachable"]
    await view.poll()
    return bus, view, clock


async def test_ready_while_everything_moves(counters: tuple[Counters, HealthView, ManualClock]) -> None:
    """Moving counters should keep readiness for ever."""
    await watch(*counters, 30)
    assert counters[1].why_not_ready() == []


@pytest.mark.parametrize(("moves", "after_s", "reason"), [
    ({"worker": 0}, 3.25, "no live worker"), ({"leader": 0}, 1.75, "no scheduler leads")])  # fmt: skip
async def test_a_counter_that_stands_still_turns_readiness_off(
    counters: tuple[Counters, HealthView, ManualClock], moves: dict[str, int], after_s: float, reason: str
) -> None:
    """A dead worker or leader should turn readiness off after its lease, not before, and its return on at once."""
    bus, view, clock = counters
    await watch(bus, view, clock, after_s - 0.5, **moves)
    assert view.why_not_ready() == []
    await watch(bus, view, clock, 0.5, **moves)
    assert view.why_not_ready() == [reason]
    await watch(bus, view, clock, 0.25)
    assert view.why_not_ready() == []


async def test_a_worker_with_work_and_no_steps_is_not_ready(counters: tuple[Counters, HealthView, ManualClock]) -> None:
    """A stuck worker should turn readiness off though its counter moves; an idle one should not; work is accepted."""
    bus, view, clock = counters
    await watch(bus, view, clock, 10, steps=0)
    assert view.why_not_ready() == []
    assert bus.worker is not None
    bus.worker = dataclasses.replace(bus.worker, has_work=True)
    await watch(bus, view, clock, 3.5, steps=0)
    assert view.why_not_ready() == ["no worker makes steps"]
    assert [pulse.hello for pulse in view.serving()] == [HELLO]
    await watch(bus, view, clock, 0.25)
    assert view.why_not_ready() == []


async def test_timers_start_again_when_the_bus_returns(counters: tuple[Counters, HealthView, ManualClock]) -> None:
    """While the bus is away nothing is ready; when it returns, nobody is taken for dead for the time it was away."""
    bus, view, clock = counters
    bus.is_up = False
    await watch(bus, view, clock, 10, leader=0, worker=0)
    assert view.why_not_ready() == ["bus unreachable"]
    assert view.serving() == []
    bus.is_up = True
    await watch(bus, view, clock, 0.25, leader=0, worker=0)
    assert view.why_not_ready() == []


async def test_a_pause_of_the_gateway_itself_is_nobodys_death(
    counters: tuple[Counters, HealthView, ManualClock],
) -> None:
    """After the whole machine stood still everybody should get the rest of a lease to raise the counters again."""
    bus, view, clock = counters
    clock.advance(60)
    assert view.why_not_ready() == []
    await view.poll()
    assert view.why_not_ready() == []
    assert [pulse.hello for pulse in view.serving()] == [HELLO]
    await watch(bus, view, clock, 3, worker=0)
    assert view.why_not_ready() == ["no live worker"]


async def test_another_models_worker_does_not_count(counters: tuple[Counters, HealthView, ManualClock]) -> None:
    """Only workers that are wanted make a gateway ready."""
    _, view, _ = counters
    assert view.why_not_ready(lambda worker: worker.model == "tiny") == []
    assert view.why_not_ready(lambda worker: worker.model == "x") == ["no live worker"]


async def test_health_stays_and_ready_falls_with_the_worker(site: Site) -> None:
    """When the worker dies, /health should stay 200, /ready be 503 within lease + 1 s, and new work get 503."""
    assert (await site.get("/ready"))[0] == 200
    await site.worker.stop()

    async def is_unready() -> bool:
        return (await site.get("/ready"))[0] == 503

    await wait_until_async(is_unready, description="/ready is 503", timeout_s=2)
    assert (await site.get("/health"))[0] == 200
    assert (await site.post(COMPLETIONS, {"prompt": "hi"}))[0] == 503


def slow_stream(site: Site) -> asyncio.Task[StreamRecord]:
    site.worker.step_s = 0.03
    return asyncio.create_task(
        follow(site.http, site.base_url + COMPLETIONS, {"prompt": "hi", "max_tokens": 50, "stream": True})
    )


async def test_a_drain_refuses_new_work_and_lets_streams_finish(make_site: SiteMaker) -> None:
    """While draining, new work should be a 503 at once and open streams go on to their end."""
    site = await make_site(drain_s=20.0)
    streams = [slow_stream(site) for _ in range(4)]
    await wait_until_async(lambda: _steps(site, 3), description="tokens flow")
    draining = asyncio.create_task(site.app.drain())
    await wait_until_async(lambda: _is_draining(site), description="the drain has begun")
    assert (await site.post(COMPLETIONS, {"prompt": "hi"}))[0] == 503
    assert (await site.get("/ready"))[0] == 503
    assert (await site.get("/health"))[0] == 200
    records = await asyncio.gather(*streams)
    assert [(record.texts, record.ending) for record in records] == [({0: TEXT}, "done")] * 4
    await draining


async def _steps(site: Site, count: int) -> bool:
    return site.worker.num_steps >= count


async def _is_draining(site: Site) -> bool:
    return site.app.gateway.drain.is_draining


async def test_a_drained_stream_is_resumed_at_another_gateway(make_site: SiteMaker) -> None:
    """At the deadline a stream should be cut without a terminal event, and another gateway go on with it."""
    site = await make_site(drain_s=0.0)
    other = await make_site(bus=site.bus, worker={"model": "idle"}, leads=False)
    running = slow_stream(site)
    await wait_until_async(lambda: _steps(site, 3), description="tokens flow")
    await site.app.drain()
    record = await running
    assert record.ending == "cut"
    assert record.finishes == {}
    assert await site.bus.list_live() == {record.request_id}
    url = f"{other.base_url}/v1/streams/{record.request_id}"
    record = await follow(
        other.http,
        url,
        None,
        record=record,
        headers={"Last-Event-ID": record.last_event_id} if record.event_ids else {},
    )
    assert (record.texts, record.ending) == ({0: TEXT}, "done")
    assert record.event_ids == sorted(set(record.event_ids))


async def test_a_drain_answers_plain_calls_with_503(make_site: SiteMaker) -> None:
    """A call that does not stream cannot be resumed: at the deadline it should get a 503, and its request end."""
    site = await make_site(drain_s=0.0)
    site.worker.pace.clear()
    call = asyncio.create_task(site.post(COMPLETIONS, {"prompt": "hi"}))

    async def runs() -> bool:
        return bool(site.worker.bodies)

    await wait_until_async(runs, description="the request runs")
    await site.app.drain()
    assert (await call)[0] == 503
    assert await site.bus.list_live() == set()


async def test_a_lost_reply_of_the_submit_changes_nothing(site: Site) -> None:
    """A submit whose reply is lost should be stored once and answered."""
    failpoints.arm("bus.submit.reply=drop@1")
    status, answer = await site.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 50})
    assert (status, answer["choices"][0]["text"]) == (200, TEXT)
    assert len(site.worker.bodies) == 1


async def test_a_departure_is_told_until_the_bus_takes_it(site: Site) -> None:
    """When the bus is away as a client leaves, the request should end as soon as it is back."""
    failpoints.arm("gateway.before_end=drop@1")
    site.says("cat ", adds_end=False)
    site.worker.step_s = 0.01
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    await follow(site.http, site.base_url + COMPLETIONS, body, leave_after=2)

    async def is_over() -> bool:
        return not await site.bus.list_live()

    await wait_until_async(is_over, description="the request has ended", timeout_s=2)


async def test_a_crash_in_a_stream_is_no_success(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected error after the first byte should cut the stream, count a failure, and end the request."""
    failpoints.arm("gateway.before_write=raise@3")
    site.says("cat ", adds_end=False)
    site.worker.step_s = 0.01
    body = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    record = await follow(site.http, site.base_url + COMPLETIONS, body)
    assert record.ending == "cut"
    (request_id,) = re.findall("handler.failed .*request_id=(\\S+)", caplog.text)
    assert request_id == record.request_id

    async def is_over() -> bool:
        return not await site.bus.list_live()

    await wait_until_async(is_over, description="the request has ended", timeout_s=2)


async def test_a_lost_record_ends_the_stream_with_an_error(
    redis_bus: Bus, redis_server: EmbeddedRedis, make_site: SiteMaker
) -> None:
    """When Redis loses everything, an open stream should end with an error within seconds, not hang."""
    site = await make_site(bus=redis_bus)
    site.says("cat ", adds_end=False)
    site.worker.max_drawn = 3
    running = slow_stream(site)
    await wait_until_async(lambda: _steps(site, 3), description="tokens flow")
    link = RedisLink(redis_server.url)
    await link.call("FLUSHALL")
    await link.close()
    async with asyncio.timeout(5):
        record = await running
    assert record.ending == "error"
    assert record.error is not None
    assert record.error["code"] == "request_lost"


@asynccontextmanager
async def gateway_process(folder: Path, redis_url: str, *flags: str) -> AsyncIterator[tuple[Any, str]]:
    """`python -m gateway` on a free port; the process and its base URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", str(folder), f"--redis-url={redis_url}", "--port=0", *flags,
        stderr=asyncio.subprocess.PIPE, cwd=ROOT)  # fmt: skip
    assert process.stderr is not None
    try:
        while b"listening" not in (line := await asyncio.wait_for(process.stderr.readline(), 20)):
            assert line, "the gateway ended before it listened"
        port = line.decode().partition("port=")[2].split()[0]
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_the_process_serves_and_drains_on_term(
    redis_bus: Bus, redis_server: EmbeddedRedis, tiny_folder: Path, tokenizer: Tokenizer
) -> None:
    """`python -m gateway` should serve, let a stream finish after SIGTERM (twice is harmless), and exit with 0."""
    worker = ScriptedWorker(redis_bus, lambda body, choice: tokenizer.encode(TEXT).ids, tokenizer.token_to_id(END))
    leader = PlainLeader(redis_bus, worker.worker_id)
    await worker.start()
    await leader.start()
    worker.step_s = 0.05
    async with gateway_process(tiny_folder, redis_server.url) as (process, url), aiohttp.ClientSession() as http:
        body = {"prompt": "hi", "max_tokens": 50, "stream": True}
        running = asyncio.create_task(follow(http, url + COMPLETIONS, body))

        async def flows() -> bool:
            return worker.num_steps > 1

        await wait_until_async(flows, description="tokens flow")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        record = await running
        assert (record.texts, record.ending) == ({0: TEXT}, "done")
        assert await asyncio.wait_for(process.wait(), 10) == 0
    assert await redis_bus.read_gateways() == {}
    await worker.stop()
    await leader.stop()
    await redis_bus.bye(worker.worker_id)


@pytest.mark.parametrize("flags", [["--nope"], ["--port=99999999"], ["--model=/nowhere"], ["--model=x", "--api-key="]])
async def test_a_wrong_setting_is_one_line_and_exit_2(flags: list[str]) -> None:
    """A wrong flag, value or folder should be named in one line, without a stack trace."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--redis-url=redis://127.0.0.1:1", *flags,
        stderr=asyncio.subprocess.PIPE, cwd=ROOT)  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert len(errors.decode().strip().splitlines()) == 1, errors

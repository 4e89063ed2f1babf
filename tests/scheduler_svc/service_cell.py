"""Scheduler services on a real bus, with workers that keep the protocol but compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.service import SchedulerService
from shared.bus import Bus, CommitItem, NewRequest, RequestRecord
from shared.clock import MonotonicClock
from shared.config import ProcessConfig, ScalingConfig, SchedulerConfig, SchedulingConfig
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId, new_request_id
from shared.log import FinishEntry, TokenEntry, encode_entry
from shared.messages import (
    HeldRequest,
    PreemptRequest,
    RequestBody,
    RunRequest,
    SamplingParams,
    SubmitRequest,
    WorkerHello,
    WorkerReport,
)
from tests.scheduler_svc.cell import make_hello
from tests.waiting import wait_until_async

GATEWAY = GatewayId("g:1")


class ScriptedWorker:
    """Beats, reports and takes work; `attempts` holds every RunRequest it got as (request, attempt)."""

    def __init__(self, bus: Bus, hello: WorkerHello) -> None:
        self._bus = bus
        self.hello = hello
        self.held: dict[RequestId, int] = {}
        self.attempts: list[tuple[RequestId, int]] = []
        self.preempts: list[PreemptRequest] = []
        self.forgets = False
        self.runs: list[RunRequest] = []
        self._seq = 0
        self._applied = EntryId("0-0")

    @property
    def worker_id(self) -> WorkerId:
        return self.hello.worker_id

    async def run(self) -> None:
        """Until cancelled, which is like kill -9."""
        await self._bus.hello(self.hello)
        while True:
            for entry_id, message in await self._bus.read_inbox(self.worker_id, self._applied, 10, 20):
                await self._take(message)
                self._applied = entry_id
            await self._bus.beat(self.worker_id, self._seq, list(self.held.items()))
            await self._report()
            await asyncio.sleep(0.01)

    async def _take(self, message: object) -> None:
        if isinstance(message, RunRequest):
            self.runs.append(message)
            self.attempts.append((message.request_id, message.attempt))
            if not self.forgets:
                self.held[message.request_id] = message.attempt
        elif isinstance(message, PreemptRequest):
            self.preempts.append(message)
            if self.held.get(message.request_id) == message.attempt:
                del self.held[message.request_id]
                await self._bus.release(self.worker_id, message.request_id, message.attempt, is_preempted=True)
        else:
            self.held.pop(getattr(message, "request_id"), None)  # noqa: B009 - an AbortRequest

    async def _report(self) -> None:
        self._seq += 1
        held = tuple(
            HeldRequest(request_id=i, attempt=a, num_blocks=2, num_tokens=20, num_running=1, num_waiting=0)
            for i, a in self.held.items()
        )
        await self._bus.report(
            WorkerReport(
                worker_id=self.worker_id,
                seq=self._seq,
                last_inbox_id=self._applied,
                free_blocks=self.hello.num_blocks - 2 * len(held),
                num_blocks=self.hello.num_blocks,
                num_steps=self._seq,
                held=held,
            )
        )

    async def finish(self, request_id: RequestId) -> None:
        """Log one token and the end of a held request."""
        entries = (encode_entry(TokenEntry(0, 7)), encode_entry(FinishEntry(0, "stop")))
        item = CommitItem(
            request_id=request_id, attempt=self.held[request_id], choice=0, start=0, entries=entries, finish="stop"
        )
        await self._bus.commit(self.worker_id, [item])
        self.held.pop(request_id, None)


class ServiceCell:
    """Tasks of schedulers, workers and one gateway on `bus`."""

    def __init__(self, bus: Bus, **settings: Any) -> None:
        self.bus = bus
        leases = {name: settings.pop(name) for name in ("worker_lease_s", "leader_lease_s") if name in settings}
        process = ProcessConfig(**{"worker_lease_s": 1.5, "leader_lease_s": 0.4} | leases)
        orphans = {name: settings.pop(name) for name in ("orphan_ttl_s",) if name in settings}
        scaling = ScalingConfig(**{name: settings.pop(name) for name in list(settings) if name.startswith("autoscale")})
        self.config = SchedulerConfig(
            process=process, scheduling=SchedulingConfig(**settings), scaling=scaling, **orphans
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._gateway: asyncio.Task[None] | None = None

    def start_scheduler(self) -> tuple[asyncio.Task[None], asyncio.Event, SchedulerMetrics]:
        """A scheduler, how to stop it, and its metrics; cancel the task and it is gone without a word."""
        stop, metrics = asyncio.Event(), SchedulerMetrics()
        service = SchedulerService(self.bus, self.config, MonotonicClock(), metrics)
        return self._start(service.run(stop)), stop, metrics

    def start_worker(self, name: str, **changes: Any) -> tuple[ScriptedWorker, asyncio.Task[None]]:
        worker = ScriptedWorker(self.bus, make_hello(name, **changes))
        return worker, self._start(worker.run())

    def start_gateway(self) -> None:
        self._gateway = self._start(self._beat())

    async def kill_gateway(self) -> None:
        assert self._gateway is not None
        await self.kill(self._gateway)

    async def _beat(self) -> None:
        while True:
            await self.bus.gateway_beat(GATEWAY)
            await asyncio.sleep(0.05)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.append(task)
        return task

    async def kill(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def submit(
        self, prompt_len: int = 16, max_tokens: int = 16, timeout_s: float = 60.0, priority: int = 0
    ) -> RequestId:
        request_id = new_request_id("completion")
        summary = SubmitRequest(
            request_id=request_id,
            tenant="t",
            model="m",
            fingerprint="f",
            prompt_lens=(prompt_len,),
            n=1,
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            priority=priority,
        )
        body = RequestBody(
            kind="completion",
            model="m",
            created=1,
            prompts=((1,) * prompt_len,),
            n=1,
            sampling=SamplingParams(seed=1, max_tokens=max_tokens),
        )
        request = NewRequest(summary=summary, body=body, gateway_id=GATEWAY, connection_id=ConnectionId("c"))
        await self.bus.submit(request)
        return request_id

    async def record(self, request_id: RequestId) -> RequestRecord:
        record = await self.bus.load_record(request_id)
        assert record is not None
        return record

    async def wait_for_end(self, *request_ids: RequestId, timeout_s: float = 20.0) -> list[RequestRecord]:
        """The records once all have ended."""

        async def has_ended() -> bool:
            return not set(request_ids) & await self.bus.list_live()

        await wait_until_async(has_ended, description=f"{request_ids} end", timeout_s=timeout_s)
        return [await self.record(request_id) for request_id in request_ids]

    async def wait_for_attempt(self, worker: ScriptedWorker, request_id: RequestId, attempt: int) -> None:
        async def has_it() -> bool:
            return worker.held.get(request_id) == attempt

        await wait_until_async(has_it, description=f"{worker.worker_id} holds {request_id} as attempt {attempt}")

    async def close(self) -> None:
        for task in self._tasks:
            await self.kill(task)
        for request_id in await self.bus.list_live():
            await self.bus.end(request_id, "cancelled")
        for pulse in await self.bus.read_workers():
            await self.bus.bye(pulse.hello.worker_id)


@asynccontextmanager
async def service_cell(bus: Bus, **settings: Any) -> AsyncIterator[ServiceCell]:
    """A cell with a living gateway, cleaned up afterwards."""
    cell = ServiceCell(bus, **settings)
    cell.start_gateway()
    try:
        yield cell
    finally:
        await cell.close()

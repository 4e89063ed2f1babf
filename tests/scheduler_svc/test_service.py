"""The scheduler service on both buses: work goes out once, and every kind of death is survived."""

from __future__ import annotations

import asyncio

import pytest

from scheduler_svc.metrics import SchedulerMetrics
from shared import failpoints
from shared.bus import Bus, ReportMessage, RequestState
from shared.errors import BusUnavailable
from shared.ids import EntryId, RequestId, WorkerId
from shared.memory_bus import MemoryBus
from shared.messages import RequestEnded, SubmitRequest, WorkerReport
from tests.scheduler_svc.service_cell import ScriptedWorker, ServiceCell, service_cell
from tests.waiting import wait_until_async


def value_of(metrics: SchedulerMetrics, name: str) -> float:
    value = metrics.registry.get_sample_value(f"quire:scheduler_{name}")
    assert value is not None
    return value


async def wait_for_lead(metrics: SchedulerMetrics) -> None:
    async def leads() -> bool:
        return value_of(metrics, "is_leader") == 1

    await wait_until_async(leads, description="a scheduler leads")


async def wait_for_acks(bus: Bus) -> None:
    """Nothing pending, nothing unread in the submit stream."""

    async def is_clean() -> bool:
        return await bus.claim_submits("test", 0, 10) == []

    await wait_until_async(is_clean, description="all wake-ups are acked")


async def finish_all(worker: ScriptedWorker, cell: ServiceCell, request_ids: list[RequestId]) -> None:
    """Finish each request as soon as the worker holds it."""

    async def finished() -> bool:
        for request_id in list(worker.held):
            await worker.finish(request_id)
        return not set(request_ids) & await cell.bus.list_live()

    await wait_until_async(finished, description="all requests finish")


async def test_a_request_is_sent_to_a_worker_once_and_acked(bus: Bus) -> None:
    """From submit to end: one RunRequest, nothing pending, gauges back at nought."""
    async with service_cell(bus) as cell:
        _, _, metrics = cell.start_scheduler()
        worker, _ = cell.start_worker("w:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(worker, request_id, 1)
        await wait_for_acks(bus)
        await worker.finish(request_id)
        (record,) = await cell.wait_for_end(request_id)
        assert record.ended is not None
        assert record.ended.reason == "finished"

        async def is_idle() -> bool:
            return value_of(metrics, "requests_running") == 0 == value_of(metrics, "queue_length")

        await wait_until_async(is_idle, description="the gauges show an idle cell")
        assert worker.attempts == [(request_id, 1)]
        assert value_of(metrics, "dispatches_total") == 1


async def test_what_was_submitted_before_any_scheduler_started_is_served(bus: Bus) -> None:
    """The group should start at the beginning, and `live` be the index."""
    async with service_cell(bus) as cell:
        request_ids = [await cell.submit() for _ in range(3)]
        worker, _ = cell.start_worker("w:1")
        cell.start_scheduler()
        await finish_all(worker, cell, request_ids)
        assert [request_id for request_id, _ in worker.attempts] == request_ids
        await wait_for_acks(bus)


async def test_what_never_fits_ends_as_rejected_with_the_numbers(bus: Bus) -> None:
    """The client should be told what is too large for what."""
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        worker, _ = cell.start_worker("w:1", num_blocks=8)
        too_large, fitting = await cell.submit(prompt_len=200), await cell.submit()
        await cell.wait_for_attempt(worker, fitting, 1)
        (record,) = await cell.wait_for_end(too_large)
        assert record.ended is not None
        assert (record.ended.reason, record.ended.error_kind) == ("rejected", "never_fits")
        assert "14 blocks of 16 tokens" in record.ended.error_message


async def test_a_deadline_ends_a_request_that_waits(bus: Bus) -> None:
    """Without any worker a request should end at its deadline, not before."""
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        request_id = await cell.submit(timeout_s=0.5)
        (record,) = await cell.wait_for_end(request_id)
        assert record.ended is not None
        assert (record.ended.reason, record.ended.error_kind) == ("deadline", "deadline_exceeded")


async def test_a_dead_workers_requests_run_elsewhere_as_the_next_attempt(bus: Bus) -> None:
    """kill -9 of a worker: after the lease another one gets them; the crash is counted."""
    async with service_cell(bus, worker_lease_s=0.6) as cell:
        cell.start_scheduler()
        first, task = cell.start_worker("w:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(first, request_id, 1)
        await cell.kill(task)
        second, _ = cell.start_worker("v:1")
        await cell.wait_for_attempt(second, request_id, 2)
        assert (await cell.record(request_id)).crashes == 1
        assert [pulse.hello.worker_id for pulse in await bus.read_workers()] == ["v:1"]


async def test_a_request_that_kills_every_worker_fails_after_max_crashes(bus: Bus) -> None:
    """A poison request should be tried K times and end with an error."""
    async with service_cell(bus, worker_lease_s=0.4, max_crashes=2) as cell:
        cell.start_scheduler()
        request_id = await cell.submit()
        for attempt in (1, 2):
            worker, task = cell.start_worker(f"w{attempt}:1")
            await cell.wait_for_attempt(worker, request_id, attempt)
            await bus.mark_suspect(worker.worker_id, request_id)
            await cell.kill(task)
        (record,) = await cell.wait_for_end(request_id)
        assert record.ended is not None
        assert (record.ended.reason, record.attempt) == ("failed", 2)


@pytest.mark.case(74)
async def test_an_urgent_request_takes_the_only_slot_and_the_other_comes_back(bus: Bus) -> None:
    """With one slot that a less urgent request has, an urgent one should have it at once, in the order Preempt, Run;
    the other should run again afterwards, counted as preempted once."""
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        worker, _ = cell.start_worker("w:1", max_num_seqs=1)
        patient = await cell.submit(max_tokens=200, priority=5)
        await cell.wait_for_attempt(worker, patient, 1)
        urgent = await cell.submit(priority=-1)
        await cell.wait_for_attempt(worker, urgent, 1)
        assert [message.request_id for message in worker.preempts] == [patient]
        assert [(run.request_id, run.priority) for run in worker.runs[:2]] == [(patient, 5), (urgent, -1)]
        await worker.finish(urgent)
        await cell.wait_for_attempt(worker, patient, 2)
        assert (await cell.record(patient)).preemptions == 1
        await worker.finish(patient)
        await cell.wait_for_end(urgent, patient)


async def test_a_request_that_its_worker_forgot_is_sent_again(bus: Bus) -> None:
    """Read from the inbox and never listed: it should go out again, as a new attempt."""
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        worker, _ = cell.start_worker("w:1")
        worker.forgets = True
        request_id = await cell.submit()

        async def was_sent() -> bool:
            return (request_id, 1) in worker.attempts

        await wait_until_async(was_sent, description="the first attempt arrives")
        worker.forgets = False
        await cell.wait_for_attempt(worker, request_id, 2)


async def test_a_standby_takes_over_from_a_dead_leader_and_rebuilds(bus: Bus) -> None:
    """kill -9 of the leader: running requests stay where they are, new ones are served by the next."""
    async with service_cell(bus) as cell:
        task, _, first = cell.start_scheduler()
        await wait_for_lead(first)
        _, _, second = cell.start_scheduler()
        worker, _ = cell.start_worker("w:1")
        running = await cell.submit()
        await cell.wait_for_attempt(worker, running, 1)
        assert value_of(second, "is_leader") == 0
        await cell.kill(task)
        waiting = await cell.submit()
        await wait_for_lead(second)
        await cell.wait_for_attempt(worker, waiting, 1)
        assert worker.attempts == [(running, 1), (waiting, 1)]


async def test_a_stopped_leader_gives_the_lead_away_at_once(bus: Bus) -> None:
    """On SIGTERM nobody should wait for a lease."""
    async with service_cell(bus, leader_lease_s=30.0) as cell:
        task, stop, first = cell.start_scheduler()
        await wait_for_lead(first)
        stop.set()
        await task
        assert (await bus.read_leader()).token == ""
        _, _, second = cell.start_scheduler()
        await wait_for_lead(second)


async def test_a_leader_whose_token_was_taken_steps_down(bus: Bus) -> None:
    """A leader that was stopped past its lease should find that out and stand by, and come back when it may."""
    async with service_cell(bus) as cell:
        _, _, metrics = cell.start_scheduler()
        await wait_for_lead(metrics)

        async def take() -> bool:
            return await bus.take_lead("usurper", await bus.read_leader())

        await wait_until_async(take, description="the usurper leads")

        async def stands_by() -> bool:
            return value_of(metrics, "is_leader") == 0

        await wait_until_async(stands_by, description="the old leader steps down")
        await wait_for_lead(metrics)
        assert (await bus.read_leader()).token != "usurper"


async def test_a_restarted_workers_requests_go_on_without_waiting_for_its_lease(bus: Bus) -> None:
    """A new hello under the name of one that died should end the old one: the leader sends its work out at once."""
    async with service_cell(bus, worker_lease_s=60.0) as cell:
        cell.start_scheduler()
        first, task = cell.start_worker("w:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(first, request_id, 1)
        await cell.kill(task)
        second, _ = cell.start_worker("w:2")
        await cell.wait_for_attempt(second, request_id, 2)
        assert (await cell.record(request_id)).crashes == 1


class Deaf(MemoryBus):
    """Wake-ups never come, and reports of an end name another request."""

    async def read_submits(self, consumer: str, count: int, block_ms: int) -> list[tuple[EntryId, SubmitRequest]]:
        for entry_id, _ in await super().read_submits(consumer, count, block_ms):
            await self.ack_submits([entry_id])
        return []

    async def read_reports(self, after: EntryId, count: int, block_ms: int) -> list[tuple[EntryId, ReportMessage]]:
        entries = await super().read_reports(after, count, block_ms)
        other = RequestEnded(request_id=RequestId("cmpl-other"), reason="finished")
        return [(entry_id, other if isinstance(message, RequestEnded) else message) for entry_id, message in entries]


async def test_lost_wake_ups_are_found_in_the_records() -> None:
    """Streams are only wake-ups: what they never told should be found by the scan, in `live` and the records."""
    async with service_cell(Deaf()) as cell:
        _, _, metrics = cell.start_scheduler()
        await wait_for_lead(metrics)
        worker, _ = cell.start_worker("w:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(worker, request_id, 1)
        await cell.bus.end(request_id, "cancelled")

        async def is_forgotten() -> bool:
            return value_of(metrics, "requests_running") == 0

        await wait_until_async(is_forgotten, description="the end is seen")


class FailsAsItIsCancelled(MemoryBus):
    async def read_reports(self, after: EntryId, count: int, block_ms: int) -> list[tuple[EntryId, ReportMessage]]:
        try:
            return await super().read_reports(after, count, block_ms)
        except asyncio.CancelledError:
            raise BusUnavailable("gone in the very moment") from None


async def test_a_stop_is_heard_though_the_bus_fails_with_it() -> None:
    """A term that fails while it is cancelled should end, not begin anew."""
    async with service_cell(FailsAsItIsCancelled()) as cell:
        task, stop, metrics = cell.start_scheduler()
        await wait_for_lead(metrics)
        stop.set()
        done, _ = await asyncio.wait({task}, timeout=5)
        assert done


class Usurped(MemoryBus):
    """Another scheduler takes the lead just before the first end that one asks for."""

    async def end(
        self, request_id: RequestId, reason: str, error_kind: str = "", error_message: str = "", *, token: str = ""
    ) -> bool:
        await self.take_lead("usurper", await self.read_leader())
        return await super().end(request_id, reason, error_kind, error_message, token=token)


async def test_a_leader_that_lost_the_lead_ends_nothing() -> None:
    """What a stopped leader had decided should have no effect when it wakes up."""
    bus = Usurped()
    async with service_cell(bus, leader_lease_s=60.0) as cell:
        _, _, metrics = cell.start_scheduler()
        await wait_for_lead(metrics)
        request_id = await cell.submit(timeout_s=0.1)

        async def stands_by() -> bool:
            return (await bus.read_leader()).token == "usurper" and value_of(metrics, "is_leader") == 0

        await wait_until_async(stands_by, description="the old leader steps down")
        assert request_id in await bus.list_live()


@pytest.mark.parametrize("place", ["scheduler.after_read", "scheduler.after_dispatch", "scheduler.before_ack"])
@pytest.mark.parametrize("action", ["drop", "raise"])
async def test_an_error_at_any_step_loses_and_doubles_nothing(bus: Bus, place: str, action: str) -> None:
    """Whatever a term had done when it broke, the next one should go on from the records."""
    failpoints.arm(f"{place}={action}@2")
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        worker, _ = cell.start_worker("w:1", num_blocks=100, max_num_seqs=50)
        request_ids = []
        for _ in range(5):
            request_ids.append(await cell.submit())

            async def is_running(request_id: RequestId = request_ids[-1]) -> bool:
                return (await cell.record(request_id)).state is RequestState.RUNNING

            await wait_until_async(is_running, description="the request runs")
        await finish_all(worker, cell, request_ids)
        assert worker.attempts == [(request_id, 1) for request_id in request_ids]
        await wait_for_acks(bus)


async def test_a_dead_gateways_requests_are_cancelled_after_the_orphan_time(bus: Bus) -> None:
    """Nobody came back for the stream: it should end, and not before its gateway's lease and the orphan time."""
    async with service_cell(bus, orphan_ttl_s=1.0) as cell:
        cell.start_scheduler()
        worker, _ = cell.start_worker("w:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(worker, request_id, 1)
        await cell.kill_gateway()
        (record,) = await cell.wait_for_end(request_id)
        assert record.ended is not None
        assert record.ended.reason == "cancelled"
        assert record.listeners == ()

        async def is_free() -> bool:
            return worker.held == {}

        await wait_until_async(is_free, description="the worker was told")


async def test_reports_of_a_worker_that_left_stop_nobody(bus: Bus) -> None:
    """A report whose worker is not in the bus should be skipped."""
    async with service_cell(bus) as cell:
        cell.start_scheduler()
        report = WorkerReport(
            worker_id=WorkerId("gone:1"), seq=1, last_inbox_id="0-0", free_blocks=999, num_blocks=999, num_steps=1
        )
        worker, _ = cell.start_worker("w:1")
        request_id = await cell.submit()
        await bus.report(report)
        await finish_all(worker, cell, [request_id])

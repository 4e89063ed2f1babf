"""Worker time on the way from a step to the records: all of it arrives, once, whatever becomes of a request."""

from __future__ import annotations

import time

from gpu_worker.accounts import MAX_UNWRITTEN_US, NUM_KEPT, Accounts
from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.chunks import BatchPlan
from gpu_worker.engine.step_work import StepWork
from shared.bus import Bus, CommitOutcome, RequestState, WorkItem
from shared.errors import BusUnavailable
from shared.ids import RequestId
from shared.memory_bus import MemoryBus
from shared.messages import PreemptRequest
from shared.work_time import US_PER_S, WorkTime
from tests.gpu_worker.service.cell import TOKEN, Cell
from tests.scripted_runner import ScriptedRunner
from tests.waiting import wait_until_async

A, B = RequestId("a"), RequestId("b")


class SlowRunner(ScriptedRunner):
    """Takes some milliseconds a step; `seconds` is what all steps took by its own watch."""

    seconds = 0.0
    step_s = 0.004

    def start(self, plan: BatchPlan) -> None:
        super().start(plan)
        self._started_at = time.monotonic()

    def finish(self) -> list[DrawnToken]:
        time.sleep(self.step_s)
        drawn = super().finish()
        self.seconds += time.monotonic() - self._started_at
        return drawn


def step(request_id: RequestId, prefill_us: int, decode_us: int = 0) -> StepWork:
    return StepWork(request_id, 1, prefill_us, decode_us)


def test_writes_at_an_end_or_when_much_has_come_together() -> None:
    """Nothing should be written for each step, the whole at an end, and once after it what came late."""
    accounts = Accounts()
    accounts.open(A, 1, is_exact=False)
    accounts.add([step(A, MAX_UNWRITTEN_US - 1), step(B, 10**9)])
    assert not accounts.has_due
    accounts.add([step(A, 0, 1)])
    due = accounts.take_due()
    assert due == [WorkItem(A, 1, MAX_UNWRITTEN_US - 1, 1)]
    accounts.settle(due)
    accounts.add([step(A, 0, 7)])
    assert accounts.take_due() == []
    accounts.close_soon(A, 1)
    accounts.settle(accounts.take_due())
    accounts.leave(A, 1)
    assert not accounts.has_due
    accounts.add([step(A, 0, 2)])
    assert accounts.take_due() == [WorkItem(A, 1, MAX_UNWRITTEN_US - 1, 10)]


def test_what_leaves_early_is_written() -> None:
    """A request that is dropped should be due with what it cost so far."""
    accounts = Accounts()
    accounts.open(A, 1, is_exact=False)
    accounts.add([step(A, 5)])
    accounts.leave(A, 1)
    assert accounts.take_due() == [WorkItem(A, 1, 5, 0)]


def test_what_may_not_have_arrived_is_written_again() -> None:
    """A refused write should be due again, with what came meanwhile; what grew while it was on its way should not be
    taken for written."""
    accounts = Accounts()
    accounts.open(A, 1, is_exact=True)
    accounts.add([step(A, 5)])
    lost = accounts.take_due()
    accounts.add([step(A, 1)])
    accounts.give_back(lost)
    taken = accounts.take_due()
    assert taken == [WorkItem(A, 1, 6, 0)]
    accounts.add([step(A, 2)])
    accounts.settle(taken)
    assert accounts.take_due() == [WorkItem(A, 1, 8, 0)]


def test_forgets_the_oldest_of_those_that_left() -> None:
    """Accounts of requests that left should not pile up."""
    accounts = Accounts()
    for number in range(NUM_KEPT + 5):
        request_id = RequestId(str(number))
        accounts.open(request_id, 1, is_exact=False)
        accounts.leave(request_id, 1)
    accounts.add([step(RequestId("4"), 1), step(RequestId("5"), 1)])
    assert accounts.take_due() == [WorkItem(RequestId("5"), 1, 1, 0)]


async def worked(cell: Cell, *request_ids: RequestId) -> int:
    """Microseconds in the records of these."""
    return sum([sum((await cell.record(request_id)).worked) for request_id in request_ids])


async def test_all_of_it_arrives_once(bus: Bus) -> None:
    """Requests that finish, are cancelled, stopped, preempted and moved should together have the steps' whole time."""
    began = time.monotonic()
    async with Cell(bus) as cell:
        first, second = [await cell.start_worker(SlowRunner()) for _ in range(2)]
        finished = await cell.run(first, (1,) * 100, n=2, max_tokens=12)
        cancelled, stopped, moved = [await cell.run(first, max_tokens=200) for _ in range(3)]
        for request_id in (cancelled, stopped, moved):
            await cell.wait_for_tokens(request_id, 3)
        await bus.end(cancelled, "cancelled")
        await bus.stop_choice(stopped, 0, 2)
        message = PreemptRequest(request_id=moved, attempt=1, report_seq=first.reports[-1].seq)
        await bus.preempt(TOKEN, first.worker_id, message)
        await cell.wait_for_state(moved, RequestState.QUEUED)
        await cell.dispatch(moved, second)
        await cell.assert_as_solo(finished, moved)
        everything = (finished, cancelled, stopped, moved)

        async def has_arrived() -> bool:
            return await worked(cell, *everything) >= US_PER_S * (first.runner.seconds + second.runner.seconds)

        await wait_until_async(has_arrived, description="all work", timeout_s=5)
        total = await worked(cell, *everything)
        assert total <= 2 * US_PER_S * (time.monotonic() - began)
        assert await bus.read_worked() == {"t": WorkTime(*map(sum, zip(*[
            (await cell.record(request_id)).worked for request_id in everything], strict=True)))}  # fmt: skip
        assert (await cell.record(moved)).attempt == 2


class UnsureBus(MemoryBus):
    """Every other commit has its effect, and its answer is lost."""

    num_commits = 0

    async def commit(self, worker_id, items, work=()) -> list[CommitOutcome]:  # type: ignore[no-untyped-def]
        outcomes = await super().commit(worker_id, items, work)
        self.num_commits += 1
        if self.num_commits % 2:
            raise BusUnavailable("the answer was lost")
        return outcomes


async def test_lost_answers_count_nothing_twice() -> None:
    """A worker that writes everything twice should count once: less than the time that has passed."""
    bus = UnsureBus()
    async with Cell(bus) as cell:
        worker = await cell.start_worker(SlowRunner())
        began = time.monotonic()
        request_id = await cell.run(worker, max_tokens=30)
        record = await cell.wait_for_state(request_id, RequestState.ENDED)
        assert US_PER_S * worker.runner.seconds <= sum(record.worked) <= US_PER_S * (time.monotonic() - began)
        assert bus.num_commits >= 4

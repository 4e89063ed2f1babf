"""The worker service: what it logs equals the undisturbed run, and it holds nothing that it should not."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from gpu_worker import pulse
from gpu_worker.engine.engine import EngineBroken
from gpu_worker.engine_thread import MAX_STEPS_AHEAD
from shared import failpoints
from shared.bus import RequestState, WorkerPulse
from shared.errors import BusRefused
from shared.ids import WorkerId, worker_name
from shared.memory_bus import MemoryBus
from shared.messages import HeldRequest, PreemptRequest, RunRequest
from tests.gpu_worker.service.cell import TOKEN, Cell, wait_until
from tests.scripted_runner import ScriptedHostMemory, ScriptedRunner

POISON = 1000


def memory(cell: Cell) -> MemoryBus:
    assert isinstance(cell.bus, MemoryBus)
    return cell.bus


async def test_should_run_requests_to_their_end(cell: Cell) -> None:
    """Several prompts with several choices should be logged in full, end, and leave worker and inbox empty."""
    worker = await cell.start_worker()
    first = await cell.run(worker, (1, 2, 3), (4, 5), n=2)
    second = await cell.run(worker, tuple(range(90)), max_tokens=30, stop_token_ids=(3, 5))
    await cell.assert_as_solo(first, second)
    await wait_until(lambda: worker.is_idle, description="an idle report")
    assert worker.runner.num_rows == 0
    assert await cell.bus.read_inbox(worker.worker_id, "0-0", 9, 0) == []  # type: ignore[arg-type]
    last = worker.reports[-1]
    assert (last.num_prompt_tokens, last.num_generation_tokens) == (2 * 3 + 2 * 2 + 90, 4 * 12 + len(
        await cell.logged(second)
    ))  # fmt: skip


async def test_should_report_what_it_holds_with_the_inbox_entry_it_knows(cell: Cell) -> None:
    """A report that names an inbox entry as applied should list the request of that entry."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.submit(n=2)
    entry_id = await cell.dispatch(request_id, worker)
    worker.runner.permit(2)
    await wait_until(
        lambda: worker.reports[-1].last_inbox_id == entry_id and worker.reports[-1].num_running == 2,
        description="a report with both choices running",
    )
    assert all(report.held for report in worker.reports if report.last_inbox_id == entry_id)
    (held,) = worker.reports[-1].held
    assert (held.request_id, held.attempt, held.num_blocks, held.num_running) == (request_id, 1, 2, 2)
    assert worker.reports[-1].free_blocks == worker.runner.num_blocks - 2
    worker.runner.open()
    await cell.assert_as_solo(request_id)


@pytest.mark.parametrize("spec", ["bus.commit.reply=drop@1", "bus.commit.reply=drop@5", "worker.before_commit=drop@3"])
async def test_a_lost_reply_should_change_nothing(cell: Cell, spec: str) -> None:
    """A commit whose reply, or request, was lost should be repeated without a token lost or doubled."""
    worker = await cell.start_worker()
    failpoints.arm(spec)
    await cell.assert_as_solo(await cell.run(worker, n=3))
    await wait_until(lambda: worker.is_idle, description="an idle report")


async def test_replies_lost_again_and_again_should_change_nothing(cell: Cell) -> None:
    """While no commit seems to succeed nothing should be doubled; afterwards all should end."""
    worker = await cell.start_worker()
    failpoints.arm("bus.commit.reply=drop")
    request_id = await cell.run(worker, n=2)
    await cell.wait_for_tokens(request_id, 2)
    failpoints.arm("")
    await cell.assert_as_solo(request_id)


@pytest.mark.parametrize("length", [0, 1, 4])
async def test_should_send_again_what_the_log_has_lost(cell: Cell, length: int) -> None:
    """A log that has fallen back, even behind what an earlier attempt wrote, should be filled from memory."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker, max_tokens=60)
    await cell.wait_for_tokens(request_id, 3, stepping=worker)
    await cell.preempt(worker, request_id)
    num_before = len(await cell.logged(request_id))
    await cell.dispatch(request_id, worker)
    await cell.wait_for_tokens(request_id, num_before + 2, stepping=worker)
    record = memory(cell).steps.records[request_id]
    record.choices[0].length = length
    del record.log[3 * length :]  # [0, token] takes 3 bytes as long as the token is below 128
    worker.runner.open()
    await cell.assert_as_solo(request_id)


class RefusingBus(MemoryBus):
    """A bus that refuses writes of tokens while `is_full`, as a Redis out of memory does."""

    is_full = False

    async def commit(self, worker_id, items, work=()):  # type: ignore[no-untyped-def]
        if self.is_full:
            raise BusRefused("out of memory")
        return await super().commit(worker_id, items, work)


async def test_refused_writes_should_pause_the_stream() -> None:
    """While commits are refused the engine should run at most a few steps ahead; then the stream should go on."""
    bus = RefusingBus()
    async with Cell(bus) as cell:
        worker = await cell.start_worker()
        bus.is_full = True
        request_id = await cell.run(worker)
        await wait_until(lambda: len(worker.runner.plans) > MAX_STEPS_AHEAD, description="the engine to run ahead")
        await wait_until(lambda: len(worker.reports) > 3, description="some more time")
        assert len(worker.runner.plans) == MAX_STEPS_AHEAD + 1
        assert await cell.logged(request_id) == []
        bus.is_full = False
        await cell.assert_as_solo(request_id)


async def test_a_stopped_choice_should_leave_the_others_running(cell: Cell) -> None:
    """A stop string in one choice should free that choice only; the request should end with the other one's end."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker, n=2, max_tokens=20)
    await cell.wait_for_tokens(request_id, 4, choice=1, stepping=worker)
    assert await cell.bus.stop_choice(request_id, 1, 2)
    await wait_until(
        lambda: worker.reports[-1].num_running == 1, description="one choice to be dropped", stepping=worker
    )
    worker.runner.open()
    record = await cell.wait_for_state(request_id, RequestState.ENDED)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.completion_tokens) == ("finished", 20 + 3)
    await wait_until(lambda: worker.is_idle, description="an idle report")


async def test_a_cancelled_request_should_free_its_blocks(cell: Cell) -> None:
    """The end of a request, by whoever, should reach the worker at once and free everything."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker, n=3)
    await cell.wait_for_tokens(request_id, 1, stepping=worker)
    await cell.bus.end(request_id, "cancelled")
    worker.runner.open()
    await wait_until(lambda: worker.is_idle, description="an idle report")


async def test_a_preempted_request_should_go_on_later(cell: Cell) -> None:
    """Preempt should give it back to the queue with all its tokens logged; run again, it should end as solo."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker, n=2, max_tokens=60)
    await cell.wait_for_tokens(request_id, 5, stepping=worker)
    record = await cell.preempt(worker, request_id)
    assert (record.preemptions, record.attempt) == (1, 1)
    await wait_until(lambda: worker.is_idle, description="an idle report")
    assert worker.reports[-1].num_preemptions == 2
    await cell.dispatch(request_id, worker)
    worker.runner.open()
    await cell.assert_as_solo(request_id)


async def test_a_request_that_is_kept_should_go_on_in_the_worker(cell: Cell) -> None:
    """Preempted to be kept, a request should stay this worker's, wait with its blocks in host memory, and go on when a
    neighbour has left, in the same attempt; a report should tell all of that."""
    runner = ScriptedRunner(is_gated=True)
    runner.host_memory = ScriptedHostMemory(runner, 16)
    worker = await cell.start_worker(runner)
    hello = next(pulse.hello for pulse in await cell.bus.read_workers())
    assert (hello.num_swap_blocks, hello.preemption_mode) == (16, "auto")
    first, kept = await cell.run(worker, max_tokens=30), await cell.run(worker, n=2, max_tokens=60)
    await cell.wait_for_tokens(kept, 5, choice=1, stepping=worker)
    message = PreemptRequest(request_id=kept, attempt=1, report_seq=worker.reports[-1].seq, keeps=True)
    await cell.bus.preempt(TOKEN, worker.worker_id, message)

    def held() -> HeldRequest | None:
        return next((h for h in worker.reports[-1].held if h.request_id == kept and h.num_waiting == 2), None)

    await wait_until(held, description="a report of what waits", stepping=worker)
    shown = held()
    assert shown is not None
    assert (shown.num_running, shown.num_blocks, shown.num_swapped_blocks) == (0, 0, 2)
    assert worker.reports[-1].free_swap_blocks == 14
    assert (await cell.record(kept)).state is RequestState.RUNNING
    runner.open()
    await cell.assert_as_solo(first, kept)
    record = await cell.record(kept)
    assert (record.attempt, record.preemptions) == (1, 0)
    await wait_until(lambda: worker.is_idle, description="an idle report")
    last = worker.reports[-1]
    assert (last.num_preemptions, last.num_swap_preemptions, last.num_swapped_out) == (2, 2, 2)


async def test_keeping_a_request_should_be_void_after_an_eviction(cell: Cell) -> None:
    """A preemption to be kept that was decided before the worker evicted somebody itself should change nothing."""
    worker = await cell.start_worker(ScriptedRunner(4, 4, is_gated=True))
    requests = [await cell.run(worker, max_tokens=10) for _ in range(2)]
    await wait_until(lambda: worker.reports[-1].num_running == 2, description="two that run", stepping=worker)
    before = worker.reports[-1].seq
    await wait_until(lambda: worker.reports[-1].num_evictions > 0, description="an eviction", stepping=worker)
    message = PreemptRequest(request_id=requests[0], attempt=1, report_seq=before, keeps=True)
    await cell.bus.preempt(TOKEN, worker.worker_id, message)
    worker.runner.open()
    await cell.assert_as_solo(*requests)
    await wait_until(lambda: worker.is_idle, description="an idle report")
    assert worker.reports[-1].num_preemptions == worker.reports[-1].num_evictions


@pytest.mark.parametrize(("num_blocks", "is_told"), [(12, True), (200, False)])
async def test_growth_should_be_reported_when_it_is_much(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, num_blocks: int, is_told: bool
) -> None:
    """Blocks that a stream takes should be reported as they come to an eighth of what was free, and not before."""
    monkeypatch.setattr(pulse, "CALM_REPORT_S", 60.0)
    worker = await cell.start_worker(ScriptedRunner(num_blocks, 4, is_gated=True))
    request_id = await cell.run(worker, max_tokens=35)
    await wait_until(lambda: worker.reports[-1].num_running == 1, description="it runs", stepping=worker)
    first = len(worker.reports)
    if is_told:
        await wait_until(lambda: worker.reports[-1].free_blocks <= 4, description="growth", stepping=worker)
        frees = [report.free_blocks for report in worker.reports[first - 1 :]]
        assert all(after < before * 7 / 8 for before, after in itertools.pairwise(frees))
    else:
        await cell.wait_for_tokens(request_id, 30, stepping=worker)
        assert len(worker.reports) == first
    worker.runner.open()
    await cell.assert_as_solo(request_id)


async def test_a_preempt_should_be_void_after_an_eviction(cell: Cell) -> None:
    """A worker that has evicted something since the report that a preempt names should ignore it."""
    worker = await cell.start_worker(ScriptedRunner(6, 4, is_gated=True))
    seq = worker.reports[-1].seq
    older, younger = [await cell.run(worker, (n, 2, 3), max_tokens=16) for n in (1, 9)]
    await wait_until(lambda: worker.reports[-1].num_evictions, description="an eviction", stepping=worker)
    entry_id = await cell.bus.preempt(
        TOKEN, worker.worker_id, PreemptRequest(request_id=older, attempt=1, report_seq=seq)
    )
    worker.runner.open()
    await cell.assert_as_solo(older, younger)
    record = await cell.record(older)
    assert (record.attempt, record.preemptions) == (1, 0)
    await wait_until(lambda: worker.reports[-1].last_inbox_id == entry_id, description="the preempt to be applied")


async def test_what_can_never_fit_should_be_rejected(cell: Cell) -> None:
    """A request that the scheduler should have refused should end as rejected; others should not suffer."""
    worker = await cell.start_worker(ScriptedRunner(4, 4))
    fitting, too_large = await cell.run(worker), await cell.run(worker, tuple(range(30)))
    record = await cell.wait_for_state(too_large, RequestState.ENDED)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.error_kind) == ("rejected", "context_length_exceeded")
    await cell.assert_as_solo(fitting)


async def test_a_request_that_breaks_the_model_should_fail_alone(cell: Cell) -> None:
    """Its neighbours should be as solo, its client should get an error that tells nothing of the inside."""
    worker = await cell.start_worker(ScriptedRunner(poison=POISON))
    good = [await cell.run(worker, (n,)) for n in range(3)]
    bad = await cell.run(worker, (POISON, 1), n=2)
    await cell.assert_as_solo(*good)
    record = await cell.wait_for_state(bad, RequestState.ENDED)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.error_kind) == ("failed", "internal_error")
    assert "RuntimeError" not in record.ended.error_message
    await wait_until(lambda: worker.is_idle, description="an idle report")


async def test_a_log_that_contradicts_its_record_should_fail_the_request(cell: Cell) -> None:
    """Tokens drawn from the wrong place would leave a hole in the log: the client should get an error instead."""
    worker = await cell.start_worker()
    request_id = await cell.submit()
    memory(cell).steps.records[request_id].choices[0].length = 3
    await cell.dispatch(request_id, worker)
    record = await cell.wait_for_state(request_id, RequestState.ENDED)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.error_kind) == ("failed", "internal_error")
    await cell.assert_as_solo(await cell.run(worker))


async def test_a_broken_model_should_end_the_process(cell: Cell) -> None:
    """When every request fails the service should give up, without a bye, so that they run elsewhere."""
    worker = await cell.start_worker()
    worker.runner.is_broken = True
    for number in range(12):
        await cell.run(worker, (number,))
    with pytest.raises(EngineBroken):
        await worker.task
    assert worker.worker_id in {pulse.hello.worker_id for pulse in await cell.bus.read_workers()}


async def test_a_command_that_comes_twice_should_be_a_no_op(cell: Cell) -> None:
    """The same RunRequest again, or one of another attempt, should change nothing."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker, max_tokens=90)
    await cell.wait_for_tokens(request_id, 2, stepping=worker)
    inbox = memory(cell).steps.workers[worker.worker_id].inbox
    for attempt in (1, 2, 0):
        message = RunRequest(request_id=request_id, attempt=attempt, choices=(0,), rank=1)
        last = memory(cell).steps.append(inbox, message, request_id)
    await wait_until(
        lambda: worker.reports[-1].last_inbox_id == last, description="the commands to be applied", stepping=worker
    )
    assert [held.attempt for held in worker.reports[-1].held] == [1]
    worker.runner.open()
    await cell.assert_as_solo(request_id)


@pytest.mark.case(93)
async def test_a_worker_declared_dead_should_start_over(cell: Cell) -> None:
    """Its requests should go on elsewhere with the very tokens; it should drop them and come back under a new id."""
    zombie = await cell.start_worker(ScriptedRunner(is_gated=True))
    old_id = zombie.worker_id
    request_id = await cell.run(zombie, n=2)
    await cell.wait_for_tokens(request_id, 3, stepping=zombie)
    assert await cell.bus.requeue(TOKEN, old_id) == [request_id]
    heir = await cell.start_worker()
    await cell.dispatch(request_id, heir)
    await cell.assert_as_solo(request_id)
    zombie.runner.open()
    await wait_until(lambda: zombie.worker_id != old_id, description="the new incarnation to report")
    assert zombie.is_idle
    assert zombie.runner.num_rows == 0, "the model should have been told to forget"
    assert {zombie.worker_id, heir.worker_id} == {p.hello.worker_id for p in await cell.bus.read_workers()}
    await cell.assert_as_solo(await cell.run(zombie, (8, 9)))


async def test_an_idle_worker_declared_dead_should_start_over(cell: Cell) -> None:
    """Holding nothing it has no answers to learn from, and should notice all the same."""
    worker = await cell.start_worker()
    old_id = worker.worker_id
    await cell.bus.requeue(TOKEN, old_id)
    await wait_until(lambda: worker.worker_id != old_id, description="the new incarnation to report")


async def test_a_worker_ended_by_a_namesake_should_not_end_it_in_turn(cell: Cell) -> None:
    """Two containers with one host name and one pid: the second hello ends the first worker once, then both live."""
    worker = await cell.start_worker()
    (pulse,) = await cell.bus.read_workers()
    namesake = replace(pulse.hello, worker_id=WorkerId(f"{worker_name(worker.worker_id)}:other"))
    await cell.bus.hello(namesake)
    await wait_until(lambda: worker.worker_id != pulse.hello.worker_id, description="the new incarnation to report")
    ids = {p.hello.worker_id for p in await cell.bus.read_workers()}
    assert ids == {worker.worker_id, namesake.worker_id}


async def test_a_request_taken_away_should_be_dropped(cell: Cell) -> None:
    """When only one request was given to another owner, the worker should drop that one and keep the rest."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    keep, lose = await cell.run(worker, (1,)), await cell.run(worker, (2,))
    await cell.wait_for_tokens(lose, 1, stepping=worker)
    assert await cell.bus.requeue_one(TOKEN, lose, worker.worker_id, 1)
    worker.runner.open()
    await cell.assert_as_solo(keep)
    await wait_until(lambda: worker.is_idle, description="an idle report")
    await cell.dispatch(lose, worker)
    await cell.assert_as_solo(lose)


async def test_draining_should_finish_what_it_can(cell: Cell) -> None:
    """On TERM a worker should say that it drains, finish its work, and leave nothing behind."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker)
    await cell.wait_for_tokens(request_id, 1, stepping=worker)
    worker.stop.set()
    await wait_until(lambda: worker.reports[-1].is_draining, description="a report that it drains")
    late = await cell.run(worker, (9,))
    record = await cell.wait_for_state(late, RequestState.QUEUED)
    assert record.preemptions == 0, "what comes now should be given back at once"
    worker.runner.open()
    await worker.task
    await cell.assert_as_solo(request_id)
    assert await cell.bus.read_workers() == []


async def test_draining_should_hand_over_what_it_cannot_finish(cell: Cell) -> None:
    """After the grace time requests should be queued again, in their order, not counted as preempted, and go on."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True), drain_s=0.05)
    request_id = await cell.run(worker, n=2, max_tokens=90)
    await cell.wait_for_tokens(request_id, 3, stepping=worker)
    order = (await cell.record(request_id)).order
    worker.stop.set()
    record = await cell.wait_for_state(request_id, RequestState.QUEUED, stepping=worker)
    await worker.task
    assert (record.state, record.preemptions, record.order) == (RequestState.QUEUED, 0, order)
    assert await cell.bus.read_workers() == []
    heir = await cell.start_worker()
    await cell.dispatch(request_id, heir)
    await cell.assert_as_solo(request_id)


async def test_a_failure_of_a_request_taken_away_should_not_end_it(cell: Cell) -> None:
    """A worker that fails on a request which is another's by now should leave it alone."""
    worker = await cell.start_worker(ScriptedRunner(is_gated=True))
    heir = await cell.start_worker(ScriptedRunner(is_gated=True))
    request_id = await cell.run(worker)
    await cell.wait_for_tokens(request_id, 1, stepping=worker)
    assert await cell.bus.requeue_one(TOKEN, request_id, worker.worker_id, 1)
    await cell.dispatch(request_id, heir)
    worker.runner.is_broken = True
    worker.runner.open()
    await wait_until(lambda: worker.is_idle, description="an idle report")
    assert (await cell.record(request_id)).state is RequestState.RUNNING
    heir.runner.open()
    await cell.assert_as_solo(request_id)


async def test_draining_should_hand_over_suspects_that_wait(cell: Cell) -> None:
    """What never entered the engine should be queued again, too, and not count as preempted."""
    dead = await cell.start_worker(ScriptedRunner(is_gated=True))
    suspects = [await cell.run(dead, (n, 1), max_tokens=90) for n in range(2)]
    await wait_until(lambda: len(dead.reports[-1].held) == 2, description="all to be held")
    await cell.bus.requeue(TOKEN, dead.worker_id)
    heir = await cell.start_worker(ScriptedRunner(is_gated=True), drain_s=0.0)
    for request_id in suspects:
        await cell.dispatch(request_id, heir)
    await wait_until(lambda: len(heir.reports[-1].held) == 2, description="all to be held")
    heir.stop.set()
    await wait_until(lambda: len(heir.reports[-1].held) == 1, description="the waiting one to leave")
    heir.runner.open()
    await heir.task
    for request_id in suspects:
        record = await cell.record(request_id)
        assert (record.state, record.preemptions) == (RequestState.QUEUED, 0)


async def test_suspects_should_enter_one_at_a_time_under_their_name(cell: Cell) -> None:
    """After a crash each request should step alone, its name written down first, until it has logged a token."""
    dead = await cell.start_worker(ScriptedRunner(is_gated=True))
    suspects = [await cell.run(dead, (n, 1), max_tokens=8) for n in range(3)]
    await wait_until(lambda: len(dead.reports[-1].held) == 3, description="all to be held")
    await cell.bus.requeue(TOKEN, dead.worker_id)
    heir = await cell.start_worker(ScriptedRunner(is_gated=True))
    for request_id in suspects:
        await cell.dispatch(request_id, heir)
    await wait_until(lambda: len(heir.reports[-1].held) == 3, description="all to be held")
    marked = memory(cell).steps.workers[heir.worker_id]
    for number, request_id in enumerate(suspects):
        await wait_until(lambda expected=request_id: marked.suspect == expected, description=f"suspect {number}")
        assert await cell.logged(request_id) == []
        await cell.wait_for_tokens(request_id, 1, stepping=heir)
    await wait_until(lambda: marked.suspect is None, description="no suspect")
    first_steps = {}
    for plan in heir.runner.plans:
        for chunk in plan.chunks:
            first_steps.setdefault(chunk.sequence.request_id, len(plan.chunks))
    assert first_steps == dict.fromkeys(suspects, 1), "the first step of each should hold nothing else"
    heir.runner.open()
    dead.runner.open()
    await cell.assert_as_solo(*suspects)


async def test_prefill_failpoint_should_know_the_prompt(cell: Cell) -> None:
    """A test should be able to poison one prompt by its first four tokens, wherever it is in the batch."""
    worker = await cell.start_worker()
    failpoints.arm("worker.in_prefill?tok=6.6.6.7=raise")
    good, bad = await cell.run(worker, (6, 6, 6, 1)), await cell.run(worker, (6, 6, 6, 7, 8))
    await cell.assert_as_solo(good)
    record = await cell.wait_for_state(bad, RequestState.ENDED)
    assert record.ended is not None
    assert record.ended.reason == "failed"


@pytest.mark.parametrize("spoil", ["n", "prompts", "log"])
async def test_a_stored_request_that_contradicts_itself_fails_alone(cell: Cell, spoil: str) -> None:
    """A body or log that does not fit the record should end that request, and neither the worker nor the others."""
    worker = await cell.start_worker()
    request_id = await cell.submit()
    stored = memory(cell).steps.records[request_id]
    if spoil == "log":
        stored.log += b"\x92\x00\x05"
    else:
        changes = {"n": {"n": 0}, "prompts": {"prompts": ()}}[spoil]
        stored.body = replace(stored.body, **changes)  # type: ignore[arg-type]
    await cell.dispatch(request_id, worker)
    record = await cell.wait_for_state(request_id, RequestState.ENDED)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.error_kind) == ("failed", "internal_error")
    await cell.assert_as_solo(await cell.run(worker, (1, 2, 3)))


class _CancellingBus(MemoryBus):
    """Cancels `task` at the moment in which its worker learns that it was declared dead."""

    task: asyncio.Task[None] | None = None

    async def read_workers(self) -> list[WorkerPulse]:
        pulses = await super().read_workers()
        if not pulses and self.task is not None:
            self.task.cancel()
        return pulses


async def test_a_worker_that_is_cancelled_as_it_is_declared_dead_does_not_live_again() -> None:
    """Of two reasons to end that come at once the one should not hide the other."""
    bus = _CancellingBus()
    async with Cell(bus) as cell:
        worker = await cell.start_worker()
        bus.task = worker.task
        await cell.bus.requeue(TOKEN, worker.worker_id)
        await wait_until(worker.task.done, description="the end of the worker")
        assert worker.task.cancelled()

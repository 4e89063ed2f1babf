"""The leader: one at a time, and what only it may do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared import keys
from shared.bus import Bus, DispatchAnswer, DispatchOutcome, LeaderPulse, RequestState
from shared.errors import LeaderLost
from shared.ids import RequestId
from shared.messages import PreemptRequest, RunRequest
from shared.worker_wish import WorkerWish
from tests.contract.cell import G1, TOKEN, W1, W2, Cell, Probe, make_hello, make_item

NOBODY = RequestId("cmpl-x")


async def test_nobody_leads_at_first(bus: Bus) -> None:
    """An empty bus should show an empty token."""
    assert await bus.read_leader() == LeaderPulse()


async def test_one_of_many_takes_the_lead(bus: Bus) -> None:
    """Of several that saw the same pulse exactly one should become leader."""
    seen = await bus.read_leader()
    took = await asyncio.gather(*(bus.take_lead(f"t{i}", seen) for i in range(8)))
    assert sum(took) == 1
    assert (await bus.read_leader()).token == f"t{took.index(True)}"


async def test_a_stale_view_takes_nothing(bus: Bus) -> None:
    """A standby whose view of the pulse is old should not take over from a leader that is alive."""
    assert await bus.take_lead("a", await bus.read_leader())
    seen = await bus.read_leader()
    await bus.raise_lead("a")
    assert not await bus.take_lead("b", seen)
    assert (await bus.read_leader()).beat == seen.beat + 1


async def test_taking_the_lead_twice_is_once(bus: Bus) -> None:
    """A leader that lost the reply of its take-over should find that it leads."""
    seen = await bus.read_leader()
    assert await bus.take_lead("a", seen)
    pulse = await bus.read_leader()
    assert await bus.take_lead("a", seen)
    assert await bus.read_leader() == pulse


async def test_yielding_frees_the_lead(bus: Bus) -> None:
    """A clean stop should let the next one lead at once; yielding what is another's should do nothing."""
    await bus.take_lead("a", await bus.read_leader())
    await bus.yield_lead("b")
    assert (await bus.read_leader()).token == "a"
    await bus.yield_lead("a")
    await bus.yield_lead("a")
    assert (await bus.read_leader()).token == ""
    assert await bus.take_lead("b", await bus.read_leader())


STEPS: list[Callable[[Bus], Awaitable[object]]] = [
    lambda bus: bus.raise_lead("old"),
    lambda bus: bus.dispatch("old", NOBODY, W1, 1),
    lambda bus: bus.preempt("old", W1, PreemptRequest(request_id=NOBODY, attempt=1, report_seq=1)),
    lambda bus: bus.requeue("old", W1),
    lambda bus: bus.requeue_one("old", NOBODY, W1, 1),
    lambda bus: bus.remove_gateway("old", G1),
    lambda bus: bus.end(NOBODY, "failed", token="old"),
    lambda bus: bus.want_workers("old", WorkerWish(num_workers=9)),
]


@pytest.mark.parametrize(
    "step", STEPS, ids=["raise", "dispatch", "preempt", "requeue", "requeue_one", "remove", "end", "want"]
)
async def test_an_old_token_may_do_nothing(cell: Cell, step: Callable[[Bus], Awaitable[object]]) -> None:
    """Every step of a leader that was replaced should fail, even though it was leader once."""
    await cell.bus.yield_lead(TOKEN)
    await cell.bus.take_lead("old", await cell.bus.read_leader())
    assert await cell.bus.take_lead("new", await cell.bus.read_leader())
    with pytest.raises(LeaderLost):
        await step(cell.bus)
    assert (await cell.bus.read_leader()).token == "new"
    assert await cell.bus.read_wish() is None


async def test_the_last_wish_counts(cell: Cell) -> None:
    """There should be no wish before a leader has one, and each should stand in place of the one before."""
    assert await cell.bus.read_wish() is None
    for wish in (WorkerWish(num_workers=3, leaving=(W2, W1)), WorkerWish(num_workers=1)):
        for _ in range(2):
            await cell.bus.want_workers(TOKEN, wish)
        assert await cell.bus.read_wish() == wish
    await cell.bus.yield_lead(TOKEN)
    assert await cell.bus.read_wish() == WorkerWish(num_workers=1)


async def test_dispatch_gives_the_request_to_a_worker(cell: Cell) -> None:
    """Dispatch should raise the attempt, set the owner and put a RunRequest into the inbox."""
    request_id = await cell.submit(n=2)
    outcome = await cell.bus.dispatch(TOKEN, request_id, W1, 42, -7)
    record = await cell.record(request_id)
    assert (record.state, record.owner, record.attempt) == (RequestState.RUNNING, W1, 1)
    ((entry_id, message),) = await cell.bus.read_inbox(W1, "0-0", 9, 0)
    assert message == RunRequest(request_id=request_id, attempt=1, choices=(0, 1), rank=42, priority=-7)
    assert outcome == DispatchOutcome(DispatchAnswer.OK, entry_id, 1)


async def test_dispatch_twice_is_once(cell: Cell, probe: Probe) -> None:
    """A second dispatch, of the same leader or to another worker, should not start it twice."""
    request_id = await cell.run()
    assert (await cell.bus.dispatch(TOKEN, request_id, W1, 1)).answer == "not_queued"
    assert (await cell.bus.dispatch(TOKEN, request_id, W2, 1)).answer == "not_queued"
    assert (await cell.record(request_id)).attempt == 1
    assert (await probe.stream_length(keys.inbox(W1)), await probe.stream_length(keys.inbox(W2))) == (1, 0)


async def test_dispatch_needs_a_worker_and_a_request(cell: Cell, probe: Probe) -> None:
    """A worker that left, or a request that is not there, should leave everything as it was."""
    request_id = await cell.submit()
    await cell.bus.bye(W1)
    assert (await cell.bus.dispatch(TOKEN, request_id, W1, 1)).answer == "no_worker"
    assert (await cell.bus.dispatch(TOKEN, NOBODY, W2, 1)).answer == "ended"
    record = await cell.record(request_id)
    assert (record.state, record.attempt) == (RequestState.QUEUED, 0)
    assert await probe.stream_length(keys.inbox(W1)) == 0


async def test_preempt_reaches_the_inbox(cell: Cell, probe: Probe) -> None:
    """A preempt should arrive behind what was sent before; for a worker that left it should go nowhere."""
    request_id = await cell.run()
    message = PreemptRequest(request_id=request_id, attempt=1, report_seq=7)
    entry_id = await cell.bus.preempt(TOKEN, W1, message)
    assert (await cell.bus.read_inbox(W1, "0-0", 9, 0))[1] == (entry_id, message)
    await cell.bus.bye(W2)
    assert await cell.bus.preempt(TOKEN, W2, message) == "0-0"
    assert await probe.stream_length(keys.inbox(W2)) == 0


async def test_requeue_takes_all_from_a_lost_worker(cell: Cell, probe: Probe) -> None:
    """All that a lost worker owned should be queued in its old order, its inbox and fields gone; others' stay."""
    running, unread = await cell.run(), await cell.run()
    others = await cell.submit()
    await cell.dispatch(others, W2)
    order = (await cell.record(running)).order
    assert set(await cell.bus.requeue(TOKEN, W1)) == {running, unread}
    record = await cell.record(running)
    assert (record.state, record.owner, record.attempt, record.order) == (RequestState.QUEUED, None, 1, order)
    assert (await cell.record(others)).owner == W2
    assert await probe.stream_length(keys.inbox(W1)) == 0
    assert [pulse.hello.worker_id for pulse in await cell.bus.read_workers()] == [W2]
    assert await cell.bus.requeue(TOKEN, W1) == []
    assert await cell.dispatch(running, W2) == 2


async def test_requeue_without_a_suspect_counts_one_crash_for_each(cell: Cell) -> None:
    """Without a suspect each owned request should be watched (1), but no higher however often workers die."""
    request_id = await cell.run()
    await cell.bus.requeue(TOKEN, W1)
    await cell.dispatch(request_id, W2)
    await cell.bus.requeue(TOKEN, W2)
    record = await cell.record(request_id)
    assert (record.crashes, record.attempt) == (1, 2)


@pytest.mark.case(94)
async def test_requeue_with_a_suspect_counts_for_it_only(cell: Cell) -> None:
    """When a worker died with one request stepping alone, only that one's crashes should rise."""
    guilty, innocent = await cell.run(), await cell.run()
    for crashes in (1, 2, 3):
        await cell.bus.mark_suspect(W1, guilty)
        await cell.bus.requeue(TOKEN, W1)
        assert ((await cell.record(guilty)).crashes, (await cell.record(innocent)).crashes) == (crashes, 0)
        await cell.bus.hello(make_hello(W1))
        await cell.dispatch(guilty)
        await cell.dispatch(innocent)


async def test_a_cleared_suspect_is_none(cell: Cell) -> None:
    """A mark that was taken back should not count."""
    request_id, other = await cell.run(), await cell.run()
    await cell.bus.mark_suspect(W1, request_id)
    await cell.bus.mark_suspect(W1, None)
    await cell.bus.requeue(TOKEN, W1)
    assert [(await cell.record(name)).crashes for name in (request_id, other)] == [1, 1]


async def test_a_worker_that_is_gone_marks_nothing(cell: Cell) -> None:
    """A late mark of a removed worker should not come back as a field of its own."""
    request_id = await cell.run()
    await cell.bus.requeue(TOKEN, W1)
    await cell.bus.mark_suspect(W1, request_id)
    await cell.bus.hello(make_hello(W1))
    await cell.dispatch(request_id)
    await cell.bus.requeue(TOKEN, W1)
    assert (await cell.record(request_id)).crashes == 1


async def test_requeue_one_takes_what_its_owner_forgot(cell: Cell) -> None:
    """Exactly the named attempt of the named owner should be queued again, once."""
    request_id = await cell.run()
    assert not await cell.bus.requeue_one(TOKEN, request_id, W2, 1)
    assert not await cell.bus.requeue_one(TOKEN, request_id, W1, 2)
    assert await cell.bus.requeue_one(TOKEN, request_id, W1, 1)
    assert not await cell.bus.requeue_one(TOKEN, request_id, W1, 1)
    assert (await cell.record(request_id)).state is RequestState.QUEUED
    assert (await cell.bus.commit(W1, [make_item(request_id, 0, 1)]))[0].answer == "lost"


async def test_many_records_come_in_the_order_asked(cell: Cell) -> None:
    """Loading more records than one call holds should keep order and holes."""
    ids = [await cell.submit() for _ in range(5)] * 100
    ids[250] = NOBODY
    records = await cell.bus.load_records(ids)
    assert [r and r.summary.request_id for r in records] == [None if name == NOBODY else name for name in ids]

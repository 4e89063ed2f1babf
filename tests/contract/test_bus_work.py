"""Worker time: what a worker says it computed counts once, by request and by tenant, whatever becomes of it."""

from __future__ import annotations

import random

import pytest

from shared import failpoints
from shared.bus import RequestState, WorkItem
from shared.errors import BusUnavailable
from shared.ids import RequestId
from shared.work_time import NO_WORK, WorkTime
from tests.contract.cell import TOKEN, W1, W2, Cell, make_item


async def say(cell: Cell, request_id: RequestId, *said: tuple[int, int], attempt: int = 1) -> None:
    for prefill_us, decode_us in said:
        await cell.bus.commit(W1, [], [WorkItem(request_id, attempt, prefill_us, decode_us)])


async def test_counts_the_whole_that_is_said_not_each_time_it_is(cell: Cell) -> None:
    """A repeated or an older statement should count nothing; a greater one what it is more."""
    request_id = await cell.run(tenant="a")
    assert (await cell.record(request_id)).worked == NO_WORK
    await say(cell, request_id, (700, 0), (700, 0), (700, 50), (700, 0), (0, 0))
    assert (await cell.record(request_id)).worked == WorkTime(700, 50)
    assert await cell.bus.read_worked() == {"a": WorkTime(700, 50)}


async def test_a_lost_reply_counts_nothing_twice(cell: Cell) -> None:
    """Tokens and time committed again after a lost reply should both be there once."""
    request_id = await cell.run()
    item, work = make_item(request_id, 0, 11), WorkItem(request_id, 1, 40, 2)
    failpoints.arm("bus.commit.reply=drop@1")
    with pytest.raises(BusUnavailable):
        await cell.bus.commit(W1, [item], [work])
    assert (await cell.bus.commit(W1, [item], [work]))[0].answer == "ok"
    assert (await cell.record(request_id)).worked == WorkTime(40, 2)
    assert await cell.bus.read_worked() == {"tenant": WorkTime(40, 2)}


async def test_is_there_before_the_end_is(cell: Cell) -> None:
    """The commit that ends a request should count its time first, so that whoever hears of the end finds it."""
    request_id = await cell.run()
    await cell.bus.commit(W1, [make_item(request_id, 0, 11, reason="stop")], [WorkItem(request_id, 1, 5, 6)])
    record = await cell.record(request_id)
    assert (record.state, record.worked) == (RequestState.ENDED, WorkTime(5, 6))


async def test_adds_up_over_attempts(cell: Cell) -> None:
    """A moved request should cost what both workers computed, what the dead one had said included."""
    request_id = await cell.run(tenant="a")
    await say(cell, request_id, (1000, 10))
    await cell.bus.requeue(TOKEN, W1)
    assert await cell.dispatch(request_id, W2) == 2
    await cell.bus.commit(W2, [], [WorkItem(request_id, 2, 900, 7)])
    await say(cell, request_id, (1200, 10))  # the first one was only slow: that time was its own, too
    assert (await cell.record(request_id)).worked == WorkTime(2100, 17)
    assert await cell.bus.read_worked() == {"a": WorkTime(2100, 17)}


async def test_counts_after_the_end(cell: Cell) -> None:
    """What was computed until a worker heard of a cancellation should count, and not keep the record for longer."""
    request_id = await cell.run(tenant="a")
    await cell.bus.end(request_id, "cancelled")
    await say(cell, request_id, (3, 4))
    assert (await cell.record(request_id)).worked == WorkTime(3, 4)
    assert await cell.bus.read_worked() == {"a": WorkTime(3, 4)}


async def test_knows_nothing_of_attempts_that_never_were(cell: Cell) -> None:
    """Time for a request that is unknown, or an attempt that was not given to anybody, should count nothing."""
    request_id = await cell.run()
    await say(cell, request_id, (8, 8), attempt=2)
    await say(cell, RequestId("cmpl-" + "0" * 32), (8, 8))
    assert (await cell.record(request_id)).worked == NO_WORK
    assert await cell.bus.read_worked() == {}


async def test_tenants_have_what_their_requests_have(cell: Cell) -> None:
    """After each of many random steps the sums by tenant should be those of the records."""
    rng, said = random.Random(5), {}
    requests = [await cell.run(tenant=rng.choice("abc")) for _ in range(6)]
    attempts = dict.fromkeys(requests, 1)
    for _ in range(60):
        request_id = rng.choice(requests)
        attempt = rng.randint(1, attempts[request_id])
        before = said.get((request_id, attempt), (0, 0))
        now = (before[0] + rng.randint(0, 3), before[1] + rng.randint(0, 3))
        said[request_id, attempt] = now
        await say(cell, request_id, *rng.choice([[now], [now, before], [now, now]]), attempt=attempt)
        if rng.random() < 0.2 and await cell.bus.release(W1, request_id, attempts[request_id], is_preempted=True):
            attempts[request_id] = await cell.dispatch(request_id)
        if rng.random() < 0.05:
            await cell.bus.end(request_id, "cancelled")
    records = [await cell.record(request_id) for request_id in requests]
    for record in records:
        mine = [work for (request_id, _), work in said.items() if request_id == record.summary.request_id]
        assert record.worked == tuple(map(sum, zip(*mine, strict=True))) if mine else record.worked == NO_WORK
    for tenant in "abc":
        own = [record.worked for record in records if record.summary.tenant == tenant]
        total = WorkTime(*(map(sum, zip(*own, strict=True)) if own else ()))
        assert (await cell.bus.read_worked()).get(tenant, NO_WORK) == total

"""Ending: by whoever, at whatever stage, exactly once; and stop strings, which end a choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from shared import keys
from shared.bus import Bus, BusLimits, RequestState, Subscribed
from shared.ids import RequestId
from shared.messages import AbortRequest, RequestEnded, RunRequest
from tests.contract.cell import G1, TOKEN, W1, W2, Cell, Probe, RequestSpec, make_item, make_request


async def test_one_caller_wins(cell: Cell) -> None:
    """Of many who end a request at once exactly one should be told that it did, and its reason stands."""
    request_id = await cell.run()
    reasons = ["cancelled", "deadline", "failed", "rejected"] * 3
    won = await asyncio.gather(*(cell.bus.end(request_id, reason) for reason in reasons))
    assert sum(won) == 1
    record = await cell.record(request_id)
    assert record.ended is not None
    assert record.ended.reason == reasons[won.index(True)]


async def test_tells_listeners_leader_and_owner(cell: Cell) -> None:
    """An end should reach the gateways that listen, the reports, and the worker that runs it; once each."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12)
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    assert await cell.bus.end(request_id, "deadline", "deadline", "too läte")
    assert not await cell.bus.end(request_id, "deadline", "deadline", "again")
    ended = RequestEnded(
        request_id=request_id,
        reason="deadline",
        prompt_tokens=3,
        completion_tokens=2,
        error_kind="deadline",
        error_message="too läte",
    )
    assert await subscription.next(5) == [ended]
    assert await subscription.next(0.05) is None
    assert [message for _, message in await cell.bus.read_reports("0-0", 9, 0)] == [ended]
    inbox = [message for _, message in await cell.bus.read_inbox(W1, "0-0", 9, 0)]
    assert inbox[1:] == [AbortRequest(request_id=request_id)]
    assert (await cell.record(request_id)).ended == ended
    await subscription.close()


async def test_a_queued_request_ends_without_an_owner(cell: Cell, probe: Probe) -> None:
    """Ending before dispatch should leave every inbox empty, and dispatch should refuse it."""
    request_id = await cell.submit()
    assert await cell.bus.end(request_id, "cancelled")
    assert await probe.stream_length(keys.inbox(W1)) == 0
    assert (await cell.bus.dispatch(TOKEN, request_id, W1, 1)).answer == "ended"


async def test_no_inbox_for_a_worker_that_is_gone(cell: Cell, probe: Probe) -> None:
    """An abort for a worker that left should not bring its inbox back to life."""
    request_id = await cell.run()
    await cell.bus.bye(W1)
    assert await cell.bus.end(request_id, "cancelled")
    assert await probe.stream_length(keys.inbox(W1)) == 0


async def test_a_cancel_cannot_be_overtaken(cell: Cell) -> None:
    """After an end, commit and beat should answer stop, release and requeue should not bring it back."""
    request_id = await cell.run()
    await cell.bus.end(request_id, "cancelled")
    assert (await cell.commit(request_id, 0, 11)).answer == "stop"
    assert await cell.bus.beat(W1, 1, [(request_id, 1)]) == ["stop"]
    assert not await cell.bus.release(W1, request_id, 1, is_preempted=False)
    assert not await cell.bus.requeue_one(TOKEN, request_id, W1, 1)
    assert await cell.bus.requeue(TOKEN, W1) == []
    assert (await cell.record(request_id)).state is RequestState.ENDED
    assert await cell.log(request_id) == []


async def test_cancel_and_dispatch_at_once_leave_it_ended(cell: Cell) -> None:
    """Whichever of the two comes first, the request should be ended and any RunRequest followed by an abort."""
    for _ in range(20):
        request_id = await cell.submit()
        dispatched, _ = await asyncio.gather(
            cell.bus.dispatch(TOKEN, request_id, W1, 1), cell.bus.end(request_id, "cancelled")
        )
        about = [m for _, m in await cell.bus.read_inbox(W1, "0-0", 99, 0) if m.request_id == request_id]
        expected = [RunRequest, AbortRequest] if dispatched.answer == "ok" else []
        assert [type(message) for message in about] == expected
        assert (await cell.record(request_id)).state is RequestState.ENDED


async def test_a_ttl_is_set_at_the_end_only(open_limited: Callable[[BusLimits], Bus], probe: Probe) -> None:
    """No live record should expire; an ended one should after `record_ttl_s` of the bus that submitted it."""
    bus = open_limited(BusLimits(record_ttl_s=50))
    if hasattr(probe, "bus"):
        probe.bus = bus
    request_id = (await bus.submit(make_request(RequestSpec(idempotency_key="k")))).request_id
    assert await probe.ttl_s(request_id) is None
    await bus.end(request_id, "cancelled")
    ttl_s = await probe.ttl_s(request_id)
    assert ttl_s is not None
    assert 0 < ttl_s <= 50


async def test_an_ended_log_can_be_read(cell: Cell) -> None:
    """Record, body and log should stay readable after the end, from any offset."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12, reason="stop")
    data = await cell.bus.read_log(request_id)
    assert await cell.bus.read_log(request_id, 3) == data[3:]
    assert await cell.bus.read_log(request_id, len(data)) == b""
    assert await cell.bus.read_log(request_id, len(data) + 9) == b""
    assert await cell.bus.load_body(request_id) is not None


async def test_usage_counts_each_prompt_once(cell: Cell) -> None:
    """Prompt tokens should not be multiplied by n; completion tokens should sum over all choices, finishes aside."""
    request_id = await cell.run(prompt_lens=(3, 5), n=2)
    for choice in range(4):
        await cell.commit(request_id, 0, *range(choice + 1), reason="length", choice=choice)
    record = await cell.record(request_id)
    assert record.ended is not None
    assert (record.ended.prompt_tokens, record.ended.completion_tokens) == (8, 1 + 2 + 3 + 4)


async def test_ending_what_is_not_there(cell: Cell) -> None:
    """An unknown id should be no error and leave nothing behind."""
    assert not await cell.bus.end(RequestId("cmpl-unknown"), "cancelled")
    assert await cell.bus.load_record(RequestId("cmpl-unknown")) is None


async def test_a_stop_string_ends_the_last_choice(cell: Cell) -> None:
    """A stop in the only open choice should end the request as finished, void what came after, and tell the owner."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12, 13)
    assert await cell.bus.stop_choice(request_id, 0, 1)
    record = await cell.record(request_id)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.completion_tokens) == ("finished", 2)
    assert (record.choices[0].stop_index, record.choices[0].num_tokens) == (1, 2)
    assert (await cell.commit(request_id, 3, 14)).answer == "stop"
    inbox = [message for _, message in await cell.bus.read_inbox(W1, "0-0", 9, 0)]
    assert inbox[-1] == AbortRequest(request_id=request_id)


async def test_the_first_stop_wins(cell: Cell) -> None:
    """A second stop of the same choice, another index or the same again, should change nothing."""
    request_id = await cell.run(n=2)
    await cell.commit(request_id, 0, 11, 12, 13)
    assert await cell.bus.stop_choice(request_id, 0, 1)
    assert not await cell.bus.stop_choice(request_id, 0, 0)
    assert not await cell.bus.stop_choice(request_id, 0, 1)
    record = await cell.record(request_id)
    assert (record.choices[0].stop_index, record.state) == (1, RequestState.RUNNING)


async def test_a_stopped_choice_takes_no_more(cell: Cell) -> None:
    """Entries past a stop should be answered stop and not logged, while the other choice goes on to the end."""
    request_id = await cell.run(n=2)
    await cell.commit(request_id, 0, 11, 12)
    await cell.bus.stop_choice(request_id, 0, 0)
    items = [make_item(request_id, 2, 13), make_item(request_id, 0, 21, reason="stop", choice=1)]
    outcomes = await cell.bus.commit(W1, items)
    assert [(outcome.answer, outcome.length) for outcome in outcomes] == [("stop", 2), ("ok", 2)]
    record = await cell.record(request_id)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.completion_tokens) == ("finished", 2)


async def test_a_stop_behind_a_finish_voids_the_rest(cell: Cell) -> None:
    """A choice that finished before the gateway saw the stop string should still be cut, its openness counted once."""
    request_id = await cell.run(n=2)
    await cell.commit(request_id, 0, 11, 12, 13, reason="length")
    assert await cell.bus.stop_choice(request_id, 0, 0)
    assert (await cell.record(request_id)).state is RequestState.RUNNING
    await cell.commit(request_id, 0, 21, reason="length", choice=1)
    record = await cell.record(request_id)
    assert record.ended is not None
    assert record.ended.completion_tokens == 2


@pytest.mark.parametrize(("choice", "index"), [(0, 2), (0, 99), (1, 0), (7, 0)])
async def test_a_stop_past_the_log_is_refused(cell: Cell, choice: int, index: int) -> None:
    """A stop can only be at a token that is logged: not at the finish entry, past it, or in an unknown choice."""
    request_id = await cell.run(n=2)
    await cell.commit(request_id, 0, 11, 12, reason="length")
    assert not await cell.bus.stop_choice(request_id, choice, index)
    assert (await cell.record(request_id)).choices[0].stop_index is None


async def test_a_stop_after_the_end_changes_no_usage(cell: Cell) -> None:
    """Usage was told with the end; a late stop should leave it."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12, reason="length")
    before = await cell.record(request_id)
    assert not await cell.bus.stop_choice(request_id, 0, 0)
    assert await cell.record(request_id) == before


async def test_a_resumed_request_names_unfinished_choices_only(cell: Cell) -> None:
    """The next attempt should get neither finished nor stopped choices."""
    request_id = await cell.run(n=4)
    await cell.commit(request_id, 0, 11, reason="stop", choice=1)
    await cell.commit(request_id, 0, 11, 12, choice=2)
    await cell.bus.stop_choice(request_id, 2, 0)
    await cell.bus.requeue(TOKEN, W1)
    await cell.bus.dispatch(TOKEN, request_id, W2, 5)
    ((_, message),) = await cell.bus.read_inbox(W2, "0-0", 9, 0)
    assert message == RunRequest(request_id=request_id, attempt=2, choices=(0, 3), rank=5, crashes=1)

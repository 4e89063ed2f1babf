"""Committing: what a worker computed is logged once, by its owner only, and published exactly as logged."""

from __future__ import annotations

import pytest

from shared import failpoints
from shared.bus import CommitAnswer, CommitOutcome, RequestState, Subscribed
from shared.errors import BusUnavailable
from shared.ids import RequestId
from shared.log import FinishEntry, TokenEntry
from shared.messages import RequestEnded, TokenChunk
from tests.contract.cell import C2, G1, G2, TOKEN, W1, W2, Cell, finish, make_item, tokens


async def test_appends_in_order(cell: Cell) -> None:
    """Steps should add up to one log; the length counts entries."""
    request_id = await cell.run()
    assert await cell.commit(request_id, 0, 11) == CommitOutcome(CommitAnswer.OK, 1)
    assert await cell.commit(request_id, 1, 12, 300_000) == CommitOutcome(CommitAnswer.OK, 3)
    assert await cell.log(request_id) == [TokenEntry(0, 11), TokenEntry(0, 12), TokenEntry(0, 300_000)]
    assert (await cell.record(request_id)).choices[0].num_entries == 3


async def test_again_is_once(cell: Cell) -> None:
    """The same step again should answer ok and append nothing."""
    request_id = await cell.run()
    assert await cell.commit(request_id, 0, 11) == await cell.commit(request_id, 0, 11)
    assert await cell.log(request_id) == [TokenEntry(0, 11)]


async def test_a_lost_reply_doubles_nothing(cell: Cell) -> None:
    """A commit repeated after a lost reply should log and publish each token once."""
    request_id = await cell.run()
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    failpoints.arm("bus.commit.reply=drop@1")
    with pytest.raises(BusUnavailable):
        await cell.commit(request_id, 0, 11)
    assert (await cell.commit(request_id, 0, 11)).answer == "ok"
    await cell.commit(request_id, 1, 12)
    assert await cell.log(request_id) == [TokenEntry(0, 11), TokenEntry(0, 12)]
    first, second = await subscription.next(5), await subscription.next(5)
    assert first == [TokenChunk(request_id=request_id, offset=0, data=tokens(0, 11)[0])]
    assert second == [TokenChunk(request_id=request_id, offset=3, data=tokens(0, 12)[0])]
    await subscription.close()


async def test_a_lost_reply_of_the_last_token_is_still_ok(cell: Cell) -> None:
    """Repeating the commit that ended the request should say ok, as the first reply would have."""
    request_id = await cell.run()
    first = await cell.commit(request_id, 0, 11, reason="length")
    assert first == CommitOutcome(CommitAnswer.OK, 2)
    assert await cell.commit(request_id, 0, 11, reason="length") == first
    assert len(await cell.log(request_id)) == 2


async def test_only_what_lies_beyond_is_appended_and_published(cell: Cell) -> None:
    """An overlapping commit should add its new part only."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, 12)
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    assert await cell.commit(request_id, 0, 11, 12, 13) == CommitOutcome(CommitAnswer.OK, 3)
    assert await subscription.next(5) == [TokenChunk(request_id=request_id, offset=6, data=tokens(0, 13)[0])]
    await subscription.close()


async def test_a_gap_is_answered_with_the_length(cell: Cell) -> None:
    """A commit that starts past the log should append nothing and say where the log ends."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11)
    assert await cell.commit(request_id, 3, 14) == CommitOutcome(CommitAnswer.GAP, 1)
    assert await cell.commit(request_id, 1, 12, 13, 14) == CommitOutcome(CommitAnswer.OK, 4)


async def test_one_publication_a_gateway_and_step(cell: Cell) -> None:
    """All that a step has for a gateway should come as one publication, in order, however many connections it has."""
    first, second = await cell.run(), await cell.run()
    await cell.bus.attach(first, G1, C2)
    await cell.bus.attach(second, G2, C2)
    near, far = cell.bus.subscribe(G1), cell.bus.subscribe(G2)
    assert (await near.next(5), await far.next(5)) == (Subscribed(), Subscribed())
    await cell.bus.commit(W1, [make_item(first, 0, 11), make_item(second, 0, 21)])
    chunks = [
        TokenChunk(request_id=first, offset=0, data=tokens(0, 11)[0]),
        TokenChunk(request_id=second, offset=0, data=tokens(0, 21)[0]),
    ]
    assert await near.next(5) == chunks
    assert await far.next(5) == chunks[1:]
    await near.close()
    await far.close()


@pytest.mark.parametrize("size", [1, 255, 256, 65_535, 65_536, 70_000])
async def test_chunks_of_any_size_arrive(cell: Cell, size: int) -> None:
    """Publications should decode at each width of the binary header, and of the array header."""
    request_id = await cell.run()
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    entries = (b"\x80" * size,)
    item = make_item(request_id, 0)
    items = [type(item)(request_id=request_id, attempt=1, choice=0, start=0, entries=entries)]
    assert (await cell.bus.commit(W1, items))[0].answer == "ok"
    assert await subscription.next(5) == [TokenChunk(request_id=request_id, offset=0, data=entries[0])]
    await subscription.close()


async def test_many_chunks_arrive_as_one(cell: Cell) -> None:
    """Sixteen and more messages should travel in one publication."""
    ids = [await cell.run() for _ in range(17)]
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    await cell.bus.commit(W1, [make_item(request_id, 0, 5) for request_id in ids])
    event = await subscription.next(5)
    assert isinstance(event, list)
    assert [message.request_id for message in event] == ids
    await subscription.close()


async def test_the_last_finish_ends_the_request(cell: Cell) -> None:
    """The commit of the last choice's finish should end the request, and tell so after the chunk."""
    request_id = await cell.run(prompt_lens=(3,), n=2)
    subscription = cell.bus.subscribe(G1)
    assert await subscription.next(5) == Subscribed()
    await cell.commit(request_id, 0, 11, reason="stop", choice=1)
    assert (await cell.record(request_id)).state is RequestState.RUNNING
    await cell.commit(request_id, 0, 11, 12, reason="length", choice=0)
    ended = RequestEnded(request_id=request_id, reason="finished", prompt_tokens=3, completion_tokens=3)
    record = await cell.record(request_id)
    assert (record.state, record.ended) == (RequestState.ENDED, ended)
    assert [choice.finish for choice in record.choices] == ["length", "stop"]
    await subscription.next(5)
    data = b"".join((*tokens(0, 11, 12), finish(0, "length")))
    offset = len(tokens(1, 11)[0] + finish(1))
    assert await subscription.next(5) == [TokenChunk(request_id=request_id, offset=offset, data=data), ended]
    assert await cell.bus.list_live() == set()
    await subscription.close()


async def test_no_abort_to_the_worker_that_finished(cell: Cell) -> None:
    """The owner whose commit ended the request knows it: its inbox should hold no abort."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11, reason="stop")
    assert [type(message).__name__ for _, message in await cell.bus.read_inbox(W1, "0-0", 9, 0)] == ["RunRequest"]


async def test_nothing_past_a_finish(cell: Cell) -> None:
    """A finished choice of a live request should take nothing more."""
    request_id = await cell.run(n=2)
    await cell.commit(request_id, 0, 11, reason="stop")
    assert await cell.commit(request_id, 2, 12) == CommitOutcome(CommitAnswer.STOP, 2)
    assert len(await cell.log(request_id)) == 2


async def test_a_finish_alone_can_follow_its_token(cell: Cell) -> None:
    """A finish entry committed in a later step should count as no token."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11)
    await cell.commit(request_id, 1, reason="length")
    record = await cell.record(request_id)
    assert record.ended is not None
    assert record.ended.completion_tokens == 1
    assert await cell.log(request_id) == [TokenEntry(0, 11), FinishEntry(0, "length")]


@pytest.mark.case(93)
async def test_another_incarnation_is_lost(cell: Cell) -> None:
    """A worker that does not own the request should get lost and append nothing."""
    request_id = await cell.run()
    answers = await cell.bus.commit(W2, [make_item(request_id, 0, 66)])
    assert answers[0].answer == "lost"
    assert await cell.log(request_id) == []


@pytest.mark.case(93)
async def test_an_old_attempt_is_lost(cell: Cell) -> None:
    """The same worker, back under a new attempt, should not be able to write as the old one."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11)
    assert await cell.bus.release(W1, request_id, 1, is_preempted=True)
    assert (await cell.commit(request_id, 1, 12)).answer == "lost"
    assert await cell.dispatch(request_id) == 2
    assert (await cell.commit(request_id, 1, 12)).answer == "lost"
    assert await cell.commit(request_id, 1, 12, attempt=2) == CommitOutcome(CommitAnswer.OK, 2)


async def test_a_requeued_request_is_lost_for_its_old_owner(cell: Cell) -> None:
    """A zombie's commit after the requeue should be refused, and the next owner continue the log."""
    request_id = await cell.run()
    await cell.commit(request_id, 0, 11)
    assert await cell.bus.requeue(TOKEN, W1) == [request_id]
    assert (await cell.commit(request_id, 1, 12)).answer == "lost"
    assert await cell.dispatch(request_id, W2) == 2
    answers = await cell.bus.commit(W2, [make_item(request_id, 1, 12, attempt=2)])
    assert answers == [CommitOutcome(CommitAnswer.OK, 2)]


async def test_a_request_that_is_not_there_is_lost(cell: Cell) -> None:
    """A record that vanished should free the worker, and never come to life again by a commit."""
    unknown = RequestId("cmpl-unknown")
    assert (await cell.commit(unknown, 0, 11)).answer == "lost"
    assert await cell.bus.load_record(unknown) is None
    assert await cell.bus.read_log(unknown) == b""


async def test_each_item_has_its_own_answer(cell: Cell) -> None:
    """One bad item should not hold up the rest of the step."""
    good, gone, behind = await cell.run(), await cell.run(), await cell.run()
    await cell.bus.end(gone, "cancelled")
    items = [make_item(gone, 0, 1), make_item(good, 0, 2), make_item(behind, 5, 3)]
    assert [outcome.answer for outcome in await cell.bus.commit(W1, items)] == ["stop", "ok", "gap"]
    assert await cell.bus.commit(W1, []) == []


async def test_a_new_token_clears_crashes(cell: Cell) -> None:
    """`crashes` should return to 0 with a token, not with a finish alone."""
    request_id = await cell.run(n=2)
    await cell.bus.requeue(TOKEN, W1)
    assert (await cell.record(request_id)).crashes == 1
    await cell.dispatch(request_id, W2)
    await cell.bus.commit(W2, [make_item(request_id, 0, reason="length", attempt=2)])
    assert (await cell.record(request_id)).crashes == 1
    await cell.bus.commit(W2, [make_item(request_id, 0, 11, choice=1, attempt=2)])
    assert (await cell.record(request_id)).crashes == 0

"""Submitting: stored once, whole, and within limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shared import failpoints, keys
from shared.bus import Bus, BusLimits, RequestState
from shared.errors import BusUnavailable
from shared.ids import RequestId
from tests.contract.cell import C1, G1, Cell, Probe, RequestSpec, make_request


async def test_stores_record_body_listener_and_wake_up(cell: Cell) -> None:
    """A submit should store all of the request, queued, with its first listener and one wake-up."""
    request = make_request(RequestSpec(prompt_lens=(3, 5), n=2, orphan_ttl_s=1.5))
    outcome = await cell.bus.submit(request)
    record = await cell.record(outcome.request_id)
    assert record.summary == request.summary
    assert (record.state, record.attempt, record.owner) == (RequestState.QUEUED, 0, None)
    assert record.listeners == ((G1, C1),)
    assert record.orphan_ttl_s == 1.5
    assert [choice.is_open for choice in record.choices] == [True] * 4
    assert await cell.bus.load_body(outcome.request_id) == request.body
    assert await cell.bus.list_live() == {outcome.request_id}
    ((_, summary),) = await cell.bus.read_submits("s", 10, 0)
    assert summary == request.summary


async def test_twice_is_once(cell: Cell, probe: Probe) -> None:
    """The same id again should answer `exists` and change nothing."""
    request = make_request(RequestSpec())
    first, second = await cell.bus.submit(request), await cell.bus.submit(request)
    assert (first.answer, second.answer) == ("new", "exists")
    assert second.request_id == first.request_id
    assert await probe.stream_length(keys.SUBMIT) == 1


async def test_a_lost_reply_changes_nothing(cell: Cell, probe: Probe) -> None:
    """A caller that did not see the reply should find its request stored, once, when it calls again."""
    failpoints.arm("bus.submit.reply=drop@1")
    request = make_request(RequestSpec())
    with pytest.raises(BusUnavailable):
        await cell.bus.submit(request)
    assert (await cell.bus.submit(request)).answer == "exists"
    assert await probe.stream_length(keys.SUBMIT) == 1


async def test_records_sort_by_arrival(cell: Cell) -> None:
    """`order` should rise with each submit."""
    ids = [await cell.submit() for _ in range(5)]
    orders = [record.order for record in await cell.bus.load_records(ids) if record is not None]
    assert orders == sorted(set(orders))


async def test_an_unknown_id_has_nothing(cell: Cell) -> None:
    """Reading a request that never was should give nothing, not fail."""
    unknown = RequestId("cmpl-unknown")
    assert await cell.bus.load_record(unknown) is None
    assert await cell.bus.load_body(unknown) is None
    assert await cell.bus.read_log(unknown) == b""
    assert await cell.bus.load_records([unknown, await cell.submit()]) != [None, None]


async def test_an_idempotency_key_leads_to_the_first_request(cell: Cell) -> None:
    """The same key and body should give the first id under any new id, while it lives and after its end."""
    spec = {"idempotency_key": "k", "body_hash": "h"}
    first = await cell.submit(**spec)
    again = await cell.bus.submit(make_request(RequestSpec(**spec)))
    assert (again.answer, again.request_id) == ("exists", first)
    await cell.bus.end(first, "cancelled")
    later = await cell.bus.submit(make_request(RequestSpec(**spec)))
    assert (later.answer, later.request_id) == ("exists", first)
    assert await cell.bus.list_live() == set()


async def test_an_idempotency_key_belongs_to_one_body(cell: Cell) -> None:
    """Another body under the same key should be a conflict that stores nothing."""
    first = await cell.submit(idempotency_key="k", body_hash="h")
    outcome = await cell.bus.submit(make_request(RequestSpec(idempotency_key="k", body_hash="other")))
    assert (outcome.answer, outcome.request_id) == ("conflict", first)
    assert await cell.bus.list_live() == {first}


async def test_idempotency_keys_of_tenants_are_apart(cell: Cell) -> None:
    """Two tenants may use the same key."""
    first = await cell.submit(idempotency_key="k", body_hash="h", tenant="a")
    second = await cell.submit(idempotency_key="k", body_hash="other", tenant="b")
    assert first != second


async def test_a_full_queue_refuses(open_limited: Callable[[BusLimits], Bus]) -> None:
    """Beyond `max_live_requests` a submit should store nothing, and be taken again once one has ended."""
    bus = open_limited(BusLimits(max_live_requests=2))
    requests = [make_request(RequestSpec()) for _ in range(3)]
    answers = [(await bus.submit(request)).answer for request in requests]
    assert answers == ["new", "new", "full"]
    assert await bus.load_record(requests[2].summary.request_id) is None
    assert (await bus.submit(requests[0])).answer == "exists"
    await bus.end(requests[0].summary.request_id, "cancelled")
    assert (await bus.submit(requests[2])).answer == "new"


async def test_too_many_tokens_refuse(open_limited: Callable[[BusLimits], Bus]) -> None:
    """`max_live_tokens` should bound each prompt plus max_tokens of each choice; an end gives its share back."""
    bus = open_limited(BusLimits(max_live_tokens=40))
    first = make_request(RequestSpec(prompt_lens=(4,), n=2, max_tokens=8))
    second = make_request(RequestSpec(prompt_lens=(4, 4), max_tokens=6))
    third = make_request(RequestSpec(prompt_lens=(1,), max_tokens=1))
    assert (await bus.submit(first)).answer == "new"
    assert (await bus.submit(second)).answer == "new"
    refused = await bus.submit(third)
    assert (refused.answer, "tokens" in refused.detail) == ("full", True)
    await bus.end(first.summary.request_id, "cancelled")
    assert (await bus.submit(third)).answer == "new"

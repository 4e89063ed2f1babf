"""What somebody else wrote into our keys: every reader goes on, and every request can still be ended."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from quire.embedded_redis import EmbeddedRedis
from shared import keys
from shared.bus import BusLimits, LeaderPulse
from shared.errors import BusBroken
from shared.limits import QueueDepth, TenantLimits
from shared.worker_wish import WorkerWish
from tests.contract.cell import G1, TOKEN, W1, Cell, RequestSpec, make_item, make_request

pytest.importorskip("redis", reason="the redis package is not installed here")

from shared.redis_bus import open_bus
from shared.redis_link import RedisLink

GARBAGE = (b"", b"abc", b"\xff\xfe", b"-1", b"1e9", b"9" * 40)


@pytest.fixture
async def link(redis_server: EmbeddedRedis) -> AsyncIterator[RedisLink]:
    one = RedisLink(redis_server.url)
    yield one
    await one.call("FLUSHALL")
    await one.close()


@pytest.fixture
async def cell(redis_server: EmbeddedRedis, link: RedisLink) -> AsyncIterator[Cell]:
    bus = open_bus(redis_server.url, BusLimits())
    yield await Cell.start(bus)
    await bus.close()


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_counters_that_are_no_numbers_start_again(cell: Cell, link: RedisLink, garbage: bytes) -> None:
    """Beats that somebody overwrote should be readable, and move again when their owners raise them."""
    for field in ("beat", "steps", "held"):
        await link.call("HSET", keys.WORKERS, f"{field}:{W1}", garbage)
    await link.call("HSET", keys.GATEWAYS, f"beat:{G1}", garbage, b"\xff", garbage)
    await link.call("HSET", keys.LEADER, "beat", garbage)
    await link.call("HSET", keys.WORKERS, b"\xff\xfe", garbage)
    seen = (await cell.bus.read_leader(), await cell.bus.read_gateways(), await cell.bus.read_workers())
    for _ in range(2):  # -1 becomes 0, which is what a beat that is no number counts as
        await cell.bus.beat(W1, 3, [])
        await cell.bus.gateway_beat(G1)
        await cell.bus.raise_lead(TOKEN)
    assert await cell.bus.read_leader() != seen[0]
    assert (await cell.bus.read_gateways())[G1] != seen[1][G1]
    before, after = (
        {p.hello.worker_id: p.beat for p in pulses}[W1] for pulses in (seen[2], await cell.bus.read_workers())
    )
    assert after != before


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_wish_that_is_garbage_is_replaced_by_the_next(cell: Cell, link: RedisLink, garbage: bytes) -> None:
    """What cannot be read as a number should be the fewest there may be, a key of another kind be told as broken; and
    a leader's next wish be in force."""
    await link.call("HSET", keys.WISH, "num_workers", garbage, "leaving", garbage)
    wish = await cell.bus.read_wish()
    assert wish is not None
    assert wish.num_workers == 0
    await link.call("SET", keys.WISH, garbage)
    with pytest.raises(BusBroken):
        await cell.bus.read_wish()
    await cell.bus.want_workers(TOKEN, WorkerWish(num_workers=2))
    assert await cell.bus.read_wish() == WorkerWish(num_workers=2)


async def test_a_lead_that_is_garbage_can_be_taken(cell: Cell, link: RedisLink) -> None:
    """A leader that nobody is should be replaced like one that stands still."""
    await link.call("HSET", keys.LEADER, "token", b"\xff\xfe", "beat", "abc")
    seen = await cell.bus.read_leader()
    assert not await cell.bus.take_lead("new", LeaderPulse(token="other", beat=seen.beat))
    assert await cell.bus.take_lead("new", seen)
    assert (await cell.bus.read_leader()).token == "new"


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_token_count_that_is_garbage_stops_nobody(cell: Cell, link: RedisLink, garbage: bytes) -> None:
    """Requests should still be taken and end, and the count be right again once nothing lives."""
    await link.call("SET", keys.LIVE_TOKENS, garbage)
    first, second = await cell.submit(), await cell.submit()
    for request_id in (first, second):
        assert await cell.bus.end(request_id, "cancelled")
    assert await link.call("EXISTS", keys.LIVE_TOKENS) == 0


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_counts_of_the_door_that_are_garbage_stop_nobody(cell: Cell, link: RedisLink, garbage: bytes) -> None:
    """Whatever stands in the counts that limits look at, requests should be taken, run, given back and end."""
    limits = TenantLimits(requests_per_minute=100, tokens_per_minute=10**9)
    await cell.submit()
    await link.call("HSET", keys.QUEUE, "sequences", garbage, "tokens", garbage)
    await link.call("HSET", keys.IN_FLIGHT, "tenant", garbage)
    for field in ("requests", "tokens", "at"):
        await link.call("HSET", keys.SPENT, f"{field}:tenant", garbage)
    await link.call("HSET", keys.LEADER, "clock_ms", garbage, "at_ms", garbage)
    await cell.bus.raise_lead(TOKEN, 5)
    request_id = await cell.submit(tenant_limits=limits)
    attempt = await cell.dispatch(request_id)
    assert await cell.bus.release(W1, request_id, attempt, is_preempted=True)
    for live in await cell.bus.list_live():
        assert await cell.bus.end(live, "cancelled")
    assert await cell.bus.read_queue() == QueueDepth()
    assert await link.call("EXISTS", keys.QUEUE, keys.IN_FLIGHT) == 0
    assert (await cell.bus.submit(make_request(RequestSpec(tenant_limits=limits)))).budget.num_requests == 98


async def test_a_clock_that_was_lost_costs_a_tenant_nothing(cell: Cell, link: RedisLink) -> None:
    """When the cell's clock begins anew, behind what a bucket remembers, the bucket should go on from where it was."""
    limits = TenantLimits(requests_per_minute=2)
    for now_ms in (0, 600_000):
        await cell.bus.raise_lead(TOKEN, now_ms)
    await cell.submit(tenant_limits=limits)
    await link.call("DEL", keys.LEADER)
    assert (await cell.bus.submit(make_request(RequestSpec(tenant_limits=limits)))).budget.num_requests == 0
    await cell.bus.take_lead("new", await cell.bus.read_leader())
    for now_ms in (0, 30_000):
        await cell.bus.raise_lead("new", now_ms)
    assert (await cell.bus.submit(make_request(RequestSpec(tenant_limits=limits)))).answer == "new"


@pytest.mark.parametrize("name", [keys.QUEUE, keys.IN_FLIGHT, keys.SPENT])
async def test_a_count_of_another_type_keeps_nobody_from_ending(cell: Cell, link: RedisLink, name: str) -> None:
    """A key of another type in the place of a count should not stop an end half way, nor outlive what it counts."""
    limits = TenantLimits(tokens_per_minute=1000)
    first, second = await cell.submit(tenant_limits=limits), await cell.submit(tenant_limits=limits)
    await link.call("SET", name, "x")
    for request_id in (first, second):
        assert await cell.bus.end(request_id, "cancelled")
        assert int(await link.call("TTL", keys.record(request_id))) != -1
    assert await cell.bus.list_live() == set()
    assert await link.call("EXISTS", name) == (name == keys.SPENT)


@pytest.mark.parametrize("field", keys.RECORD_FIELDS[:17])
@pytest.mark.parametrize("garbage", [*GARBAGE, None])
async def test_any_spoiled_record_can_be_ended(cell: Cell, link: RedisLink, field: str, garbage: bytes | None) -> None:
    """Whatever one field of a record became, reading it should hurt nobody else, and the request should be endable."""
    spoiled, whole = await cell.run(), await cell.run()
    if garbage is None:
        await link.call("HDEL", keys.record(spoiled), field)
    else:
        await link.call("HSET", keys.record(spoiled), field, garbage)
    records = await cell.bus.load_records([spoiled, whole])
    assert records[1] is not None
    await cell.bus.load_body(spoiled)
    answers = await cell.bus.commit(W1, [make_item(spoiled, 0, 11), make_item(whole, 0, 11)])
    assert (answers[1].answer, answers[1].length) == ("ok", 1)
    await cell.bus.remove_gateway(TOKEN, G1)
    await cell.bus.requeue(TOKEN, W1)
    await cell.bus.end(spoiled, "failed")
    assert await cell.bus.list_live() == {whole}
    assert int(await link.call("TTL", keys.record(spoiled))) != -1


async def test_an_index_entry_without_a_record_leaves_by_being_read(cell: Cell, link: RedisLink) -> None:
    """Names in `live` that have no record, or something else in its place, should not be live."""
    ours = await cell.submit()
    await link.call("SADD", keys.LIVE, "nobody", "string", "empty", b"\xff\xfe")
    await link.call("SET", "req:string", "x")
    await link.call("HSET", "req:empty", "x", "y")
    await cell.bus.load_records(sorted(await cell.bus.list_live()))
    assert await cell.bus.list_live() == {ours}
    assert await link.call("EXISTS", "req:string", "req:empty") == 0


async def test_a_key_of_another_type_is_a_bus_error(cell: Cell, link: RedisLink) -> None:
    """What callers retry should be told apart from a fault in the code: they must outlive it."""
    await link.call("SET", keys.DEAD, "x")
    await cell.bus.bury("here", b"x", "why")  # only logged
    await link.call("DEL", keys.REPORTS)
    await link.call("SET", keys.REPORTS, "x")
    with pytest.raises(BusBroken, match="WRONGTYPE"):
        await cell.bus.read_reports("$", 1, 0)  # type: ignore[arg-type]

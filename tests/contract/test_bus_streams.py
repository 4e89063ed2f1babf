"""Streams: wake-ups at least once, and messages that nobody can read."""

from __future__ import annotations

import asyncio

import msgpack
import pytest

from shared import keys, wire
from shared.ids import EntryId
from shared.messages import AbortRequest, RequestEnded
from tests.contract.cell import TOKEN, W1, Cell, Probe, make_report

NEWEST = EntryId("$")


async def test_wake_ups_are_read_once_and_acked(cell: Cell, probe: Probe) -> None:
    """A wake-up should go to one reader, and be gone once it is acked; acking again should be harmless."""
    ids = [await cell.submit() for _ in range(3)]
    first = await cell.bus.read_submits("a", 2, 0)
    rest = await cell.bus.read_submits("b", 9, 0)
    assert [summary.request_id for _, summary in first + rest] == ids
    assert await cell.bus.read_submits("a", 9, 0) == []
    for _ in range(2):
        await cell.bus.ack_submits([entry_id for entry_id, _ in first + rest])
    await cell.bus.ack_submits([])
    assert await probe.stream_length(keys.SUBMIT) == 0
    assert await cell.bus.claim_submits("a", 0, 9) == []


async def test_unacked_wake_ups_can_be_claimed(cell: Cell) -> None:
    """What a dead consumer read and never acked should be found by the next; what is fresh should not."""
    ids = [await cell.submit() for _ in range(5)]
    await cell.bus.read_submits("dead", 9, 0)
    assert await cell.bus.claim_submits("alive", 60_000, 9) == []
    claimed = await cell.bus.claim_submits("alive", 0, 9)
    assert [summary.request_id for _, summary in claimed] == ids
    await cell.bus.ack_submits([entry_id for entry_id, _ in claimed])
    assert await cell.bus.claim_submits("alive", 0, 9) == []


async def test_submits_from_before_the_group_are_read(cell: Cell) -> None:
    """The first reader ever should see what was submitted before it came."""
    request_id = await cell.submit()
    assert [summary.request_id for _, summary in await cell.bus.read_submits("late", 9, 0)] == [request_id]


async def test_a_blocked_reader_wakes_up(cell: Cell) -> None:
    """A reader that waits should get an entry when it comes, and nothing after its time without one."""
    assert await cell.bus.read_submits("a", 9, 20) == []
    waiting = asyncio.create_task(cell.bus.read_submits("a", 9, 2_000))
    await asyncio.sleep(0)
    request_id = await cell.submit()
    assert [summary.request_id for _, summary in await waiting] == [request_id]
    inbox = asyncio.create_task(cell.bus.read_inbox(W1, EntryId("0-0"), 9, 2_000))
    await cell.dispatch(request_id)
    assert [message.request_id for _, message in await inbox] == [request_id]


async def test_blocked_readers_do_not_delay_others(cell: Cell) -> None:
    """Many readers may wait while commands go on."""
    waiting = [asyncio.create_task(cell.bus.read_reports(EntryId("0-0"), 9, 2_000)) for _ in range(40)]
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await cell.submit()
    await cell.bus.report(make_report())
    assert [len(reports) for reports in await asyncio.gather(*waiting)] == [1] * 40


async def test_reports_and_ends_are_read_in_order(cell: Cell) -> None:
    """Reports and ends should come as they happened, after the entry asked for."""
    await cell.bus.report(make_report(seq=1))
    request_id = await cell.submit()
    await cell.bus.end(request_id, "cancelled")
    await cell.bus.report(make_report(seq=2))
    entries = await cell.bus.read_reports(EntryId("0-0"), 9, 0)
    ended = RequestEnded(request_id=request_id, reason="cancelled", prompt_tokens=3)
    assert [message for _, message in entries] == [make_report(seq=1), ended, make_report(seq=2)]
    assert await cell.bus.read_reports(entries[0][0], 1, 0) == entries[1:2]
    assert await cell.bus.read_reports(NEWEST, 9, 0) == []


def _of_version(version: int, **fields: object) -> bytes:
    packed: bytes = msgpack.packb({"t": "submit", "v": version, **fields})
    return packed


BAD_MESSAGES = [
    b"",
    b"\xc1",
    b"\x80",
    msgpack.packb({"t": "submit", "v": 1}),
    msgpack.packb([1, 2]),
    wire.encode(AbortRequest(request_id="x"))[:-3],
    wire.encode(AbortRequest(request_id="x")),
    b"\x91" * 5000,
    msgpack.packb(msgpack.ExtType(5, b"x")),
    b"cos\nsystem\n(S'true'\ntR.",
]


@pytest.mark.parametrize("data", BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
async def test_a_bad_wake_up_is_buried(cell: Cell, probe: Probe, data: bytes) -> None:
    """What no reader understands should be kept in `dead`, leave the stream, end the request it names, and not hold
    up what comes behind it."""
    broken, good = await cell.submit(), await cell.submit()
    await cell.bus.ack_submits([entry_id for entry_id, _ in await cell.bus.read_submits("a", 9, 0)])
    await probe.add_raw(keys.SUBMIT, data, broken)
    await cell.bus.report(make_report())
    third = await cell.submit()
    assert [summary.request_id for _, summary in await cell.bus.read_submits("a", 9, 0)] == [third]
    assert await probe.buried() == [data]
    assert await probe.stream_length(keys.SUBMIT) == 1
    record = await cell.record(broken)
    assert record.ended is not None
    assert (record.ended.reason, record.ended.error_kind) == ("failed", "internal_error")
    assert await cell.bus.list_live() == {good, third}


@pytest.mark.parametrize("name", ["own id", 7, "cmpl-nobody", None])
async def test_only_a_real_name_ends_a_request(cell: Cell, probe: Probe, name: object) -> None:
    """A bad message without a name should be buried; with a request's id inside it, that request should fail."""
    request_id = await cell.submit()
    inside = request_id if name == "own id" else name
    await probe.add_raw(keys.SUBMIT, _of_version(1, request_id=inside, surprise=1))
    assert len(await cell.bus.read_submits("a", 9, 0)) == 1
    assert len(await probe.buried()) == 1
    assert (request_id in await cell.bus.list_live()) == (name != "own id")


async def test_a_claimed_bad_wake_up_is_buried_too(cell: Cell, probe: Probe) -> None:
    """An entry that a consumer died over should not come back for ever."""
    request_id = await cell.submit()
    await cell.bus.read_submits("a", 9, 0)
    await probe.add_raw(keys.SUBMIT, b"\xc1")
    assert await cell.bus.read_submits("a", 9, 0) == []
    assert [summary.request_id for _, summary in await cell.bus.claim_submits("b", 0, 9)] == [request_id]
    assert await probe.buried() == [b"\xc1"]


async def test_a_bad_command_ends_its_request(cell: Cell, probe: Probe) -> None:
    """A command that the worker cannot read should end its request, since nobody else would miss it."""
    request_id = await cell.run()
    await probe.add_raw(keys.inbox(W1), b"\xc1", request_id)
    inbox = await cell.bus.read_inbox(W1, EntryId("0-0"), 9, 0)
    assert [type(message).__name__ for _, message in inbox] == ["RunRequest"]
    assert await probe.buried() == [b"\xc1"]
    assert await cell.bus.list_live() == set()
    assert await cell.bus.requeue(TOKEN, W1) == []


async def test_a_bad_report_is_skipped(cell: Cell, probe: Probe) -> None:
    """Reports behind a bad one should be read, and the bad one only once."""
    await probe.add_raw(keys.REPORTS, b"\xc1")
    await cell.bus.report(make_report())
    for _ in range(2):
        assert [m for _, m in await cell.bus.read_reports(EntryId("0-0"), 9, 0)] == [make_report()]
    assert await probe.buried() == [b"\xc1"]


async def test_a_newer_wake_up_is_understood(cell: Cell, probe: Probe) -> None:
    """A message of a higher version with one field more should be read, without that field."""
    await cell.submit()
    ((entry_id, summary),) = await cell.bus.read_submits("a", 9, 0)
    fields = msgpack.unpackb(wire.encode(summary))
    await probe.add_raw(keys.SUBMIT, msgpack.packb({**fields, "v": 2, "later": 1}))
    assert [message for _, message in await cell.bus.read_submits("a", 9, 0)] == [summary]
    await cell.bus.ack_submits([entry_id])


async def test_the_dead_are_kept_short(cell: Cell, probe: Probe) -> None:
    """A huge bad message should be kept in part only."""
    await cell.bus.bury("test", b"x" * 1_000_000, "why")
    (kept,) = await probe.buried()
    assert 0 < len(kept) < 100_000

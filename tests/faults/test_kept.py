"""Who gives way to a better class and stays with its worker, its blocks in host memory: end to end.

One worker, a cache of 128 blocks and host memory for as many. A request of a low class holds about 70 of them when one
of a better class comes that needs 66 and grows to 125: there is room for the first again only when the second has
ended, and by then its blocks in the cache are overwritten.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from shared.ids import EntryId, RequestId
from shared.messages import WorkerReport
from shared.redis_bus import open_bus
from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL
from tests.e2e.test_equality import BYTES_PER_TOKEN, read_labels
from tests.faults.checker import check_at_rest, check_stream, read_metrics
from tests.faults.kinds import KINDS, make_prompt
from tests.faults.streams import StreamRecord, follow
from tests.waiting import wait_until, wait_until_async

POOL_TOKENS = 128 * 16
VICTIM = KINDS["greedy"] | {"prompt": make_prompt(71, 1100), "max_tokens": 900, "priority": 5}
URGENT = KINDS["seeded"] | {"prompt": make_prompt(72, 1000), "max_tokens": 1000}


@pytest.fixture(scope="module")
def swapping(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """A cell in which only one of the two fits, and the other may go to host memory."""
    cell = Cell(
        model_folder, tmp_path_factory.mktemp("swapping"), *SMALL,
        f"--kv-cache-memory-bytes={POOL_TOKENS * BYTES_PER_TOKEN}", "--max-model-len=2048",
        f"--swap-space={POOL_TOKENS * BYTES_PER_TOKEN / 2**30}", "--preemption-mode=swap",
    )  # fmt: skip
    yield cell
    cell.close()


@pytest.fixture(scope="module")
def alone(swapping: Cell) -> tuple[StreamRecord, StreamRecord]:
    """The two, one after the other: nothing happens to them."""

    async def run() -> tuple[StreamRecord, StreamRecord]:
        async with aiohttp.ClientSession() as session:
            url = f"{swapping.url}/v1/completions"
            return await follow(session, url, VICTIM), await follow(session, url, URGENT)

    return asyncio.run(run())


@asynccontextmanager
async def one_kept(cell: Cell, salt: str, *, finds: bool = False) -> AsyncIterator[tuple[StreamRecord, StreamRecord]]:
    """Both streams, the first one's request in host memory when this begins; both have ended after it. By a salt of its
    own neither finds anything in the prefix cache, unless the victim `finds` its prompt there, of one that has ended.
    """
    victim, urgent = StreamRecord(), StreamRecord()
    own = {"cache_salt": salt}
    url = f"{cell.url}/v1/completions"

    async def has_begun() -> bool:
        return victim.num_events >= 3

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        if finds:
            await follow(session, url, VICTIM | own | {"max_tokens": 1})
        tasks = [asyncio.create_task(follow(session, url, VICTIM | own, record=victim))]
        await wait_until_async(has_begun, description="the victim's first tokens")
        tasks.append(asyncio.create_task(follow(session, url, URGENT | own, record=urgent)))
        await await_kept(cell, victim)
        assert (victim.ending, urgent.ending) == ("cut", "cut"), "neither should have ended yet"
        yield victim, urgent
        await asyncio.gather(*tasks)


async def await_kept(cell: Cell, victim: StreamRecord) -> None:
    """Wait until the worker says that `victim` is in host memory. It is for about a second, and the
    gauges of gateways are no newer than that."""
    bus, after = open_bus(cell.redis_url), EntryId("0-0")

    async def is_kept() -> bool:
        nonlocal after
        reports = await bus.read_reports(after, 1000, 0)
        after = reports[-1][0] if reports else after
        held = [one for _, report in reports if isinstance(report, WorkerReport) for one in report.held]
        return any(one.request_id == victim.request_id and one.num_swapped_blocks for one in held)

    try:
        await wait_until_async(is_kept, description="a victim in host memory")
    finally:
        await bus.close()


async def attempts(cell: Cell, *records: StreamRecord) -> list[int]:
    """How often each was given to a worker."""
    bus = open_bus(cell.redis_url)
    found = await bus.load_records([RequestId(record.request_id) for record in records])
    await bus.close()
    return [record.attempt for record in found if record is not None]


async def counts(cell: Cell) -> dict[str, float]:
    """The counters of swap by label, and those of all that ended."""
    return await read_labels(cell.url) | await read_metrics(cell.url)


@pytest.mark.parametrize("finds", [False, True])
async def test_one_that_is_kept_goes_on_by_swap(
    swapping: Cell, alone: tuple[StreamRecord, StreamRecord], *, finds: bool
) -> None:
    """The victim should stay with its worker at the scheduler's word, have its blocks copied out and back, and end with
    the text of its undisturbed run, in its first attempt; also where it found its prompt, which nobody else uses."""
    before = await counts(swapping)
    async with one_kept(swapping, f"calm{finds}", finds=finds) as (victim, urgent):
        pass
    for record, expected in zip((victim, urgent), alone, strict=True):
        assert record.ending == "done", record.error
        check_stream(record, expected)
    await check_at_rest(swapping.redis_url, swapping.url)
    assert await attempts(swapping, victim, urgent) == [1, 1]
    after = await counts(swapping)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert (gained['way="swap"'], gained['way="recompute"']) == (1, 0)
    assert gained['direction="out"'] >= 1100 // 16
    assert gained['direction="in"'] >= gained['direction="out"'] / 2, "what it computed should come back as it was"
    told = [line for line in swapping.log().splitlines() if "request.preempted" in line and victim.request_id in line]
    assert [line.rpartition(" ")[2] for line in told] == ["keeps=True"]


async def test_a_dead_scheduler_loses_nothing_that_is_kept(
    swapping: Cell, alone: tuple[StreamRecord, StreamRecord]
) -> None:
    """kill -9 of the scheduler while a victim is in host memory: its successor should find both requests where they
    are, and each go on to its undisturbed end, with no token by a second attempt or sent twice. The worker stands still
    until the successor is there, so that the victim is still kept then."""
    before = await counts(swapping)
    async with one_kept(swapping, "killed") as (victim, urgent):
        swapping.kill("worker-0", signal.SIGSTOP)
        swapping.kill("scheduler")
        await asyncio.to_thread(
            wait_until, lambda: "leader.rebuilt workers=1 requests=2" in swapping.log(), description="a successor"
        )
        swapping.kill("worker-0", signal.SIGCONT)
        assert urgent.ending == "cut", "all of it should have happened while the victim was kept"
    for record, expected in zip((victim, urgent), alone, strict=True):
        assert record.ending == "done", record.error
        check_stream(record, expected)
    await check_at_rest(swapping.redis_url, swapping.url)
    assert await attempts(swapping, victim, urgent) == [1, 1]
    after = await counts(swapping)
    gained = {name: after[name] - before.get(name, 0) for name in after}
    assert gained['direction="in"'] > 0
    tokens = VICTIM["max_tokens"] + URGENT["max_tokens"]
    assert (gained["vllm:generation_tokens_total"], gained["quire:requests_finished_total"]) == (tokens, 2)
    async with aiohttp.ClientSession() as session:
        later = await follow(session, f"{swapping.url}/v1/completions", VICTIM)
    check_stream(later, alone[0])

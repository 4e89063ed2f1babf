"""Workers that are gone, frozen, stuck, poisoned, preempting or told to leave."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream, read_metrics
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow, follow_all
from tests.waiting import wait_until_async

StartCell = Callable[..., Cell]
LEASE_S = 1.5
LONG: dict[str, Any] = KINDS["greedy"] | {"max_tokens": 1500}


async def _status(url: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status


async def _wait_status(url: str, status: int, timeout_s: float) -> None:
    async def is_there() -> bool:
        return await _status(url) == status

    await wait_until_async(is_there, description=f"{url} to answer {status}", timeout_s=timeout_s)


async def _wait_events(record: StreamRecord, count: int) -> None:
    async def has_come() -> bool:
        return record.num_events >= count

    await wait_until_async(has_come, description=f"{count} events", timeout_s=30)


@pytest.mark.case(86)
async def test_readiness_follows_the_only_worker(start_cell: StartCell) -> None:
    """Without its only worker a cell should be alive, not ready, and refuse at once; then ready again by itself."""
    cell = start_cell(f"--worker-lease-s={LEASE_S}")
    old = cell.kill("worker-0", signal.SIGSTOP)
    await _wait_status(cell.url + "/ready", 503, LEASE_S + 1)
    assert await _status(cell.url + "/health") == 200
    started = time.monotonic()
    async with (
        aiohttp.ClientSession() as session,
        session.post(cell.url + "/v1/completions", json=KINDS["greedy"]) as response,
    ):
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        assert "error" in await response.json()
    assert time.monotonic() - started < 5, "a refusal must not hang"
    cell.kill("worker-0", signal.SIGKILL)
    cell.wait_restarted("worker-0", old)
    await _wait_status(cell.url + "/ready", 200, 60)


@pytest.mark.case(87, 93)
async def test_a_frozen_worker_loses_its_work_and_doubles_nothing(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord]
) -> None:
    """SIGSTOP of a worker in mid-stream: its jobs should move, and its late commits after SIGCONT be void."""
    cell = start_cell("--workers=2", f"--worker-lease-s={LEASE_S}")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        url = cell.url + "/v1/completions"
        followed = asyncio.gather(*(follow(session, url, KINDS[k], record=r) for k, r in records.items()))
        await _wait_events(records["greedy"], 5)
        cell.kill("worker-0", signal.SIGSTOP)
        await followed
        cell.kill("worker-0", signal.SIGCONT)
    for kind, record in records.items():
        assert record.ending == "done", record.error
        check_stream(record, undisturbed[kind])
    await check_at_rest(cell.redis_url, cell.url)


@pytest.mark.case(94)
async def test_a_poison_request_ends_alone(start_cell: StartCell, undisturbed: dict[str, StreamRecord]) -> None:
    """A prompt that kills every worker it meets should end with an error after K tries; its neighbours be served."""
    poison = KINDS["greedy"] | {"prompt": [77, 78, 79, 80, 81, 82]}
    cell = start_cell(
        "--workers=2",
        f"--worker-lease-s={LEASE_S}",
        "--max-crashes=3",
        "--failpoints=worker.in_prefill?tok=77.78.79.80=kill",
    )
    records = await follow_all(cell.url, KINDS | {"poison": poison})
    bad = records.pop("poison")
    assert (bad.status, bad.ending) == (500, "error")
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])
    await check_at_rest(cell.redis_url, cell.url, timeout_s=40)
    assert cell.log().count("SIGKILL") <= 3, "at most K deliveries"


@pytest.mark.case(96)
@pytest.mark.parametrize("at_pass", [1, 7, 19])
async def test_a_moved_request_keeps_its_count(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord], at_pass: int, tmp_path: Any
) -> None:
    """A worker killed after k tokens: exactly as many tokens as asked in all, and usage right."""
    cell = start_cell(
        "--workers=2", f"--worker-lease-s={LEASE_S}", f"--failpoints=bus.commit.reply=kill@{at_pass}#{tmp_path}/latch"
    )
    records = await follow_all(cell.url, {"greedy": KINDS["greedy"]})
    check_stream(records["greedy"], undisturbed["greedy"])
    assert records["greedy"].usage is not None
    assert records["greedy"].usage["completion_tokens"] == KINDS["greedy"]["max_tokens"]
    await check_at_rest(cell.redis_url, cell.url)


@pytest.mark.case(88)
async def test_a_worker_told_to_leave_hands_over(start_cell: StartCell, undisturbed: dict[str, StreamRecord]) -> None:
    """SIGTERM with a grace too short: the worker should give its streams back and exit 0; nobody sees a seam."""
    cell = start_cell("--workers=2", "--drain-s=0.05", f"--worker-lease-s={LEASE_S}")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        records = {kind: StreamRecord() for kind in KINDS}
        url = cell.url + "/v1/completions"
        followed = asyncio.gather(*(follow(session, url, KINDS[k], record=r) for k, r in records.items()))
        await _wait_events(records["greedy"], 5)
        cell.kill("worker-0", signal.SIGTERM)
        cell.kill("worker-0", signal.SIGTERM)
        await followed
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])
    await check_at_rest(cell.redis_url, cell.url)


@pytest.mark.case(88)
async def test_a_gateway_told_to_leave_closes_its_streams_for_others(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord]
) -> None:
    """SIGTERM of a gateway at its grace's end: streams close without a terminal event and resume elsewhere."""
    cell = start_cell("--gateways=2", "--drain-s=0.2")
    first, second = cell.state["urls"]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        whole = await follow(session, second + "/v1/completions", LONG)
        record = StreamRecord()
        followed = asyncio.create_task(follow(session, first + "/v1/completions", LONG, record=record))
        await _wait_events(record, 5)
        cell.kill("gateway-0", signal.SIGTERM)
        await followed
        assert record.ending == "cut"
        headers = {"Last-Event-ID": record.last_event_id}
        await follow(session, f"{second}/v1/streams/{record.request_id}", None, record=record, headers=headers)
    assert record.ending == "done"
    check_stream(record, whole)


async def test_a_death_while_preempting_changes_nothing(start_cell: StartCell, tmp_path: Any) -> None:
    """A worker that dies between dropping a preempted request's blocks and giving it back should lose nothing."""
    bodies = {str(i): KINDS["greedy"] | {"prompt": [20 + i] * 60, "max_tokens": 300} for i in range(8)}
    roomy = start_cell()
    expected = await follow_all(roomy.url, bodies)
    flags = ("--kv-cache-memory-bytes=655360", "--max-model-len=500", f"--worker-lease-s={LEASE_S}")
    cell = start_cell(f"--failpoints=worker.after_preempt=kill@1#{tmp_path}/latch", *flags)
    records = await follow_all(cell.url, bodies)
    for name, record in records.items():
        assert record.ending == "done", record.error
        check_stream(record, expected[name])
    assert "SIGKILL" in cell.log(), "the failpoint never acted"
    await check_at_rest(cell.redis_url, cell.url)


@pytest.mark.case(66)
@pytest.mark.parametrize("events", [1, 3, 40])
async def test_a_client_that_leaves_frees_everything(cell: Cell, events: int) -> None:
    """Work of a client that left in mid-stream should stop, and its blocks be free, within 2 s."""
    async with aiohttp.ClientSession() as session:
        record = await follow(session, cell.url + "/v1/completions", LONG, leave_after=events)
    assert record.ending == "left"
    await check_at_rest(cell.redis_url, cell.url, timeout_s=2)


@pytest.mark.case(66, 68)
async def test_clients_that_leave_at_any_stage_free_everything(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord]
) -> None:
    """Clients gone while queued, in prefill or decoding should free all; those who stay should see nothing."""
    cell = start_cell("--max-num-seqs=2")
    url = cell.url + "/v1/completions"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        leaving = [asyncio.create_task(follow(session, url, LONG | {"seed": i})) for i in range(10)]
        leaving += [asyncio.create_task(follow(session, url, LONG | {"stream": False})) for _ in range(3)]
        staying = asyncio.create_task(follow_all(cell.url, KINDS))

        async def is_busy() -> bool:
            return (await read_metrics(cell.url))["vllm:num_requests_running"] > 0

        await wait_until_async(is_busy, description="running requests")
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        records = await staying
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])
    await check_at_rest(cell.redis_url, cell.url)

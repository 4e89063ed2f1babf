"""Random faults under mixed load, by seed: every stream goes on to its undisturbed end, whatever died, hung or left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow
from tests.waiting import wait_until_async

StartCell = Callable[..., Cell]

LONGEST_STOP_S = 3.0
PATIENCE_S = 90.0
MIX = {
    signal.SIGKILL: ("worker-0", "worker-1", "worker-2", "scheduler", "gateway-0", "gateway-1", "redis"),
    signal.SIGTERM: ("worker-0", "worker-1", "worker-2", "scheduler", "gateway-0", "gateway-1"),
    signal.SIGSTOP: ("worker-0", "worker-1", "worker-2", "scheduler", "gateway-0", "redis"),
}


@pytest.mark.parametrize(
    ("seed", "seconds"), [(1, 8), *(pytest.param(seed, 60, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
async def test_streams_survive_chaos(
    start_cell: StartCell, undisturbed: dict[str, StreamRecord], seed: int, seconds: float
) -> None:
    """Services killed, terminated and stopped at random, about one a second, should lose or double no token."""
    cell = start_cell("--workers=3", "--gateways=2", "--worker-lease-s=1.5", "--max-crashes=1000", "--drain-s=2")
    rng = random.Random(seed)
    faults = asyncio.create_task(_make_faults(cell, rng, time.monotonic() + seconds))
    clients = [asyncio.create_task(_ask_again_and_again(cell, rng, faults, undisturbed)) for _ in range(6)]
    try:
        done = sum(await asyncio.gather(*clients))
        events = await faults
    finally:
        for task in (faults, *clients):
            task.cancel()
    print(f"seed {seed}: {done} streams through {events}")
    assert done >= len(clients)
    for url in cell.state["urls"]:
        await check_at_rest(cell.redis_url, url, timeout_s=45, counters=False)  # orphans of dead gateways take 30 s


async def _make_faults(cell: Cell, rng: random.Random, until: float) -> list[str]:
    events = []
    while time.monotonic() < until:
        await asyncio.sleep(rng.uniform(0.3, 1.5))  # the pace of the faults is part of the case
        number = rng.choice(list(MIX))
        name = rng.choice(MIX[number])
        pid = cell.pids.get(name)
        if pid is None:
            continue
        events.append(f"{number.name} {name}")
        _send(pid, number)
        if number is signal.SIGSTOP:
            asyncio.get_running_loop().call_later(rng.uniform(0.1, LONGEST_STOP_S), _send, pid, signal.SIGCONT)
    await asyncio.sleep(LONGEST_STOP_S)  # until whatever was stopped goes on
    return events


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def _ask_again_and_again(
    cell: Cell, rng: random.Random, faults: asyncio.Task[Any], undisturbed: dict[str, StreamRecord]
) -> int:
    """Streams one after another for as long as there are faults; how many were whole."""
    done = 0
    while not faults.done():
        kind = rng.choice(list(KINDS))
        record = await _persist(cell, KINDS[kind], f"{rng.random()}", rng)
        assert record.ending == "done", (kind, record.status, record.error)
        check_stream(record, undisturbed[kind])
        done += 1
    return done


async def _persist(cell: Cell, body: dict[str, Any], key: str, rng: random.Random) -> StreamRecord:
    """One stream to its end by a client that comes back, to any gateway, with what it has."""
    record = StreamRecord()
    urls = cell.state["urls"]
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S, sock_connect=5)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def is_over() -> bool:
            url = rng.choice(urls)
            if record.num_events:
                headers = {"Last-Event-ID": record.last_event_id}
                await follow(session, f"{url}/v1/streams/{record.request_id}", None, record=record, headers=headers)
            else:
                headers = {"Idempotency-Key": key}
                await follow(session, f"{url}/v1/completions", body, record=record, headers=headers)
            return record.ending == "done" or (record.ending == "error" and record.status != 503)

        await wait_until_async(is_over, description=f"the end of {record}", timeout_s=PATIENCE_S)
    return record

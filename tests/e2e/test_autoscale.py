"""`quire serve --autoscale`: real workers that come with the work, and leave without a seam in any stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL
from tests.e2e.test_serve import is_ready
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.streams import StreamRecord, follow_all
from tests.waiting import wait_until, wait_until_async

StartCell = Callable[..., Cell]
SCALED = ("--autoscale=1:2", "--autoscale-grow-after-s=0.3", "--autoscale-shrink-after-s=1.5", "--ttft-target-ms=100",
          "--drain-s=0.1", "--max-num-seqs=4", "--kv-cache-memory-bytes=16000000")  # fmt: skip

pytestmark = pytest.mark.slow


def body(index: int, num_tokens: int) -> dict[str, Any]:
    """Request `index`: even ones are greedy, odd ones sampled by seed."""
    prompt = [(7 * index + 13 * position) % 480 for position in range(16 + index)]
    return {"model": "test-llama", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "temperature": index % 2, "seed": index, "stream_options": {"include_usage": True}}  # fmt: skip


BURST = {f"burst-{i}": body(i, 400) for i in range(10)}
LONG = {f"long-{i}": body(20 + i, 3900) for i in range(2)}


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, StreamRecord]]:
    """The same requests on one worker to which nothing happens."""
    quiet = Cell(model_folder, tmp_path_factory.mktemp("quiet"), *SMALL)
    try:
        yield asyncio.run(follow_all(quiet.url, BURST | LONG))
    finally:
        quiet.close()


def workers(cell: Cell) -> set[str]:
    return {name for name in cell.pids if name.startswith("worker-")}


async def wait_for_workers(cell: Cell, *names: str) -> None:
    async def are_there() -> bool:
        return workers(cell) == set(names)

    await wait_until_async(are_there, description=f"exactly {names}", timeout_s=60)


async def wait_for_line(cell: Cell, text: str, count: int = 1) -> None:
    async def is_there() -> bool:
        return cell.log().count(text) >= count

    await wait_until_async(is_there, description=f"{count} times {text!r} in the log", timeout_s=60)


async def bring_second_worker(cell: Cell) -> dict[str, StreamRecord]:
    """Bursts until it serves; the records of the last one."""
    assert workers(cell) == {"worker-0"}
    while cell.log().count("worker.ready") < 2:
        records = await follow_all(cell.url, BURST)
    return records


def check_equal(records: dict[str, StreamRecord], undisturbed: dict[str, StreamRecord]) -> None:
    for name, record in records.items():
        assert record.ending == "done", (name, record.error)
        check_stream(record, undisturbed[name])


async def test_workers_come_and_go_without_a_seam(start_cell: StartCell, undisturbed: dict[str, StreamRecord]) -> None:
    """A burst should bring the second worker; two long streams, one on each, should not keep it, and what it held go on
    elsewhere: every text equals that of an undisturbed run."""
    cell = start_cell(*SCALED)
    check_equal(await bring_second_worker(cell), undisturbed)
    check_equal(await follow_all(cell.url, LONG), undisturbed)
    await wait_for_workers(cell, "worker-0")
    assert "worker-1 is told to leave; workers wanted: 1" in cell.log()
    assert "was told to leave: ended with exit code 0" in cell.log()
    assert "worker.draining held=1" in cell.log(), "nothing had to move: the test proves nothing"
    await check_at_rest(cell.redis_url, cell.url)


async def test_a_crash_is_no_scaling(start_cell: StartCell) -> None:
    """A worker that is killed should come back under its own name, and no other be started in its place."""
    cell = start_cell(*SCALED)
    cell.wait_restarted("worker-0", cell.kill("worker-0"))
    await asyncio.to_thread(wait_until, lambda: is_ready(cell.url), description="readiness", timeout_s=60)
    records = await follow_all(cell.url, {"a": body(1, 5)})
    assert records["a"].ending == "done"
    assert "starting worker-1" not in cell.log()


@pytest.mark.parametrize("phase", ["starting", "draining"])
async def test_ctrl_c_is_clean_while_a_worker_comes_or_goes(start_cell: StartCell, phase: str) -> None:
    """One SIGINT should end everything with 0 also while a second worker loads its model, or finishes its work."""
    cell = start_cell(*SCALED, "--drain-s=20")
    if phase == "starting":
        streams = asyncio.create_task(follow_all(cell.url, BURST))
        await wait_for_line(cell, "starting worker-1")
    else:
        await bring_second_worker(cell)
        streams = asyncio.create_task(follow_all(cell.url, LONG))
        await wait_for_line(cell, "worker.draining held=1")
    processes = cell.processes()
    streams.cancel()
    await asyncio.gather(streams, return_exceptions=True)
    assert await asyncio.to_thread(cell.stop) == 0, cell.log()[-3000:]
    assert psutil.wait_procs(processes, timeout=10)[1] == []


async def test_killed_launcher_leaves_no_worker(start_cell: StartCell) -> None:
    """kill -9 of the launcher should take along a worker that it started later, too."""
    cell = start_cell(*SCALED)
    streams = asyncio.create_task(follow_all(cell.url, BURST))
    await wait_for_workers(cell, "worker-0", "worker-1")
    processes = cell.processes()
    assert {cell.pids["worker-0"], cell.pids["worker-1"]} <= {process.pid for process in processes}
    cell.process.kill()
    cell.process.wait()
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert {record.ending for record in (await streams).values()} <= {"cut", "done"}

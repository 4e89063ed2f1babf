"""`python -m gpu_worker` as a process, with a real (tiny, random) model on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.bench.random_model import write_random_model
from quire.embedded_redis import EmbeddedRedis
from shared.bus import Bus, RequestState, WorkerPulse
from shared.ids import RequestId, WorkerId
from tests.gpu_worker.service.cell import TOKEN, Cell
from tests.waiting import wait_until_async

CASES = [
    ((), "gpu_worker: error: --redis-url: name a Redis"),
    (("--redis-url", "redis://localhost:1"), "gpu_worker: error: --model: name a model folder"),
    (("--max-num-seqs", "0"), "--max-num-seqs='0': must be 1 to 4096"),
    (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
]


@pytest.mark.parametrize(("argv", "expected"), CASES)
def test_a_wrong_setting_should_end_it_with_one_line(argv: tuple[str, ...], expected: str) -> None:
    """The process should end with 2 and name the setting in one line, with no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "gpu_worker", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test")


class Processes:
    """Worker processes of one test; the test itself is gateway and leader of the cell."""

    def __init__(self, bus: Bus, url: str, model: Path) -> None:
        self.bus = bus
        self.cell = Cell(bus)
        self._argv = [sys.executable, "-m", "gpu_worker", str(model), f"--redis-url={url}", "--dtype=float32"]
        self._argv += ["--kv-cache-memory-bytes=4000000", "--max-model-len=512", "--num-threads=1"]
        self.started: list[subprocess.Popen[bytes]] = []

    async def start(self, *argv: str) -> tuple[subprocess.Popen[bytes], WorkerId]:
        """A worker that has said hello."""
        process = self._spawn(argv)
        found: list[WorkerPulse] = []

        async def has_said_hello() -> bool:
            assert process.poll() is None, f"the worker ended with {process.returncode}"
            found[:] = [p for p in await self.bus.read_workers() if p.hello.pid == process.pid]
            return bool(found)

        await wait_until_async(has_said_hello, description="hello of a worker process", timeout_s=60)
        return process, found[0].hello.worker_id

    def _spawn(self, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*self._argv, "--die-with-parent", "--log-level=error", *argv])
        self.started.append(process)
        return process

    async def end(self, process: subprocess.Popen[bytes]) -> int:
        """Its exit code, once it has ended."""

        async def has_ended() -> bool:
            return process.poll() is not None

        await wait_until_async(has_ended, description="the end of a worker process", timeout_s=30)
        return process.returncode

    async def dispatch(self, request_id: RequestId, worker_id: WorkerId) -> None:
        assert (await self.bus.dispatch(TOKEN, request_id, worker_id, 1)).entry_id is not None

    async def assert_same(self, moved: RequestId, undisturbed: RequestId) -> None:
        """Both end, choice by choice with the same tokens."""
        for request_id in (moved, undisturbed):
            record = await self.cell.wait_for_state(request_id, RequestState.ENDED)
            assert record.ended is not None
            assert record.ended.reason == "finished", record.ended
        for choice in (0, 1):
            assert await self.cell.logged(moved, choice) == await self.cell.logged(undisturbed, choice)


@pytest.fixture
async def processes(redis_bus: Bus, redis_server: EmbeddedRedis, model_folder: Path) -> AsyncIterator[Processes]:
    processes = Processes(redis_bus, redis_server.url, model_folder)
    async with processes.cell:
        yield processes
    for process in processes.started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
    for pulse in await redis_bus.read_workers():
        await redis_bus.bye(pulse.hello.worker_id)


async def submit(processes: Processes) -> RequestId:
    """Two sampled choices, long enough to be interrupted."""
    return await processes.cell.submit(tuple(range(20, 60)), n=2, max_tokens=200, temperature=0.9, seed=5)


@pytest.mark.case(96)
@pytest.mark.parametrize(
    "failpoint",
    ["worker.after_inbox=kill", "worker.in_prefill=kill", "worker.before_commit=kill@7", "bus.commit.reply=kill@7"],
)
async def test_a_killed_worker_should_leave_a_request_that_goes_on(processes: Processes, failpoint: str) -> None:
    """Wherever it dies, another worker should go on from the log to the very tokens of an undisturbed run."""
    (victim, victim_id), (_, heir_id) = await asyncio.gather(
        processes.start(f"--failpoints={failpoint}"), processes.start()
    )
    request_id, undisturbed = await submit(processes), await submit(processes)
    await processes.dispatch(undisturbed, heir_id)
    await processes.dispatch(request_id, victim_id)
    assert await processes.end(victim) == -signal.SIGKILL
    assert await processes.bus.requeue(TOKEN, victim_id) == [request_id]
    await processes.dispatch(request_id, heir_id)
    await processes.assert_same(request_id, undisturbed)


async def test_term_should_finish_or_hand_over(processes: Processes) -> None:
    """With time a TERM should let work finish, without it should hand it over; exit code 0, a second TERM harmless."""
    (patient, patient_id), (hasty, hasty_id) = await asyncio.gather(processes.start(), processes.start("--drain-s=0"))
    finished, moved = await submit(processes), await submit(processes)
    await processes.dispatch(moved, hasty_id)
    await processes.cell.wait_for_tokens(moved, 5)
    hasty.send_signal(signal.SIGTERM)
    hasty.send_signal(signal.SIGTERM)
    assert await processes.end(hasty) == 0
    record = await processes.cell.record(moved)
    assert (record.state, record.preemptions) == (RequestState.QUEUED, 0)
    num_moved = len(await processes.cell.logged(moved))
    await processes.dispatch(finished, patient_id)
    await processes.dispatch(moved, patient_id)
    await processes.cell.wait_for_tokens(finished, 1)
    await processes.cell.wait_for_tokens(moved, num_moved + 1)  # what comes while it drains would be given back
    patient.send_signal(signal.SIGTERM)
    assert await processes.end(patient) == 0
    await processes.assert_same(moved, finished)
    assert await processes.bus.read_workers() == []


async def test_interrupt_should_end_it_cleanly(processes: Processes) -> None:
    """Ctrl-C with nothing to do should end it at once with 0."""
    process, _ = await processes.start()
    process.send_signal(signal.SIGINT)
    assert await processes.end(process) == 0
    assert await processes.bus.read_workers() == []

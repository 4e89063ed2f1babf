"""`python -m scheduler_svc` as a process, and a Redis that goes away under it."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from quire.embedded_redis import EmbeddedRedis
from scheduler_svc.metrics import SchedulerMetrics
from shared.bus import Bus
from shared.errors import ConfigError
from shared.metrics import serve_metrics
from shared.redis_bus import open_bus
from tests.scheduler_svc.service_cell import ServiceCell, service_cell
from tests.waiting import wait_until_async

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "scheduler_svc"]


def start(*flags: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, *flags], cwd=ROOT, stderr=subprocess.PIPE)


async def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    async def has_ended() -> bool:
        return process.poll() is not None

    await wait_until_async(has_ended, description="the process ends")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ((), "--redis-url: name a Redis"),
        (("--max-crashes", "0"), "--max-crashes"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(flags: tuple[str, ...], word: str) -> None:
    """The line should name the setting; no traceback."""
    done = subprocess.run([*COMMAND, *flags], cwd=ROOT, capture_output=True, timeout=60, check=False)
    (line,) = done.stderr.decode().splitlines()
    assert (done.returncode, word in line) == (2, True)


async def test_it_leads_and_gives_the_lead_up_on_sigterm(redis_server: EmbeddedRedis, redis_bus: Bus) -> None:
    """SIGTERM: exit code 0, and the leader's token cleared so that no standby waits; a second one is harmless."""
    process = start(f"--redis-url={redis_server.url}")
    try:

        async def leads() -> bool:
            return (await redis_bus.read_leader()).token != ""

        await wait_until_async(leads, description="the process leads")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        await _wait_for_end(process)
        assert process.returncode == 0
        assert (await redis_bus.read_leader()).token == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("place", ["scheduler.after_read", "scheduler.after_dispatch", "scheduler.before_ack"])
async def test_kill_9_at_each_step_loses_and_doubles_nothing(
    redis_server: EmbeddedRedis, redis_bus: Bus, place: str
) -> None:
    """Killed at any failpoint, the next scheduler should send each request exactly once in all."""
    async with service_cell(redis_bus) as cell:
        process = start(f"--redis-url={redis_server.url}", f"--failpoints={place}=kill@1", "--leader-lease-s=0.4")
        try:
            worker, _ = cell.start_worker("w:1")
            request_id = await cell.submit()
            await _wait_for_end(process)
            assert process.returncode == -signal.SIGKILL
        finally:
            process.kill()
            process.communicate()
        cell.start_scheduler()
        await cell.wait_for_attempt(worker, request_id, 1)
        await worker.finish(request_id)
        await cell.wait_for_end(request_id)
        assert worker.attempts == [(request_id, 1)]


async def test_it_comes_back_by_itself_after_redis_did(tmp_path_factory: pytest.TempPathFactory) -> None:
    """kill -9 of Redis and a restart on its data: the same scheduler should go on, without anybody's help."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("r", numbered=True))
    server.start()
    bus = open_bus(server.url)
    try:
        cell = ServiceCell(bus)
        _, _, metrics = cell.start_scheduler()
        before = await cell.submit()
        await _wait_for(metrics, "queue_length", 1)
        server.kill()
        await _wait_for(metrics, "is_leader", 0)
        server.start()
        await _wait_for(metrics, "queue_length", 1)
        worker, _ = cell.start_worker("w:1")
        await cell.wait_for_attempt(worker, before, 1)
        await cell.close()
    finally:
        await bus.close()
        server.stop()


async def _wait_for(metrics: SchedulerMetrics, name: str, expected: float) -> None:
    async def is_so() -> bool:
        return metrics.registry.get_sample_value(f"quire:scheduler_{name}") == expected

    await wait_until_async(is_so, description=f"{name} is {expected}")


def test_metrics_are_served_until_closed() -> None:
    """Prometheus should get our series under our names; afterwards the port is free again."""
    metrics = SchedulerMetrics()
    metrics.dispatches.inc()
    server = serve_metrics(metrics.registry, host="127.0.0.1", port=0)
    port = server.port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    assert "quire:scheduler_dispatches_total 1.0" in text
    assert "quire:scheduler_is_leader 0.0" in text
    with pytest.raises(ConfigError, match="metrics_port"):
        serve_metrics(metrics.registry, host="127.0.0.1", port=port)
    server.close()
    serve_metrics(metrics.registry, host="127.0.0.1", port=port).close()

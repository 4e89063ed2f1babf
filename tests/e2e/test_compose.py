"""The cell as docker-compose.yml makes it, on a real container engine: what is published, how it scales, how it ends.

Needs `COMPOSE_TEST_PROJECT`: a copy of the tree whose images are built; `tests/e2e/engine.sh run` provides engine, copy
and images. The tests of this file share one cell and run in their order; the last one takes it down.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from quire.bench.random_model import write_random_model
from tests.faults.checker import read_metrics
from tests.faults.streams import StreamRecord, follow
from tests.waiting import wait_until

PROJECT = os.environ.get("COMPOSE_TEST_PROJECT", "")
PORT = 18_000
URL = f"http://127.0.0.1:{PORT}"
MODEL = "test-llama"
NUM_REQUESTS, NUM_TOKENS = 32, 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROJECT, reason="no container engine: COMPOSE_TEST_PROJECT is not set, see engine.sh"),
]


class Compose:
    """`docker compose` in the project, with the settings of this test in its .env."""

    def __init__(self, project: Path, models: Path, **more: str | float) -> None:
        self._project = project
        settings = {
            "REDIS_PASSWORD": secrets.token_hex(16),
            "MODELS": models,
            "MODEL": MODEL,
            "QUIRE_PORT": PORT,
            "QUIRE_DTYPE": "float32",
            "QUIRE_KV_CACHE_MEMORY_BYTES": 64_000_000,
            "QUIRE_DRAIN_S": 1,  # so that a worker that is told to stop has to hand over
        } | more
        (project / ".env").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))

    def __call__(self, *arguments: str, timeout_s: float = 180) -> str:
        """Standard output; raises with both outputs when the command fails."""
        return docker("compose", "--project-directory", str(self._project), *arguments, timeout_s=timeout_s)

    def scale(self, num_workers: int) -> None:
        """So many workers, all of them healthy."""
        self("up", "--detach", "--no-build", "--no-recreate", "--wait", "--scale", f"gpu_worker={num_workers}")
        wait_until(lambda: len(self.containers("gpu_worker")) == num_workers, description=f"{num_workers} workers")

    def containers(self, *services: str) -> list[str]:
        """Ids of running containers."""
        return self("ps", "--quiet", *services).split()


def docker(*arguments: str, timeout_s: float = 60) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """One gateway, one scheduler, one worker, healthy."""
    models = tmp_path_factory.mktemp("models")
    write_random_model("test", models / MODEL)
    models.chmod(0o755)  # the images' user must get in
    made = Compose(Path(PROJECT), models)
    try:
        made.scale(1)
        yield made
    finally:
        print(made("logs", "--tail", "60"))
        made("down", "--volumes", "--timeout", "5")


def metrics_of(container: str) -> dict[str, float]:
    """A scheduler's or worker's own series, read inside its container, since nobody else can."""
    text = docker("exec", container, "python", "-c", "import urllib.request as u; "
                  "print(u.urlopen('http://127.0.0.1:9100/metrics').read().decode())")  # fmt: skip
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line and line[0] != "#"}


def body(index: int, num_tokens: int) -> dict[str, Any]:
    """Request `index`: even ones are greedy, odd ones sampled by seed."""
    prompt = [(7 * index + 13 * position) % 480 for position in range(16 + index)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True,
            "temperature": index % 2, "seed": index, "stream_options": {"include_usage": True}}  # fmt: skip


async def stream_all(bodies: list[dict[str, Any]], records: list[StreamRecord] | None = None) -> list[StreamRecord]:
    """All streams at once, each to its end."""
    records = records or [StreamRecord() for _ in bodies]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        url = f"{URL}/v1/completions"
        return await asyncio.gather(
            *(follow(session, url, each, record=record) for each, record in zip(bodies, records, strict=True))
        )


def check_complete(records: list[StreamRecord], num_tokens: int) -> None:
    for record in records:
        assert (record.status, record.ending) == (200, "done"), record.error
        assert record.usage is not None
        assert record.usage["completion_tokens"] == num_tokens


def test_publishes_the_gateway_only(compose: Compose) -> None:
    """Of all containers, only the gateway should have a port on the machine, and only on its loopback address."""
    names = docker("ps", "--format", "{{.Names}}").split()
    assert {name.removeprefix("quire-").rsplit("-", 1)[0] for name in names} == {
        "redis", "gateway", "scheduler_svc", "gpu_worker",
    }  # fmt: skip
    published = {name: docker("inspect", name, "--format", "{{json .NetworkSettings.Ports}}") for name in names}
    bound = {name: [b for bindings in json.loads(ports).values() for b in bindings or []]
             for name, ports in published.items()}  # fmt: skip
    assert {name: bindings for name, bindings in bound.items() if bindings} == {
        "quire-gateway-1": [{"HostIp": "127.0.0.1", "HostPort": str(PORT)}]
    }
    with urllib.request.urlopen(f"{URL}/ready", timeout=10) as response:
        assert response.status == 200


def test_redis_asks_for_the_password(compose: Compose) -> None:
    """Without the password Redis should answer nothing, and the network it is on should have no way out."""
    refused = compose("exec", "-T", "-e", "REDISCLI_AUTH=", "redis", "redis-cli", "get", "live")
    assert "NOAUTH" in refused
    assert docker("network", "inspect", "quire_cell", "--format", "{{.Internal}}").strip() == "true"
    (redis,) = compose.containers("redis")
    (networks,) = json.loads(docker("inspect", redis, "--format", "[{{json .NetworkSettings.Networks}}]"))
    assert list(networks) == ["quire_cell"]


@pytest.mark.parametrize("service", ["gateway", "scheduler_svc", "gpu_worker", "redis"])
def test_runs_without_privileges(compose: Compose, service: str) -> None:
    """Every service should run as an ordinary user who cannot write to its image."""
    (container,) = compose.containers(service)
    assert int(docker("exec", container, "id", "-u")) != 0
    with pytest.raises(AssertionError, match="Read-only file system"):
        docker("exec", "--user", "0", container, "touch", "/here")


def test_spreads_over_three_workers(compose: Compose) -> None:
    """Of 32 requests at once, each of three workers should produce a part, by its own count of tokens."""
    compose.scale(3)
    workers = compose.containers("gpu_worker")
    series = "quire:worker_generation_tokens_total"
    before = {worker: metrics_of(worker)[series] for worker in workers}
    records = asyncio.run(stream_all([body(index, NUM_TOKENS) for index in range(NUM_REQUESTS)]))
    check_complete(records, NUM_TOKENS)

    def produced() -> list[float]:
        return [metrics_of(worker)[series] - before[worker] for worker in workers]

    wait_until(lambda: sum(produced()) >= NUM_REQUESTS * NUM_TOKENS, description="all tokens in the workers' reports")
    assert min(produced()) >= NUM_TOKENS, produced()


def test_scaling_down_changes_no_stream(compose: Compose) -> None:
    """While streams run on three workers, two of them leave: every text should equal that of an undisturbed run."""
    num_tokens = 1000
    bodies = [body(index, num_tokens) for index in range(12)]
    undisturbed = asyncio.run(stream_all(bodies))
    check_complete(undisturbed, num_tokens)
    (scheduler,) = compose.containers("scheduler_svc")
    dispatches = "quire:scheduler_dispatches_total"
    before = metrics_of(scheduler)[dispatches]
    records = [StreamRecord() for _ in bodies]

    async def scale_under_load() -> None:
        streams = asyncio.create_task(stream_all(bodies, records))
        await asyncio.to_thread(
            wait_until, lambda: all(record.num_events for record in records), description="tokens in every stream"
        )
        assert not [record.ending for record in records if record.ending == "done"], "too quick to scale under load"
        await asyncio.to_thread(compose.scale, 1)
        await streams

    asyncio.run(scale_under_load())
    assert [record.outcome() for record in records] == [record.outcome() for record in undisturbed]
    assert metrics_of(scheduler)[dispatches] - before > len(bodies), "nothing had to move: the test proves nothing"


def test_comes_to_rest(compose: Compose) -> None:
    """After all that, nothing should run or wait, and only the worker that is left should be known."""

    def metrics() -> dict[str, float]:
        return asyncio.run(read_metrics(URL))

    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    wait_until(lambda: [metrics()[name] for name in names] == [0, 0, 0], description="rest")
    (worker,) = compose.containers("gpu_worker")
    wait_until(lambda: metrics_of(worker)["quire:worker_running"] == 0, description="an empty batch")
    keys = compose("exec", "-T", "redis", "redis-cli", "--raw", "hkeys", "workers").split()
    assert len([key for key in keys if key.startswith("hello:")]) == 1


def test_survives_a_restart_of_everything(compose: Compose) -> None:
    """Stop and start should keep what Redis holds, and every service should have ended by itself with code 0."""
    compose("exec", "-T", "redis", "redis-cli", "set", "kept", "1")
    compose("stop")
    ended = compose("ps", "--all", "--format", "json").splitlines()
    assert {row["Service"]: row["ExitCode"] for row in map(json.loads, ended)} == dict.fromkeys(
        ("redis", "model", "scheduler_svc", "gateway", "gpu_worker"), 0
    )
    compose.scale(1)
    assert compose("exec", "-T", "redis", "redis-cli", "get", "kept").strip() == "1"
    compose("exec", "-T", "redis", "redis-cli", "del", "kept")
    check_complete(asyncio.run(stream_all([body(1, NUM_TOKENS)])), NUM_TOKENS)


def test_down_leaves_nothing(compose: Compose) -> None:
    """`down --volumes` should leave no container, network or volume of the project."""
    compose("down", "--volumes")
    label = ("--filter", "label=com.docker.compose.project=quire", "--quiet")
    assert docker("ps", "--all", *label) == ""
    assert docker("network", "ls", *label) == ""
    assert docker("volume", "ls", *label) == ""

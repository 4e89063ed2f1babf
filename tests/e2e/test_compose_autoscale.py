"""The profile `autoscale` on a real container engine: workers' containers that come with the work and leave drained.

As `test_compose.py`, whose parts it uses: the tests share one cell and run in their order. Two autoscalers run all the
time, of which there would be no need.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.bench.random_model import write_random_model
from tests.e2e.test_compose import MODEL, PROJECT, Compose, body, check_complete, docker, metrics_of, stream_all
from tests.faults.streams import StreamRecord
from tests.waiting import wait_until

BURST = [body(index, 300) for index in range(16)]
LONG = [body(40 + index, 3500) for index in range(2)]
WORKER, AUTOSCALER = "gpu_worker", "autoscaler"
SETTINGS: dict[str, Any] = {
    "COMPOSE_PROFILES": "autoscale",
    "DOCKER_SOCKET": os.environ.get("DOCKER_HOST", "").removeprefix("unix://"),
    "QUIRE_AUTOSCALE": "1:2",
    "QUIRE_AUTOSCALE_GROW_AFTER_S": 0.5,
    "QUIRE_AUTOSCALE_SHRINK_AFTER_S": 5,  # longer than a burst has one worker's work left, shorter than LONG
    "QUIRE_TTFT_TARGET_MS": 100,
    "QUIRE_MAX_NUM_SEQS": 4,
    "QUIRE_ENABLE_PREFIX_CACHING": "false",  # which would bring a prompt back to the worker that has seen it
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PROJECT, reason="no container engine: COMPOSE_TEST_PROJECT is not set, see engine.sh"),
]


@pytest.fixture(scope="module")
def compose(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """One gateway, one scheduler, one worker and two autoscalers, healthy."""
    models = tmp_path_factory.mktemp("models")
    write_random_model("test", models / MODEL)
    models.chmod(0o755)  # the images' user must get in
    made = Compose(Path(PROJECT), models, **SETTINGS)
    try:
        made("up", "--detach", "--no-build", "--wait", "--scale", f"{AUTOSCALER}=2")
        yield made
    finally:
        print(made("logs", "--tail", "60"))
        made("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="module")
def strangers(compose: Compose) -> Iterator[dict[str, str]]:
    """Containers that are none of this project's workers, id by what they are; running and left alone at the end."""
    labels = {
        "another project's worker": ("com.docker.compose.project=other", f"com.docker.compose.service={WORKER}"),
        "another service": ("com.docker.compose.project=quire", "com.docker.compose.service=other"),
        "no compose at all": ("quire.autoscaled=1",),
    }
    sleep = ("quire-worker", "python", "-c", "import time; time.sleep(3600)")
    ids = {
        what: docker("run", "--detach", *(word for label in own for word in ("--label", label)), *sleep).strip()
        for what, own in labels.items()
    }
    before = {what: inspect(each)["State"] for what, each in ids.items()}
    yield ids
    after = {what: inspect(each)["State"] for what, each in ids.items()}
    docker("rm", "--force", *ids.values())
    assert after == before


def inspect(container: str) -> dict[str, Any]:
    (found,) = json.loads(docker("inspect", container))
    return dict(found)


def workers(compose: Compose) -> set[str]:
    """Ids of the project's running workers."""
    return set(compose.containers(WORKER))


def is_serving(container: str) -> bool:
    try:
        return metrics_of(container).get("quire:worker_generation_tokens_total", 0.0) > 0
    except AssertionError:  # it has only just been started
        return False


def bring_second_worker(compose: Compose) -> tuple[str, str]:
    """Load until a second one serves: the first and the second."""
    (first,) = workers(compose)
    while True:
        check_complete(asyncio.run(stream_all(BURST)), 300)
        second = "".join(workers(compose) - {first})
        if second and is_serving(second):
            return first, second


def kill_inside(container: str) -> None:
    """kill -9 of the service in `container`, as a crash would be: Docker starts it again."""
    code = """if True:
        import os, signal
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if open(f"/proc/{pid}/cmdline").read().split("\\0")[1:3] == ["-m", "autoscaler"]:
                os.kill(int(pid), signal.SIGKILL)
    """
    docker("exec", container, "python", "-c", code)


def test_load_brings_a_worker_like_the_first(compose: Compose, strangers: dict[str, str]) -> None:
    """A burst should start exactly one more container, that serves, is healthy, and differs from the first in nothing
    but its name and number; compose should see it."""
    first, second = bring_second_worker(compose)
    assert workers(compose) == {first, second}
    wait_until(lambda: inspect(second)["State"]["Health"]["Status"] == "healthy", description="health", timeout_s=60)
    old, new = inspect(first), inspect(second)
    assert (old["Name"], new["Name"]) == ("/quire-gpu_worker-1", "/quire-gpu_worker-2")
    assert new["HostConfig"] == old["HostConfig"]
    assert new["Image"] == old["Image"]
    for name in ("Env", "Cmd", "User", "Healthcheck", "StopTimeout"):
        assert new["Config"][name] == old["Config"][name], name
    assert new["Config"]["StopTimeout"] == 60
    assert list(new["NetworkSettings"]["Networks"]) == list(old["NetworkSettings"]["Networks"]) == ["quire_cell"]
    number = "com.docker.compose.container-number"
    ours = {**old["Config"]["Labels"], number: "2", "quire.autoscaled": "1"}
    assert new["Config"]["Labels"] == ours


def test_only_the_autoscaler_has_the_socket(compose: Compose) -> None:
    """No other container should see Docker's socket, and the autoscaler have no capability beside it."""
    holders = set()
    for container in compose.containers():
        detail = inspect(container)
        if any("docker.sock" in mount["Destination"] for mount in detail["Mounts"]):
            holders.add(detail["Config"]["Labels"]["com.docker.compose.service"])
            assert detail["HostConfig"]["CapDrop"] == ["ALL"]
            assert detail["HostConfig"]["ReadonlyRootfs"]
    assert holders == {AUTOSCALER}


def test_idle_workers_leave_without_a_seam(compose: Compose, strangers: dict[str, str]) -> None:
    """While two long streams run, one on each of two workers, one should drain and go: both texts equal those of an
    undisturbed run, also when an autoscaler dies meanwhile."""
    wait_until(lambda: len(workers(compose)) == 1, description="one worker", timeout_s=120)
    undisturbed = asyncio.run(stream_all(LONG))
    check_complete(undisturbed, 3500)
    bring_second_worker(compose)
    (scheduler,) = compose.containers("scheduler_svc")
    dispatches = "quire:scheduler_dispatches_total"
    before = metrics_of(scheduler)[dispatches]
    records = [StreamRecord() for _ in LONG]

    async def crash_meanwhile() -> None:
        streams = asyncio.create_task(stream_all(LONG, records))
        await asyncio.to_thread(wait_until, lambda: all(r.num_events for r in records), description="tokens")
        await asyncio.to_thread(kill_inside, compose.containers(AUTOSCALER)[0])
        await streams

    asyncio.run(crash_meanwhile())
    assert [record.outcome() for record in records] == [record.outcome() for record in undisturbed]
    wait_until(lambda: len(workers(compose)) == 1, description="one worker again", timeout_s=120)
    num_dispatches = metrics_of(scheduler)[dispatches] - before
    assert num_dispatches > len(LONG), "nothing had to move: the test proves nothing"
    assert metrics_of(scheduler)["quire:wanted_workers"] == 1
    wait_until(lambda: len(compose.containers(AUTOSCALER)) == 2, description="both autoscalers", timeout_s=60)


def test_what_a_dead_autoscaler_left_is_finished(compose: Compose) -> None:
    """A copy that was never started should be started, and one that has ended be removed; then one too many go."""
    left = ("--label", "com.docker.compose.project=quire", "--label", f"com.docker.compose.service={WORKER}",
            "--label", "com.docker.compose.oneoff=False", "--label", "quire.autoscaled=1")  # fmt: skip
    number = "--label=com.docker.compose.container-number"
    ended = docker("run", "--detach", *left, f"{number}=7", "quire-worker", "true").strip()
    made = docker("create", *left, f"{number}=8", "quire-worker", "true").strip()

    def are_gone() -> bool:
        return not {ended, made} & set(docker("ps", "--all", "--quiet", "--no-trunc").split())

    wait_until(are_gone, description="both are removed", timeout_s=60)


def test_down_leaves_nothing(compose: Compose, strangers: dict[str, str]) -> None:
    """`down --volumes` should take what the autoscaler started along."""
    bring_second_worker(compose)
    compose("down", "--volumes")
    own = ("--filter", "label=com.docker.compose.project=quire", "--quiet", "--no-trunc")
    assert docker("ps", "--all", *own).split() == [strangers["another service"]]
    assert docker("network", "ls", *own) == ""

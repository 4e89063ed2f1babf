"""A whole cell on this machine with a mock worker: private Redis, scheduler, gateways, each a process of its own."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from quire import launcher, services
from quire.bench import cpu_time
from quire.bench.mock_worker import MODEL_NAME
from quire.embedded_redis import EmbeddedRedis
from quire.supervisor import ChildSpec
from shared.config import HttpConfig, ModelConfig, ProcessConfig, ServeConfig, child_environment
from shared.errors import QuireError

START_S = 60.0
STOP_S = 10.0
POLL_S = 0.05

CpuTimes = dict[str, float]
"""CPU seconds by part: `gateway` (all of them), `scheduler`, `worker loop`, `worker engine` (its thread), `redis`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """`folder`: an empty one for data and logs. `model`: a model folder, of which only the text side is used.
    `is_kept`: see `EmbeddedRedis`."""

    folder: Path
    model: Path
    num_gateways: int
    step_ms: float
    is_kept: bool = False


class MockCell:
    """Runs while it is entered.

    Raises:
        ConfigError: there is no Redis server.
        QuireError: a service ended, or the cell was not ready in time; the logs are in the plan's folder.
    """

    def __init__(self, plan: CellPlan) -> None:
        self._plan = plan
        self._redis = EmbeddedRedis(plan.folder / "redis", is_kept=plan.is_kept)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: list[int] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self._stop)
            self._redis.start()
            self.ports = launcher.choose_ports("127.0.0.1", 0, self._plan.num_gateways)
            for spec in self._specs():
                self._start(spec)
            self._wait_ready()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def cpu(self) -> CpuTimes:
        """CPU seconds that each part has used so far."""
        worker, redis = self._processes["worker"].pid, self._redis.pid
        assert redis is not None
        return {
            "gateway": sum(self.gateway_cpu()),
            "scheduler": cpu_time.process_cpu_s(self._processes["scheduler"].pid),
            "worker loop": cpu_time.main_thread_cpu_s(worker),
            "worker engine": cpu_time.other_threads_cpu_s(worker),
            "redis": cpu_time.process_cpu_s(redis),
        }

    def gateway_cpu(self) -> list[float]:
        """CPU seconds of each gateway."""
        return [cpu_time.process_cpu_s(p.pid) for name, p in self._processes.items() if name.startswith("gateway")]

    def _specs(self) -> list[ChildSpec]:
        config = ServeConfig(
            model=ModelConfig(model=str(self._plan.model), served_model_name=(MODEL_NAME,)),
            http=HttpConfig(host="127.0.0.1"),
            process=ProcessConfig(die_with_parent=True),
        )
        scheduler = services.scheduler_spec(config, self._redis.url)
        gateways = [
            services.gateway_spec(config, self._redis.url, index, port) for index, port in enumerate(self.ports)
        ]
        return [scheduler, self._worker_spec(scheduler), *gateways]

    def _worker_spec(self, scheduler: ChildSpec) -> ChildSpec:
        """As the scheduler is run, but for the module."""
        python = scheduler.argv[: scheduler.argv.index("-m")]
        flags = (f"--step-ms={self._plan.step_ms}", "--die-with-parent")
        argv = (*python, "-m", "quire.bench.mock_worker", *flags)
        return ChildSpec(name="worker", argv=argv, environment=scheduler.environment)

    def _start(self, spec: ChildSpec) -> None:
        environment: Mapping[str, str] = child_environment({}) | dict(spec.environment)
        with open(self._plan.folder / f"{spec.name}.log", "ab") as log:
            self._processes[spec.name] = subprocess.Popen(
                spec.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not all(map(_is_ready, self.ports)):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    log = (self._plan.folder / f"{name}.log").read_text(errors="replace").splitlines()
                    raise QuireError(f"{name} ended at its start: {' '.join(log[-1:])}")
            if time.monotonic() > deadline:
                raise QuireError(f"the cell was not ready in {START_S:g} s")
            time.sleep(POLL_S)

    def _stop(self) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._redis.stop()


def _is_ready(port: int) -> bool:
    try:
        with _opener.open(f"http://127.0.0.1:{port}/ready", timeout=1) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

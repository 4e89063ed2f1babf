"""`quire serve`: a whole cell on this machine, from "which model" to the last child's end.

The story is `_Cell.run`: find the model, start Redis, scheduler, workers and gateways as child processes, wait until
every gateway can produce tokens, print one line, keep all of them running, stop them in the order in which nothing is
lost: gateways first (no new work), then workers (they hand back what they hold), scheduler, Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from quire import __version__, services
from quire.embedded_redis import EmbeddedRedis
from quire.models import for_gateways, resolve_models
from quire.private_folder import private_folder
from quire.supervisor import STOP_MARGIN_S, ChildSpec, Signals, StartFailed, Supervisor
from quire.worker_scaling import WorkerScaling
from shared import config as settings
from shared.config import ModelConfig, ServeConfig
from shared.errors import BusError, ConfigError, shorten
from shared.paths import cache_folder, expand
from shared.process import die_with_parent
from shared.redis_bus import open_bus
from shared.worker_wish import WorkerLimits

READY_CHECK_S = 0.2
REDIS_CHECK_S = 0.01
READY_TIMEOUT_S = 1.0
STILL_WAITING_S = 15.0
NO_DRAIN_S = 2.0
"""Instead of both for workers whose requests nobody can come for: the gateways are gone, and so will their Redis be."""

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Never through a proxy that the environment names: the gateways are on this machine."""


def main(argv: list[str]) -> int:
    """Run `quire serve ARGV` until it is stopped; the exit code. Raises `ConfigError`."""
    config = settings.load(ServeConfig, argv, program="quire serve", description="Serve a model on this machine.")
    if config.process.die_with_parent:
        die_with_parent(config.parent_pid)
    return serve(config)


def serve(config: ServeConfig) -> int:
    """Serve until a stop signal: 0 then, also during the start; 1 or 2 when a service cannot start."""
    say(f"version {__version__}")
    limits = scaling_limits(config)
    config = config if limits is None else replace(config, workers=limits.low)
    ports = choose_ports(config.http.host, config.http.port, config.gateways)
    refuse_shared_ports(config, ports)
    models = resolve_models(config, cache_folder(config.engine.cache_dir), say)
    config = replace(config, model=models[0])
    with Signals() as signals, contextlib.ExitStack() as cleanup:
        cell = _Cell(config, models, ports, signals=signals, cleanup=cleanup)
        try:
            return cell.run()
        except StartFailed as error:
            print(f"quire: error: {error}", file=sys.stderr)
            return error.exit_code


def scaling_limits(config: ServeConfig) -> WorkerLimits | None:
    """How few and how many workers there may be; None: as many as are started. Raises `ConfigError`."""
    limits = config.scaling.limits()
    if limits is None:
        return None
    if config.workers != ServeConfig().workers:
        raise ConfigError(f"--workers={config.workers} together with --autoscale={config.scaling.autoscale}: how many "
                          "there are follows from the work then; leave --workers out")  # fmt: skip
    if limits.high > settings.MAX_WORKERS_HERE:
        raise ConfigError(f"--autoscale={config.scaling.autoscale}: at most {settings.MAX_WORKERS_HERE} workers run on "
                          "one machine")  # fmt: skip
    return limits


def say(line: str) -> None:
    """One line for the person at the terminal."""
    print(f"quire: {line}", flush=True)


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """`first`, `first` + 1, ... when they are free; any free ones for 0.

    Raises:
        ConfigError: one is taken, or the address is none of this machine's.
    """
    if first + count - 1 > 65535:
        raise ConfigError(f"--port={first}: {count} gateways would need ports beyond 65535")
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for index in range(count):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = held.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            wanted = first + index if first else 0
            try:
                listener.bind((host, wanted))
                listener.listen()  # two sockets with SO_REUSEADDR may both bind; only one may listen
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"--host={shorten(host)} --port={wanted}: {_why_not_listening(error)}") from None
            ports.append(listener.getsockname()[1])
    return ports


def refuse_shared_ports(config: ServeConfig, ports: Sequence[int]) -> None:
    """Raise `ConfigError` when scheduler and workers would serve their metrics on the gateways' ports."""
    first = config.process.metrics_port
    metrics = range(first, first + 1 + services.most_workers(config)) if first else range(0)
    if shared := sorted(set(ports) & set(metrics)):
        raise ConfigError(f"--metrics-port={first}: scheduler and workers would take {first} to {metrics[-1]}, and a "
                          f"gateway listens on {shared[0]}; choose another")  # fmt: skip


def _why_not_listening(error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "in use by another program; choose another port (0: any free one)"
    return str(getattr(error, "strerror", None) or error)


def stop_order(names: Sequence[str], config: ServeConfig) -> list[tuple[list[str], float]]:
    """Children in the order they are stopped, kind by kind, each kind with its seconds to end."""
    drain_s = config.process.drain_s + STOP_MARGIN_S
    worker_s = drain_s if config.process.redis_url else NO_DRAIN_S
    graces = {"gateway": drain_s, "worker": worker_s, "scheduler": STOP_MARGIN_S, "redis": STOP_MARGIN_S}
    return [([name for name in names if name.startswith(kind)], grace) for kind, grace in graces.items()]


class _Cell:
    """One run of the launcher. `config` has the first of `models`."""

    def __init__(
        self,
        config: ServeConfig,
        models: list[ModelConfig],
        ports: list[int],
        *,
        signals: Signals,
        cleanup: contextlib.ExitStack,
    ) -> None:
        self._config = config
        self._models = models
        self._ports = ports
        self._signals = signals
        self._cleanup = cleanup
        self._supervisor = Supervisor(signals, say, self._write_state)
        self._supervisor.gives_up = config.parent_pid is not None
        self._redis_url = config.process.redis_url
        self._scaling: WorkerScaling | None = None
        self._is_ready = False

    def run(self) -> int:
        try:
            self._start()
            if self._wait_ready():
                self._is_ready = self._supervisor.is_settled = True
                self._write_state()
                self._announce()
                self._scaling = self._make_scaling()
            while not self._signals.num_stops:
                self._supervisor.wait(None if self._scaling is None else self._scaling.wait_s())
                if self._scaling is not None and not self._signals.num_stops:
                    self._scaling.look()
            drain_s = self._config.process.drain_s
            say(f"stopping: open streams have {drain_s:g} s to end; Ctrl-C again stops at once")
        finally:
            self._stop()
        say("stopped")
        return 0

    def _start(self) -> None:
        config = self._config
        if self._redis_url:
            self._wait_for_redis()
        else:
            self._redis_url = self._start_redis()
        if self._signals.num_stops:
            return
        self._supervisor.start(services.scheduler_spec(config, self._redis_url))
        for index in range(config.workers * len(self._models)):
            model = self._models[index // config.workers]
            self._supervisor.start(services.worker_spec(replace(config, model=model), self._redis_url, index))
        told = replace(config, model=for_gateways(self._models))
        for index, port in enumerate(self._ports):
            self._supervisor.start(services.gateway_spec(told, self._redis_url, index, port))
        size, threads = config.engine.tensor_parallel_size, config.engine.num_threads
        ranks = f"{'' if size == 1 else f'{size} ranks of '}{threads or services.threads_per_rank(config)} thread(s)"
        what = "the model" if len(self._models) == 1 else f"each of {len(self._models)} models"
        say(f"started {config.gateways} gateway(s), 1 scheduler, {config.workers} worker(s) of {ranks} for {what}; "
            "loading (seconds for a small one)")  # fmt: skip

    def _make_scaling(self) -> WorkerScaling | None:
        limits = self._config.scaling.limits()
        if limits is None:
            return None
        say(f"{limits.low} to {limits.high} workers, as the work needs them")
        return WorkerScaling(self._config, limits, self._redis_url, self._supervisor, say)

    def _wait_for_redis(self) -> None:
        """Until the Redis that was named answers, or a stop. Without this every service would tell that it waits."""
        told_at = float("-inf")
        while not self._signals.num_stops:
            problem = asyncio.run(_ask_redis(self._redis_url))
            if problem is None:
                return
            if time.monotonic() - told_at > STILL_WAITING_S:
                told_at = time.monotonic()
                say(f"waiting for the Redis at {shorten(without_password(self._redis_url))}: {shorten(problem)}")
            self._supervisor.wait(READY_CHECK_S)

    def _start_redis(self) -> str:
        """The address of a private Redis, which is supervised as every other child is."""
        if self._config.data_dir:
            folder = expand("--data-dir", self._config.data_dir).absolute()
        else:
            folder = self._cleanup.enter_context(private_folder(say))
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"--data-dir={shorten(folder)}: {error.strerror or error}") from None
        log = folder / "redis.log"
        redis = EmbeddedRedis(folder, ("--logfile", str(log)), is_kept=bool(self._config.data_dir))
        redis.refuse_second()
        self._supervisor.start(
            ChildSpec(name="redis", argv=tuple(redis.command()), environment=settings.child_environment({}))
        )
        try:
            while not redis.answers() and not self._signals.num_stops:
                self._supervisor.wait(REDIS_CHECK_S)
        except StartFailed as error:
            last = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
            raise StartFailed(f"redis cannot start: {' '.join(last)}", 1) from error
        return redis.url

    def _wait_ready(self) -> bool:
        """Until each gateway is ready: True; False when told to stop before."""
        waiting, told_at = list(self._ports), time.monotonic()
        while waiting and not self._signals.num_stops:
            if _is_ready(self._url(waiting[0])):
                waiting.pop(0)
                continue
            self._supervisor.wait(READY_CHECK_S)
            if time.monotonic() - told_at > STILL_WAITING_S:
                told_at = time.monotonic()
                say("still loading")
        return not waiting

    def _stop(self) -> None:
        self._supervisor.stop(stop_order(self._supervisor.names(), self._config))

    def _url(self, port: int) -> str:
        return reachable_url(self._config.http.host, port)

    def _announce(self) -> None:
        config = self._config
        ports = ", ".join(map(str, self._ports))
        shown = [model.model if len(self._models) == 1 else model.served_model_name[0] for model in self._models]
        say(f"ready on port {ports}; model {', '.join(shown)}; Redis {without_password(self._redis_url)}")
        body = {
            "model": config.model.served_model_name[0],
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "stream": True,
        }
        key = "-H 'Authorization: Bearer YOUR_KEY' " if config.http.api_key else ""
        print(
            f"\n  curl -N {self._url(self._ports[0])}/v1/chat/completions {key}"
            f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n",
            flush=True,
        )

    def _write_state(self) -> None:
        if not self._config.state_file:
            return
        state = {
            "launcher": os.getpid(),
            "pids": self._supervisor.pids(),
            "ports": self._ports,
            "urls": [self._url(port) for port in self._ports],
            "redis_url": self._redis_url,
            "model": self._config.model.model,
            "is_ready": self._is_ready,
        }
        path = Path(self._config.state_file)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(path)


async def _ask_redis(url: str) -> BusError | None:
    """Why the Redis at `url` cannot be used now; None when it can."""
    bus = open_bus(url)
    try:
        await bus.ping()
    except BusError as error:
        return error
    finally:
        await bus.close()
    return None


def _is_ready(url: str) -> bool:
    try:
        with _opener.open(f"{url}/ready", timeout=READY_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def reachable_url(host: str, port: int) -> str:
    """Where something that listens on `host` can be reached from this machine."""
    reachable = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def without_password(url: str) -> str:
    """`url` as it may be shown."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + rest.rpartition("@")[2]

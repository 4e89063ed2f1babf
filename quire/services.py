"""How each service of a cell is run: its command line and environment, made from the launcher's settings.

What is secret (API keys, a Redis address with its password) goes by environment, since everybody may read command
lines; all else goes by flags, so that `ps` shows how a service runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from quire.supervisor import ChildSpec
from shared import flags
from shared.config import GatewayConfig, ProcessConfig, SchedulerConfig, ServeConfig, WorkerConfig, child_environment
from shared.errors import ConfigError

# Threads of OpenMP that wait turn this often (about 0.1 ms) and then sleep. Its own default turns for milliseconds,
# which takes the core from the gateway and the next worker; none at all makes every operator of a step pay a wake-up.
# A decode step of SmolLM2-135M, bf16, 2 threads on 2 idle cores (Zen 4), at 1 and 8 rows, in ms: 1,000 turns 29 · 47,
# 10,000 26 · 34, 100,000 24 · 33, the default 23 · 33, OMP_WAIT_POLICY=PASSIVE 36 · 49; one thread 30 · 51.
SPIN_TURNS = 10_000


def scheduler_spec(config: ServeConfig, redis_url: str) -> ChildSpec:
    """The one scheduler."""
    service = SchedulerConfig(
        process=_process(config, redis_url, 0),
        scheduling=config.scheduling,
        scaling=config.scaling,
        orphan_ttl_s=config.http.orphan_ttl_s,
    )
    return _spec("scheduler", "scheduler_svc", service, num_threads=1)


def worker_spec(config: ServeConfig, redis_url: str, index: int) -> ChildSpec:
    """Worker `index`, with its share of the memory, and of the cores for each of its ranks."""
    num_threads = config.engine.num_threads or threads_per_rank(config)
    service = WorkerConfig(
        process=_process(config, redis_url, 1 + index),
        model=config.model,
        engine=replace(config.engine, num_threads=num_threads, memory_shares=most_workers(config)),
    )
    return _spec(worker_name(index), "gpu_worker", service, num_threads=num_threads)


def gateway_spec(config: ServeConfig, redis_url: str, index: int, port: int) -> ChildSpec:
    """Gateway `index` on `port`."""
    process = replace(_process(config, redis_url, 0), metrics_port=None)
    service = GatewayConfig(process=process, model=config.model, http=replace(config.http, port=port), door=config.door)
    return _spec(f"gateway-{index}", "gateway", service, num_threads=1)


def most_workers(config: ServeConfig) -> int:
    """How many workers may run at the same time, of all models."""
    limits = config.scaling.limits()
    return config.workers * (1 + len(config.more_models)) if limits is None else limits.high


def worker_name(index: int) -> str:
    """What worker `index` is called among the launcher's children."""
    return f"worker-{index}"


def threads_per_rank(config: ServeConfig) -> int:
    """This process' cores divided among all ranks of the workers of the machine, at least one each."""
    return max(1, len(os.sched_getaffinity(0)) // (most_workers(config) * config.engine.tensor_parallel_size))


def _process(config: ServeConfig, redis_url: str, metrics_offset: int) -> ProcessConfig:
    port = config.process.metrics_port
    counted = port + metrics_offset if port else port
    return replace(config.process, redis_url=redis_url, metrics_port=counted)


def _spec(name: str, module: str, service: object, *, num_threads: int) -> ChildSpec:
    public, secrets = _split_secrets(service)
    compute = {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "GOMP_SPINCOUNT": str(SPIN_TURNS),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return ChildSpec(
        name=name,
        # -P: a folder in the current directory must not be taken for a package of ours
        argv=(sys.executable, "-P", "-m", module, *flags.to_argv(public)),
        environment=child_environment(compute | secrets),
    )


def _split_secrets(service: object) -> tuple[object, dict[str, str]]:
    """`service` without what is secret, and that as environment variables."""
    environment: dict[str, str] = {}
    if isinstance(service, GatewayConfig) and service.http.api_key:
        if any("," in key for key in service.http.api_key):
            raise ConfigError("--api-key: a key cannot hold a comma")
        environment[flags.variable("api_key")] = ",".join(service.http.api_key)
        service = replace(service, http=replace(service.http, api_key=()))
    if isinstance(service, GatewayConfig) and service.http.admin_key:
        environment[flags.variable("admin_key")] = service.http.admin_key
        service = replace(service, http=replace(service.http, admin_key=""))
    if isinstance(service, GatewayConfig | SchedulerConfig | WorkerConfig):
        environment[flags.variable("redis_url")] = service.process.redis_url
        service = replace(service, process=replace(service.process, redis_url=""))
    return service, environment

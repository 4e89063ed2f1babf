"""Children's command lines: what the launcher was told is what each service reads."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

import pytest

from quire import services
from quire.supervisor import ChildSpec
from shared import flags
from shared.config import (
    DoorConfig,
    EngineConfig,
    GatewayConfig,
    HttpConfig,
    ModelConfig,
    ProcessConfig,
    SchedulerConfig,
    SchedulingConfig,
    ServeConfig,
    WorkerConfig,
)
from shared.errors import ConfigError

C = TypeVar("C")
REDIS = "redis://:secret@127.0.0.1:1/0"


def make_config(**changes: object) -> ServeConfig:
    config = ServeConfig(
        process=ProcessConfig(log_level="debug", drain_s=2.5, metrics_port=9100),
        model=ModelConfig(model="/some folder/m", served_model_name=("a", "b"), max_model_len=77, dtype="float32"),
        http=HttpConfig(host="0.0.0.0", api_key=("key-1", "key-2"), sse_keep_alive_s=0.5, orphan_ttl_s=3.5),
        engine=EngineConfig(block_size=8, kv_cache_memory_bytes=12345, max_num_seqs=3, enforce_eager=True),
        door=DoorConfig(max_num_queued_reqs=5, tenant_limits=("anyone:rpm=3", "0" * 16 + ":tpm=9")),
        workers=2,
        scheduling=SchedulingConfig(max_crashes=4, worker_stall_s=9.0, max_preemptions=5, admission_headroom=7),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def read_back(spec: ChildSpec, config_class: type[C]) -> C:
    """What the service makes of its command line (behind `-m MODULE`) and environment."""
    environment = {name: value for name, value in spec.environment.items() if name.startswith("QUIRE_")}
    return flags.parse(config_class, spec.argv[spec.argv.index("-m") + 2 :], environment, program="test")


def test_worker_reads_what_the_launcher_was_told() -> None:
    """Process, model and engine settings should arrive whole; metrics ports count up; cores are divided."""
    config = make_config()
    read = read_back(services.worker_spec(config, REDIS, 1), WorkerConfig)
    process = replace(config.process, redis_url=REDIS, metrics_port=9102)
    engine = replace(config.engine, num_threads=services.threads_per_rank(config), memory_shares=2)
    assert read == WorkerConfig(process=process, model=config.model, engine=engine)


def test_gateway_reads_what_the_launcher_was_told() -> None:
    """Process, model and HTTP settings should arrive whole, the port its own."""
    config = make_config()
    read = read_back(services.gateway_spec(config, REDIS, 0, 4321), GatewayConfig)
    process = replace(config.process, redis_url=REDIS, metrics_port=None)
    assert read == GatewayConfig(process=process, model=config.model, http=replace(config.http, port=4321),
                                 door=config.door)  # fmt: skip


def test_scheduler_reads_what_the_launcher_was_told() -> None:
    """The policy's settings should arrive whole."""
    config = make_config()
    read = read_back(services.scheduler_spec(config, REDIS), SchedulerConfig)
    process = replace(config.process, redis_url=REDIS)
    scheduling = SchedulingConfig(max_crashes=4, worker_stall_s=9.0, max_preemptions=5, admission_headroom=7)
    assert read == SchedulerConfig(process=process, orphan_ttl_s=3.5, scheduling=scheduling)


def test_secrets_are_not_on_command_lines() -> None:
    """API keys and the Redis password should travel by environment, since anybody may list processes."""
    config = make_config()
    specs = [
        services.scheduler_spec(config, REDIS),
        services.worker_spec(config, REDIS, 0),
        services.gateway_spec(config, REDIS, 0, 1),
    ]
    shown = " ".join(argument for spec in specs for argument in spec.argv)
    assert "secret" not in shown
    assert "key-1" not in shown


def test_key_with_a_comma_is_refused() -> None:
    """Keys travel as a list with commas, so one that holds a comma should be refused, not cut in two."""
    config = make_config(http=HttpConfig(api_key=("a,b",)))
    with pytest.raises(ConfigError, match="comma"):
        services.gateway_spec(config, REDIS, 0, 1)


def test_variables_of_the_launcher_do_not_reach_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag set back to its default should win over the launcher's variable in the children too."""
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "5")
    spec = services.worker_spec(make_config(engine=EngineConfig()), REDIS, 0)
    assert read_back(spec, WorkerConfig).engine.max_num_seqs == EngineConfig().max_num_seqs


def test_compute_threads_are_set_once_for_all_libraries() -> None:
    """Each worker's libraries should use its share of the cores, and wait without spinning for long."""
    environment = services.worker_spec(make_config(engine=EngineConfig(num_threads=3)), REDIS, 0).environment
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "3")
    assert int(environment["GOMP_SPINCOUNT"]) <= 100_000
    cores = len(os.sched_getaffinity(0))
    assert services.threads_per_rank(make_config(workers=1)) == cores
    assert services.threads_per_rank(make_config(workers=1000)) == 1
    two_ranks = make_config(workers=1, engine=EngineConfig(tensor_parallel_size=2))
    assert services.threads_per_rank(two_ranks) == max(1, cores // 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_cores_and_memory_are_divided_among_the_workers_of_all_models(num_ranks: int) -> None:
    """With two models each worker should get the share of one of all workers, which its ranks divide."""
    config = make_config(more_models=("/m/other",), engine=EngineConfig(tensor_parallel_size=num_ranks))
    read = read_back(services.worker_spec(config, REDIS, 3), WorkerConfig)
    assert (read.engine.memory_shares, read.engine.num_threads) == (4, services.threads_per_rank(config))
    assert read.engine.num_threads == max(1, len(os.sched_getaffinity(0)) // (4 * num_ranks))
    assert read.process.metrics_port == 9104


def test_an_admin_key_goes_by_environment() -> None:
    """It should arrive, and not stand on a command line."""
    config = make_config(http=HttpConfig(enable_lora_updates=True, admin_key="root-key"))
    spec = services.gateway_spec(config, REDIS, 0, 4321)
    assert not any("root-key" in argument for argument in spec.argv)
    assert read_back(spec, GatewayConfig).http.admin_key == "root-key"

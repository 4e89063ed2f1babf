"""All settings, and the only place that reads the environment.

`shared/flags.py` says how a field becomes a flag and a variable. Groups are shared between services; each service has
one config class. Names are vLLM's where vLLM has the setting.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from shared import flags
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.speculation import SpeculationConfig, parse_speculative_config

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """All services."""

    redis_url: str = setting(
        "", "Redis to use: redis://[:password@]host:port/db or unix:///path; none: `quire serve` starts a private one"
    )
    log_level: str = setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    metrics_port: int | None = setting(None, "port for /metrics of scheduler and worker (the launcher counts up "
                                       "from it: scheduler, workers); none: not served", minimum=0,
                                       maximum=65535)  # fmt: skip
    metrics_host: str = setting("127.0.0.1", "address of the scheduler's and workers' /metrics")
    die_with_parent: bool = setting(False, "end when the parent process does, however it ends", is_hidden=True)
    failpoints: str = setting("", "arm failpoints, for fault tests: name=action[@n];...", is_hidden=True)
    worker_lease_s: float = setting(3.0, "a worker whose counter stands still this long is lost", minimum=0.2)
    leader_lease_s: float = setting(1.5, "a scheduler whose counter stands still this long is replaced", minimum=0.2)
    drain_s: float = setting(30.0, "on SIGTERM, seconds to finish work before handing it over", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model."""

    model: str = setting("", "folder with config.json, tokenizer.json and *.safetensors; none: `quire serve` makes "
                         "SmolLM2-135M-Instruct", is_positional=True)  # fmt: skip
    served_model_name: tuple[str, ...] = setting((), "name(s) clients may use; default: the folder's name")
    max_model_len: int | None = setting(None, "most tokens of prompt and output together; default: the model's",
                                        minimum=1)  # fmt: skip
    dtype: str = setting("auto", "of weights and KV; auto: the checkpoint's", choices=(
        "auto", "float32", "bfloat16", "float16"))  # fmt: skip
    quantization: str = setting("none", "quantize a float checkpoint at load, activations to int8 (CPU only); "
                                "int4 keeps an int8 output projection", choices=("none", "int8", "int4"))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The gateways."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "first port; gateway i listens on port + i (0: any free one)", minimum=0, maximum=65535)
    api_key: tuple[str, ...] = setting((), "key(s) that clients must send as a bearer token; none: open")
    max_body_bytes: int = setting(16 * 1024 * 1024, "largest request body", minimum=1024)
    body_timeout_s: float = setting(30.0, "how long a client may take to send its body", minimum=0.1)
    request_timeout_s: float = setting(600.0, "deadline of a request", minimum=1)
    orphan_ttl_s: float = setting(30.0, "how long a request runs on when nobody listens any more", minimum=0)
    record_ttl_s: float = setting(600.0, "how long an ended stream can still be read", minimum=1)
    sse_keep_alive_s: float = setting(0.0, "open streams early and send comments this often; 0: off", minimum=0)
    tokenizer_threads: int = setting(2, "threads that tokenize prompts", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The workers."""

    device: str = setting("auto", "where to compute; auto: CUDA if there is one", choices=("auto", "cpu", "cuda"))
    cpu_kernels: str = setting("auto", "compute on a CPU with the C kernels: auto (where compiler and processor allow "
                               "it), on, or off (torch)", choices=("auto", "on", "off"))  # fmt: skip
    cpu_isa: str = setting("auto", "instruction set of the C kernels: the greatest there is of amx, avx512, avx2; "
                         "tokens may differ between them", choices=("auto", "amx", "avx512", "avx2"))  # fmt: skip
    cache_dir: str = setting("", "folder for converted models, packed weights and compiled kernels; default: "
                             "~/.cache/quire")  # fmt: skip
    block_size: int = setting(16, "tokens in a KV block", minimum=1, maximum=256)
    kv_cache_memory_bytes: int | None = setting(
        None, "KV cache size; default on CPU: a quarter of free memory, at most 4 GiB", minimum=1)  # fmt: skip
    gpu_memory_utilization: float = setting(0.9, "share of GPU memory for weights and KV", minimum=0.05, maximum=1.0)
    max_num_seqs: int = setting(128, "most sequences in one step", minimum=1, maximum=4096)
    max_num_batched_tokens: int = setting(512, "most tokens in one step; prompts are cut to fit", minimum=1)
    max_step_ms: float = setting(150.0, "a step beside running streams takes only what fits in this time of prompts",
                                 minimum=1)  # fmt: skip
    num_threads: int | None = setting(None, "compute threads; default: all cores, the launcher divides them", minimum=1,
                                      maximum=1024)  # fmt: skip
    seed: int = setting(0, "unused by sampling (requests carry their own); kept for vLLM's command lines", minimum=0)
    enforce_eager: bool = setting(False, "no CUDA graphs for decode steps")
    enable_prefix_caching: bool = setting(False, "reuse KV of equal prompt prefixes (not available yet)")
    speculative_config: str = setting("", "try several tokens in a step where the text repeats itself, as vLLM's JSON: "
                                      """'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, """
                                      """"prompt_lookup_min": 2}'; none: one at a time""")  # fmt: skip

    def speculation(self) -> SpeculationConfig | None:
        """What `speculative_config` says; None: off. Raises `ConfigError`."""
        return parse_speculative_config(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The scheduler."""

    max_crashes: int = setting(3, "deaths of workers in a row that a request may cause", minimum=1)
    worker_stall_s: float = setting(60.0, "a worker with work that makes no step this long is lost", minimum=1)
    max_preemptions: int = setting(8, "a request preempted this often is not preempted again", minimum=1)
    admission_headroom: int | None = setting(
        None, "tokens of growth kept free for each sequence at admission; default: what the forecast says", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    orphan_ttl_s: float = setting(30.0, "how long a request runs on when its gateway died", minimum=0)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The launcher: everything, and how many of each."""

    workers: int = setting(1, "workers to start", minimum=1, maximum=64)
    gateways: int = setting(1, "gateways to start, on ports P, P+1, ...", minimum=1, maximum=64)
    data_dir: str = setting("", "folder for the private Redis' data, kept; default: a new one, removed at exit")
    state_file: str = setting("", "write process ids, ports and the Redis address here as JSON", is_hidden=True)
    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


def load(config_class: type[C], argv: list[str], *, program: str, description: str = "") -> C:
    """A config from the command line and this process' environment.

    Raises:
        ConfigError: an unknown name or a bad value; or a setting that exists for later.
    """
    known = frozenset(flags.variable(name) for name in flags.names(ServeConfig))
    config = flags.parse(config_class, argv, dict(os.environ), program=program, description=description,
                         known_variables=known)  # fmt: skip
    _check_engine(config)
    return config


@contextmanager
def refuse_long_paths() -> Iterator[None]:
    """Within the block a path that no file system takes, wherever it is found out, is a `ConfigError`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(f"{shorten(error.filename)}: {error.strerror}") from None


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """This process' environment for a child: without `QUIRE_` settings (it gets its own), plus `additions`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(flags.ENV_PREFIX)}
    return kept | dict(additions)


def _check_engine(config: object) -> None:
    engine = getattr(config, "engine", None)
    if not isinstance(engine, EngineConfig):
        return
    if engine.enable_prefix_caching:
        raise ConfigError("--enable-prefix-caching: not available in this version; leave it out")
    engine.speculation()

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
from pathlib import Path
from typing import TypeVar

from shared import flags
from shared.adapters import parse_lora_modules
from shared.errors import ConfigError, shorten
from shared.flags import setting
from shared.limits import MAX_LIMIT, TenantLimits, parse_tenant_limits
from shared.model_files import ModelFiles
from shared.paths import expand
from shared.preemption import PREEMPTION_MODES
from shared.speculation import SpeculationConfig, parse_speculative_config
from shared.tenant_weights import parse_tenant_weights
from shared.worker_wish import WorkerLimits, parse_autoscale

C = TypeVar("C")
MAX_WORKERS_HERE = 64
"""The most workers that one launcher starts."""
A_YEAR_S = 365 * 86_400
"""The most that a duration may be: beyond, clocks and calendars overflow."""


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
    metrics_host: str = setting("127.0.0.1", "address of the scheduler's and workers' /metrics", may_be_empty=False)
    die_with_parent: bool = setting(False, "end when the parent process does, however it ends", is_hidden=True)
    failpoints: str = setting("", "arm failpoints, for fault tests: name=action[@n];...", is_hidden=True)
    worker_lease_s: float = setting(3.0, "a worker whose counter stands still this long is lost", minimum=0.2,
                                    maximum=A_YEAR_S)  # fmt: skip
    leader_lease_s: float = setting(1.5, "a scheduler whose counter stands still this long is replaced", minimum=0.2,
                                    maximum=A_YEAR_S)  # fmt: skip
    drain_s: float = setting(30.0, "on SIGTERM, seconds to finish work before handing it over", minimum=0,
                             maximum=A_YEAR_S)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model."""

    model: str = setting("", "folder with config.json, tokenizer.json and *.safetensors; none: `quire serve` makes "
                         "SmolLM2-135M-Instruct, a gateway serves what workers bring", is_positional=True)  # fmt: skip
    tokenizer: str = setting("", "folder with tokenizer.json, and with what there is of tokenizer_config.json and "
                             "chat_template.jinja; default: the model's")  # fmt: skip
    generation_config: str = setting("auto", "sampling where a request says nothing: that of generation_config.json in "
                                     "the model's folder (auto) or in FOLDER, or vllm: none of it",
                                     may_be_empty=False)  # fmt: skip
    revision: str = setting("", "refused, and says why: a model is a folder, and nothing is fetched")
    served_model_name: tuple[str, ...] = setting((), "name(s) clients may use; default: the folder's name. Of a "
                                                 "gateway without a model: those it waits for",
                                                 may_be_empty=False)  # fmt: skip
    max_model_len: int | None = setting(None, "most tokens of prompt and output together; default: the model's",
                                        minimum=1)  # fmt: skip
    dtype: str = setting("auto", "of weights, and of KV by default; auto: the checkpoint's", choices=(
        "auto", "float32", "bfloat16", "float16"))  # fmt: skip
    lora_modules: tuple[str, ...] = setting(
        (), "adapters that are served from the start (with --enable-lora), each as NAME=FOLDER or, where there are "
        """several models, as JSON: '{"name": NAME, "path": FOLDER, "base_model_name": MODEL}'""",
        may_be_empty=False)  # fmt: skip
    quantization: str = setting("none", "quantize a float checkpoint at load, activations to int8 (CPU only); "
                                "int4 keeps an int8 output projection. How a quantized checkpoint is stored its own "
                                "config.json says; its method may be named here and must be that one", choices=(
        "none", "int8", "int4", "awq", "gptq", "fp8", "compressed-tensors"))  # fmt: skip
    model_impl: str = setting("auto", "whose code computes the model: quire's own, that of transformers over the same "
                              "KV cache, or auto: its own where there is one", choices=(
        "auto", "quire", "transformers"))  # fmt: skip

    def files(self) -> ModelFiles:
        """Where the model's files are."""
        return ModelFiles(model=Path(self.model), tokenizer=self.tokenizer, generation_config=self.generation_config)

    def check(self) -> None:
        """Raise `ConfigError` for what is asked of a hub."""
        if self.revision:
            raise ConfigError(
                f"--revision={shorten(self.revision)}: a model is a folder here and nothing is fetched, so it has one "
                "revision; name the folder that holds the one you mean"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """The gateways."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0: every one of this machine", may_be_empty=False)
    port: int = setting(8000, "first port; gateway i listens on port + i (0: any free one)", minimum=0, maximum=65535)
    api_key: tuple[str, ...] = setting((), "key(s) that clients must send as a bearer token; none: open")
    enable_lora_updates: bool = setting(
        False, "POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for --admin-key; folders below --lora-dir and "
        "those of --lora-modules may be loaded")  # fmt: skip
    lora_dir: tuple[str, ...] = setting((), "folder(s) below which adapters may be loaded by HTTP", may_be_empty=False)
    admin_key: str = setting("", "bearer token of those who may load and unload adapters")
    max_body_bytes: int = setting(16 * 1024 * 1024, "largest request body", minimum=1024)
    body_timeout_s: float = setting(30.0, "how long a client may take to send its body", minimum=0.1, maximum=A_YEAR_S)
    request_timeout_s: float = setting(600.0, "deadline of a request", minimum=1, maximum=A_YEAR_S)
    orphan_ttl_s: float = setting(30.0, "how long a request runs on when nobody listens any more", minimum=0,
                                  maximum=A_YEAR_S)  # fmt: skip
    record_ttl_s: float = setting(600.0, "how long an ended stream can still be read", minimum=1, maximum=A_YEAR_S)
    sse_keep_alive_s: float = setting(0.0, "open streams early and send comments this often; 0: off", minimum=0,
                                      maximum=A_YEAR_S)  # fmt: skip
    tokenizer_threads: int = setting(2, "threads that tokenize prompts", minimum=1)
    price_per_hour: float = setting(0.0, "what a worker costs an hour, in whatever money; for `include_cost` in a "
                                    "request and quire:cost_total in /metrics; 0: not known", minimum=0,
                                    maximum=1e9)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """What the gateways let in.

    A tenant is an API key; its name is the first 16 hex digits of the key's SHA-256. Without keys everybody is
    `anyone`. All gateways of a cell share what is counted, and should have the same limits.
    """

    max_num_queued_reqs: int | None = setting(
        None, "most requests that wait for a worker (each of n choices counts), beyond it 503; default: no limit",
        minimum=1, maximum=MAX_LIMIT)  # fmt: skip
    max_num_queued_tokens: int | None = setting(
        None, "most prompt tokens that wait for a worker, beyond it 503; default: no limit", minimum=1,
        maximum=MAX_LIMIT)  # fmt: skip
    tenant_requests_per_minute: int | None = setting(
        None, "requests a minute of each tenant, beyond it 429; default: no limit", minimum=1,
        maximum=MAX_LIMIT)  # fmt: skip
    tenant_tokens_per_minute: int | None = setting(
        None, "tokens a minute of each tenant: prompts and max_tokens, what was not used comes back at the end; "
        "default: no limit", minimum=1, maximum=MAX_LIMIT)  # fmt: skip
    tenant_max_in_flight: int | None = setting(
        None, "requests of each tenant at a time, beyond it 429; default: no limit", minimum=1,
        maximum=MAX_LIMIT)  # fmt: skip
    tenant_limits: tuple[str, ...] = setting(
        (), "other limits for tenant(s), each as NAME:rpm=60:tpm=9000:in-flight=4 (none: no limit; what is not named "
        "is as for all). NAME is `printf %s KEY | sha256sum | cut -c1-16`, or anyone when there are no keys",
        may_be_empty=False)  # fmt: skip

    def default_limits(self) -> TenantLimits:
        """Those of a tenant that `tenant_limits` does not name."""
        return TenantLimits(
            requests_per_minute=self.tenant_requests_per_minute,
            tokens_per_minute=self.tenant_tokens_per_minute,
            max_in_flight=self.tenant_max_in_flight,
        )

    def limits_by_tenant(self) -> dict[str, TenantLimits]:
        """Those of the tenants that `tenant_limits` names. Raises `ConfigError`."""
        return parse_tenant_limits(self.tenant_limits, self.default_limits())


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
    tensor_parallel_size: int = setting(1, "ranks (processes) of each worker, each with its part of every layer and, "
                                        "with CUDA, a card of its own", minimum=1, maximum=64)  # fmt: skip
    block_size: int = setting(16, "tokens in a KV block", minimum=1, maximum=256)
    batching: str = setting("continuous", "static: a batch runs to its end before others are admitted, to compare with",
                            choices=("continuous", "static"))  # fmt: skip
    kv_layout: str = setting("paged", "contiguous: reserve --max-model-len tokens for each sequence, to compare with",
                             choices=("paged", "contiguous"))  # fmt: skip
    kv_cache_memory_bytes: int | None = setting(
        None, "KV cache size of a worker; default on CPU: a quarter of free memory, which the launcher divides among "
        "its workers, at most 4 GiB", minimum=1)  # fmt: skip
    memory_shares: int = setting(1, "workers that divide this machine's memory", minimum=1, is_hidden=True)
    kv_cache_dtype: str = setting(
        "auto", "of keys and values; auto: the model's; int8 and fp8 (e4m3) hold about twice the tokens of bf16",
        choices=(
            "auto", "bf16", "fp16", "fp32", "fp8", "int8", "bfloat16", "float16", "float32", "fp8_e4m3"))  # fmt: skip
    swap_space: float = setting(
        0.0, "host memory of each worker for KV blocks of sequences that give way, in GiB; 0: they compute again",
        minimum=0, maximum=65_536)  # fmt: skip
    preemption_mode: str = setting(
        "auto", "for those that give way: swap or recompute; auto: of each the cheaper one, by what copies and tokens "
        "have cost lately", choices=PREEMPTION_MODES)  # fmt: skip
    gpu_memory_utilization: float = setting(0.9, "share of GPU memory for weights and KV", minimum=0.05, maximum=1.0)
    max_num_seqs: int = setting(128, "most sequences in one step", minimum=1, maximum=4096)
    max_num_batched_tokens: int = setting(512, "most tokens in one step; prompts are cut to fit", minimum=1)
    enable_chunked_prefill: bool = setting(
        True, "cut prompts; off: a step takes whole ones, as many tokens as that needs"
    )
    max_step_ms: float = setting(150.0, "a step beside running streams takes only what fits in this time of prompts",
                                 minimum=1)  # fmt: skip
    num_threads: int | None = setting(None, "compute threads; default: all cores, the launcher divides them", minimum=1,
                                      maximum=1024)  # fmt: skip
    seed: int = setting(0, "unused by sampling (requests carry their own); kept for vLLM's command lines", minimum=0)
    enforce_eager: bool = setting(False, "no CUDA graphs for decode steps")
    enable_prefix_caching: bool = setting(True, "find what was computed of equal beginnings of prompts before")
    speculative_config: str = setting("", "try several tokens in a step where the text repeats itself, as vLLM's JSON: "
                                      """'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, """
                                      """"prompt_lookup_min": 2}'; none: one at a time""")  # fmt: skip

    enable_lora: bool = setting(False, "serve LoRA adapters beside the model")
    max_loras: int = setting(4, "most adapters in one step", minimum=1, maximum=256)
    max_lora_rank: int = setting(64, "highest rank of an adapter", minimum=1, maximum=1024)
    max_cpu_loras: int | None = setting(None, "adapters kept in each worker's host memory; default: 4 for each that "
                                        "a step may have", minimum=1)  # fmt: skip

    def step_tokens(self, max_model_len: int) -> int:
        """Most tokens in one step: where prompts are not cut, the longest one beside all that decode."""
        whole = 0 if self.enable_chunked_prefill else max_model_len + self.max_num_seqs
        return max(self.max_num_batched_tokens, whole)

    @property
    def has_prefix_cache(self) -> bool:
        """Reserved memory cannot be shared."""
        return self.enable_prefix_caching and self.kv_layout == "paged"

    def reserved_tokens(self, max_model_len: int) -> int:
        """Tokens for which each sequence gets blocks when it is admitted, whatever it needs; 0: what it needs."""
        return max_model_len if self.kv_layout == "contiguous" else 0

    @property
    def swap_bytes(self) -> int:
        """Host memory for KV blocks."""
        return 0 if self.preemption_mode == "recompute" else int(self.swap_space * 2**30)

    def check_swap(self) -> None:
        """Raise `ConfigError` unless `swap_space` goes with the other settings."""
        if not self.swap_space:
            if self.preemption_mode == "swap":
                raise ConfigError("--preemption-mode=swap: there is no host memory to swap to; set --swap-space (GiB)")
            return
        for flag, value, needed in (("kv-layout", self.kv_layout, "paged"), ("batching", self.batching, "continuous")):
            if value != needed:
                raise ConfigError(
                    f"--swap-space={self.swap_space} does not go with --{flag}={value}; leave one of the two out"
                )

    def kept_window(self, window: int) -> int:
        """The tokens of a sequence whose blocks are kept, where a model's queries see `window`; 0: all of them, as in
        batches and layouts to compare with."""
        return window if self.batching == "continuous" and self.kv_layout == "paged" else 0

    def speculation(self) -> SpeculationConfig | None:
        """What `speculative_config` says; None: off. Raises `ConfigError`."""
        return parse_speculative_config(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingConfig:
    """The scheduler."""

    decision_log: str = setting("", "write each event and decision to this file, to replay them with `quire simulate`; "
                                "each leader begins a new one and keeps the last as FILE.1")  # fmt: skip
    decision_log_max_mb: int = setting(256, "the most that a leader writes to its decision log", minimum=1,
                                       maximum=1_000_000)  # fmt: skip
    max_crashes: int = setting(3, "deaths of workers in a row that a request may cause", minimum=1)
    worker_stall_s: float = setting(60.0, "a worker with work that makes no step this long is lost", minimum=1)
    max_preemptions: int = setting(8, "a request preempted this often is not preempted again", minimum=1)
    admission_headroom: int | None = setting(
        None, "tokens of growth kept free for each sequence at admission; default: what the forecast says", minimum=0
    )
    tenant_weights: tuple[str, ...] = setting(
        (), "shares of tenants inside a class, TENANT=WEIGHT, 1 for all others; a tenant is the first 16 hex digits of "
        "its API key's SHA-256 (`printf %s KEY | sha256sum | cut -c-16`)", may_be_empty=False)  # fmt: skip
    priority_aging_s: float = setting(60.0, "a request that has waited this long rises into the next better class in "
                                      "use, and so on; 0: never", minimum=0, maximum=A_YEAR_S)  # fmt: skip
    max_passing_s: float = setting(2.0, "how long smaller requests may pass one that is too large for what is free; "
                                   "0: nobody passes", minimum=0, maximum=A_YEAR_S)  # fmt: skip
    ttft_target_ms: float = setting(500.0, "first tokens ought to come within this; only reorders, among tenants that "
                                    "are even", minimum=0)  # fmt: skip
    tpot_target_ms: float = setting(50.0, "further tokens ought to come within this; only reorders, as above",
                                    minimum=0)  # fmt: skip
    scheduler_delay_factor: float = setting(0.0, "wait this many times the latest prompt's latency before more is "
                                            "admitted beside what runs", minimum=0)  # fmt: skip

    def decision_log_path(self) -> Path | None:
        """The file of `decision_log`, whose folder is there; None: not wanted. Raises `ConfigError`."""
        if not self.decision_log:
            return None
        path = expand("--decision-log", self.decision_log)
        try:
            is_fine = path.parent.is_dir() and not path.is_dir()
        except OSError as error:
            raise ConfigError(f"--decision-log={shorten(path)}: {error.strerror}") from None
        if not is_fine:
            raise ConfigError(f"--decision-log={shorten(path)}: its folder is not there, or it is a folder itself")
        return path

    def weights(self) -> Mapping[str, float]:
        """What `tenant_weights` says. Raises `ConfigError`."""
        return parse_tenant_weights(self.tenant_weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConfig:
    """As many workers as the work needs."""

    autoscale: str = setting("", "MIN:MAX: start and stop workers as the work needs them (docs/deploy.md); none: as "
                             "many as were started")  # fmt: skip
    autoscale_grow_after_s: float = setting(2.0, "more workers are wanted when clients have noticed for this long that "
                                            "there are too few", minimum=0, maximum=A_YEAR_S)  # fmt: skip
    autoscale_shrink_after_s: float = setting(60.0, "fewer workers are wanted when fewer would have done for this "
                                              "long", minimum=0, maximum=A_YEAR_S)  # fmt: skip

    def limits(self) -> WorkerLimits | None:
        """What `autoscale` says; None: off. Raises `ConfigError`."""
        return parse_autoscale(self.autoscale)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    door: DoorConfig = field(default_factory=DoorConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    orphan_ttl_s: float = setting(30.0, "how long a request runs on when its gateway died", minimum=0)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerConfig:
    """Whoever starts and stops containers."""

    project: str = setting("", "compose project whose workers are started and stopped")
    docker_url: str = setting("unix:///var/run/docker.sock", "where Docker listens", may_be_empty=False)
    service: str = setting("gpu_worker", "the project's service whose containers these are",
                           may_be_empty=False)  # fmt: skip
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The launcher: everything, and how many of each."""

    workers: int = setting(
        1, "workers to start of each model (with --autoscale: leave it out)", minimum=1, maximum=MAX_WORKERS_HERE
    )
    gateways: int = setting(1, "gateways to start, on ports P, P+1, ...", minimum=1, maximum=64)
    data_dir: str = setting("", "folder for the private Redis' data, kept; default: a new one, removed at exit")
    parent_pid: int | None = setting(
        None,
        "of a program that these services are for: with --die-with-parent, also if it has died "
        "already; and end when a service keeps dying",
        is_hidden=True,
    )
    state_file: str = setting("", "write process ids, ports and the Redis address here as JSON", is_hidden=True)
    model: ModelConfig = field(default_factory=ModelConfig)
    more_models: tuple[str, ...] = setting((), "further models, each with --workers of its own: FOLDER, or NAME=FOLDER "
                                           "to give it another name", may_be_empty=False,
                                           is_positional=True)  # fmt: skip
    http: HttpConfig = field(default_factory=HttpConfig)
    door: DoorConfig = field(default_factory=DoorConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
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
    if isinstance(model := getattr(config, "model", None), ModelConfig):
        model.check()
    _check_lora(config)
    scheduling = getattr(config, "scheduling", None)
    if isinstance(scheduling, SchedulingConfig):
        scheduling.weights()
        scheduling.decision_log_path()
    if isinstance(scaling := getattr(config, "scaling", None), ScalingConfig):
        scaling.limits()
    if isinstance(door := getattr(config, "door", None), DoorConfig):
        door.limits_by_tenant()
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
    engine.speculation()
    engine.check_swap()


def _check_lora(config: object) -> None:
    model, engine, http = (getattr(config, name, None) for name in ("model", "engine", "http"))
    if isinstance(model, ModelConfig):
        parse_lora_modules(model.lora_modules)
        if model.lora_modules and isinstance(engine, EngineConfig) and not engine.enable_lora:
            raise ConfigError(f"--lora-modules={shorten(' '.join(model.lora_modules))}: needs --enable-lora")
    if isinstance(http, HttpConfig) and http.enable_lora_updates:
        if not http.admin_key:
            raise ConfigError("--enable-lora-updates: set --admin-key, which those who load adapters must send")
        if http.admin_key in http.api_key:
            raise ConfigError("--admin-key: is one of --api-key, so clients could load adapters; choose another")

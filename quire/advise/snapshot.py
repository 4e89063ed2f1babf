"""What `/metrics` said, as the numbers that the rules look at: gauges now, counters over a time.

From two scrapes come counts of the time between them; from one the totals since the start. What waits is the smaller of
two readings, so that it waited all the time; what runs is the larger one, since between two requests a slot is free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from shared.errors import QuireError


class NoWorkers(QuireError):
    """The cell's gateway has had no report of a worker, or none for a lease."""


Samples = Mapping[str, float]
"""By name, summed over labels."""

_INFO = ("vllm:cache_config_info", "quire:engine_config_info")
_HISTOGRAMS = (
    "vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:time_to_first_token_seconds",
    "vllm:time_per_output_token_seconds",
)  # fmt: skip
_SERIES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "quire:num_blocks", "vllm:kv_cache_usage_perc",
    "quire:kv_slot_utilization", "quire:most_running", "quire:most_blocks_used", "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("count", "sum")),
)  # fmt: skip
"""What every gateway shows, at any time. `quire:worker_seconds_total` is there once somebody has worked."""
MAX_NUMBER = 1e15
"""Above anything that is counted or set; what is not below it, also NaN, is taken for missing."""
_LABEL = re.compile(r"[A-Za-z0-9_.:+-]{1,64}")
"""What a setting looks like; other values are taken for missing, since they are shown to people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How the workers are set, by the labels of the info series; "", 0 and None where those are missing, or workers
    differ in them: `differing` names those. `sliding_window`: tokens of a sequence that are kept; 0: all."""

    device: str = ""
    dtype: str = ""
    quantization: str = ""
    batching: str = ""
    kv_layout: str = ""
    kv_cache_dtype: str = ""
    has_prefix_cache: bool | None = None
    has_drafts: bool | None = None
    block_size: int = 0
    num_swap_blocks: int | None = None
    sliding_window: int | None = None
    preemption_mode: str = ""
    gpu_memory_utilization: float = 0.0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_step_ms: float = 0.0
    num_threads: int = 0
    differing: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def lacks_swap(self) -> bool:
        """Whether there is no host memory for blocks, and a worker would start with --swap-space."""
        is_comparing = (self.batching, self.kv_layout) != ("continuous", "paged")
        return self.num_swap_blocks == 0 and self.sliding_window == 0 and not is_comparing


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`seconds`: what the counts are of; 0: since the start. Times in seconds; means are 0 where nothing was counted.

    `num_ended` requests ended and had `mean_prompt` and `mean_output` tokens; `ttft_s` and `tpot_s` are means of
    `num_ttft` and `num_tpot`. `usage`: share of KV blocks in use now; `slot_utilization`: share of their slots that
    hold a token. `most_*` since the start. `max_*`: longer times are slow.
    """

    settings: WorkerSettings = field(default_factory=WorkerSettings)
    seconds: float = 0.0
    num_workers: int = 1
    num_running: float = 0.0
    num_waiting: float = 0.0
    num_blocks: float = 0.0
    usage: float = 0.0
    slot_utilization: float = 1.0
    most_running: float = 0.0
    most_blocks_used: float = 0.0
    num_preemptions: float = 0.0
    num_prefix_queries: float = 0.0
    num_prefix_hits: float = 0.0
    worker_seconds: float = 0.0
    num_ended: float = 0.0
    mean_prompt: float = 0.0
    mean_output: float = 0.0
    num_ttft: float = 0.0
    ttft_s: float = 0.0
    num_tpot: float = 0.0
    tpot_s: float = 0.0
    max_ttft_s: float = 0.5
    max_tpot_s: float = 0.05

    @property
    def num_slots(self) -> int:
        """Sequences that may run at the same time, over all workers; 0: not known."""
        return self.num_workers * self.settings.max_num_seqs

    @property
    def mean_length(self) -> float:
        """Tokens of a request, prompt and output."""
        return self.mean_prompt + self.mean_output

    @property
    def most_usage(self) -> float:
        """The most of the KV blocks that were ever in use, as a share."""
        return self.most_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def is_short_of_blocks(self) -> bool:
        """Requests wait, or sequences had to give way, while nearly all blocks are taken."""
        return self.num_preemptions > 0 or (self.num_waiting >= 1 and self.usage >= 0.9)


def read_samples(text: str, source: str) -> tuple[Samples, WorkerSettings]:
    """The samples in Prometheus' text format, those that are no number left out, and how the workers are set.

    Raises:
        QuireError: it is empty, not that format, not of a Quire gateway, or only a part of that; `NoWorkers`.
    """
    if not text.strip():
        raise QuireError(f"{source} is empty: no metrics")
    samples: dict[str, float] = {}
    sets: dict[str, list[Mapping[str, str]]] = {name: [] for name in _INFO}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if abs(sample.value) < MAX_NUMBER:
                    samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
                if sample.name in sets:
                    sets[sample.name].append(sample.labels)
    except ValueError:
        raise QuireError(f"{source} is not in Prometheus' text format; give the address of a gateway") from None
    if "quire:workers" not in samples:
        raise QuireError(f"{source} is no /metrics of a Quire cell; give the address of a gateway")
    missing = [name for name in _SERIES if name not in samples]
    if missing:
        more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
        raise QuireError(f"{source} is only a part of a gateway's /metrics, without {', '.join(missing[:2])}{more}")
    if samples["quire:workers"] < 1:
        raise NoWorkers(f"{source}: no worker reports; start one, or look again in a second")
    return samples, _to_settings([_agreed(labels) for labels in sets.values()])


def make_snapshot(first: Samples | None, last: Samples, settings: WorkerSettings, *, seconds: float) -> Snapshot:
    """The time between two scrapes, or all until `last`."""
    before = first or {}

    def grown(name: str) -> float:
        return max(0.0, last.get(name, 0.0) - before.get(name, 0.0))

    def readings(name: str) -> tuple[float, float]:
        return last.get(name, 0.0), before.get(name, last.get(name, 0.0))

    def mean(name: str) -> float:
        return grown(name + "_sum") / grown(name + "_count") if grown(name + "_count") else 0.0

    return Snapshot(
        settings=settings,
        seconds=seconds,
        num_workers=round(last["quire:workers"]),
        num_running=max(readings("vllm:num_requests_running")),
        num_waiting=min(readings("vllm:num_requests_waiting")),
        num_blocks=last.get("quire:num_blocks", 0.0),
        usage=last.get("vllm:kv_cache_usage_perc", 0.0),
        slot_utilization=last.get("quire:kv_slot_utilization", 1.0),
        most_running=last.get("quire:most_running", 0.0),
        most_blocks_used=last.get("quire:most_blocks_used", 0.0),
        num_preemptions=grown("vllm:num_preemptions_total"),
        num_prefix_queries=grown("vllm:prefix_cache_queries_total"),
        num_prefix_hits=grown("vllm:prefix_cache_hits_total"),
        worker_seconds=grown("quire:worker_seconds_total"),
        num_ended=grown("vllm:request_prompt_tokens_count"),
        mean_prompt=mean("vllm:request_prompt_tokens"),
        mean_output=mean("vllm:request_generation_tokens"),
        num_ttft=grown("vllm:time_to_first_token_seconds_count"),
        ttft_s=mean("vllm:time_to_first_token_seconds"),
        num_tpot=grown("vllm:time_per_output_token_seconds_count"),
        tpot_s=mean("vllm:time_per_output_token_seconds"),
    )


def _agreed(sets: list[Mapping[str, str]]) -> dict[str, str | None]:
    """What all of `sets` say, "" where that is no setting; None where they differ."""
    names = {name for labels in sets for name in labels}
    said = {name: {labels.get(name, "") for labels in sets} for name in names}
    return {name: _plain(values.pop()) if len(values) == 1 else None for name, values in said.items()}


def _plain(value: str) -> str:
    return value if _LABEL.fullmatch(value) else ""


def _to_settings(info: list[dict[str, str | None]]) -> WorkerSettings:
    labels = {name: value for part in info for name, value in part.items()}

    def text(name: str) -> str:
        return labels.get(name) or ""

    def number(name: str) -> float:
        try:
            value = float(text(name) or 0)
        except ValueError:
            return 0.0
        return value if 0 <= value < MAX_NUMBER else 0.0

    def count(name: str) -> int | None:
        return int(number(name)) if text(name).isdecimal() else None

    def flag(name: str) -> bool | None:
        return {"True": True, "False": False}.get(text(name))

    return WorkerSettings(
        device=text("device"),
        dtype=text("dtype"),
        quantization=text("quantization"),
        batching=text("batching"),
        kv_layout=text("kv_layout"),
        kv_cache_dtype=text("cache_dtype"),
        has_prefix_cache=flag("enable_prefix_caching"),
        has_drafts=flag("speculative"),
        block_size=int(number("block_size")),
        num_swap_blocks=count("num_cpu_blocks"),
        sliding_window=count("sliding_window"),
        preemption_mode=text("preemption_mode"),
        gpu_memory_utilization=number("gpu_memory_utilization"),
        max_model_len=int(number("max_model_len")),
        max_num_seqs=int(number("max_num_seqs")),
        max_num_batched_tokens=int(number("max_num_batched_tokens")),
        max_step_ms=number("max_step_ms"),
        num_threads=int(number("num_threads")),
        differing=tuple(sorted(name for name, value in labels.items() if value is None and name not in _MAY_DIFFER)),
    )


_MAY_DIFFER = ("num_gpu_blocks",)
"""By the memory of the machines; no rule asks for it."""

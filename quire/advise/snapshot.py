"""What `/metrics` said, as the numbers that the rules look at: gauges now, counters over a time.

From two scrapes come counts of the time between them; from one the totals since the start. What waits is the smaller of
two readings, so that it waited all the time; what runs is the larger one, since between two requests a slot is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from shared.errors import QuireError


class NoWorkers(QuireError):
    """The cell's gateway has had no report of a worker, or none for a lease."""


Samples = Mapping[str, float]
"""By name, summed over labels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How the workers are set, by the labels of the info series; "" and 0 where those are missing."""

    device: str = ""
    dtype: str = ""
    quantization: str = ""
    batching: str = ""
    kv_layout: str = ""
    kv_cache_dtype: str = ""
    has_prefix_cache: bool | None = None
    has_drafts: bool | None = None
    block_size: int = 0
    num_swap_blocks: int = 0
    gpu_memory_utilization: float = 0.0
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_step_ms: float = 0.0

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """`seconds`: what the counts are of; 0: since the start. Times in seconds; means are 0 where nothing was counted.

    `num_ended` requests ended and had `mean_prompt` and `mean_output` tokens; `ttft_s` and `tpot_s` are means of
    `num_ttft` and `num_tpot`. `usage`: share of KV blocks in use now; `slot_utilization`: share of their slots that
    hold a token. `most_*` since the start.
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
    """The samples in Prometheus' text format, and how the workers are set.

    Raises:
        QuireError: it is empty, not that format, or not of a Quire gateway; `NoWorkers`.
    """
    if not text.strip():
        raise QuireError(f"{source} is empty: no metrics")
    samples: dict[str, float] = {}
    labels: dict[str, str] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
                if sample.name in ("vllm:cache_config_info", "quire:engine_config_info"):
                    labels |= sample.labels
    except ValueError:
        raise QuireError(f"{source} is not in Prometheus' text format; give the address of a gateway") from None
    if "quire:workers" not in samples:
        raise QuireError(f"{source} is no /metrics of a Quire cell; give the address of a gateway")
    if not samples["quire:workers"]:
        raise NoWorkers(f"{source}: no worker reports; start one, or look again in a second")
    return samples, _to_settings(labels)


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


def _to_settings(labels: Mapping[str, str]) -> WorkerSettings:
    def number(name: str) -> float:
        try:
            return float(labels.get(name) or 0)
        except ValueError:
            return 0.0

    def flag(name: str) -> bool | None:
        return {"True": True, "False": False}.get(labels.get(name, ""))

    return WorkerSettings(
        device=labels.get("device", ""),
        dtype=labels.get("dtype", ""),
        quantization=labels.get("quantization", ""),
        batching=labels.get("batching", ""),
        kv_layout=labels.get("kv_layout", ""),
        kv_cache_dtype=labels.get("cache_dtype", ""),
        has_prefix_cache=flag("enable_prefix_caching"),
        has_drafts=flag("speculative"),
        block_size=int(number("block_size")),
        num_swap_blocks=int(number("num_cpu_blocks")),
        gpu_memory_utilization=number("gpu_memory_utilization"),
        max_model_len=int(number("max_model_len")),
        max_num_seqs=int(number("max_num_seqs")),
        max_num_batched_tokens=int(number("max_num_batched_tokens")),
        max_step_ms=number("max_step_ms"),
    )

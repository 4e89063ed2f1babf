"""How the cell's workers are set, as labels of two series that are 1, for `/metrics`.

Workers say it in their hello. Those that are set alike share a series, and no more than `MAX_SETS` different ones are
shown, so there are as many series as ways to start a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily

from shared.messages import WorkerHello

MAX_SETS = 16


class WorkerInfoCollector:
    """For a registry; `workers` are those that live."""

    def __init__(self, workers: Sequence[WorkerHello]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The series; called by prometheus_client."""
        yield _family("vllm:cache_config_info", "the KV cache of workers", [_cache(w) for w in self._workers])
        yield _family("quire:engine_config_info", "the settings of workers", [_engine(w) for w in self._workers])


def _family(name: str, text: str, sets: list[dict[str, str]]) -> GaugeMetricFamily:
    distinct = {tuple(labels.values()): labels for labels in sets}
    family = GaugeMetricFamily(name, text, labels=tuple(sets[0]) if sets else ())
    for values in sorted(distinct)[:MAX_SETS]:
        family.add_metric(values, 1)
    return family


def _cache(worker: WorkerHello) -> dict[str, str]:
    settings = dict(worker.settings)
    return {
        "block_size": str(worker.block_size),
        "num_gpu_blocks": str(worker.num_blocks),
        "num_cpu_blocks": str(worker.num_swap_blocks),
        "cache_dtype": settings.get("kv_cache_dtype", ""),
        "gpu_memory_utilization": settings.get("gpu_memory_utilization", ""),
        "enable_prefix_caching": str(worker.has_prefix_cache),
        "kv_layout": settings.get("kv_layout", ""),
        "sliding_window": str(worker.window),
        "preemption_mode": worker.preemption_mode,
    }


def _engine(worker: WorkerHello) -> dict[str, str]:
    settings = dict(worker.settings)
    names = (
        "quantization",
        "batching",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "max_step_ms",
        "num_threads",
        "tensor_parallel_size",
        "speculative",
    )
    return {
        "device": worker.device.partition(":")[0],
        "dtype": worker.dtype,
        "max_model_len": str(worker.max_model_len),
        "max_num_seqs": str(worker.max_num_seqs),
        **{name: settings.get(name, "") for name in names},
    }

"""What one worker shows at its `/metrics`: its last report, as gauges and counters with no labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from shared.messages import WorkerReport

GAUGES = {
    "num_running": "sequences in the batch",
    "num_waiting": "sequences that wait inside the worker",
    "num_blocks": "KV blocks there are",
    "free_blocks": "KV blocks that nobody owns",
    "most_running": "the most sequences ever in the batch",
    "most_blocks_used": "the most KV blocks ever in use",
    "num_live_tokens": "tokens in the KV blocks that are in use",
    "free_swap_blocks": "KV blocks that host memory has room for, see --swap-space",
    "block_copy_s": "seconds that copying a KV block to or from host memory has taken lately, 0: not known yet",
    "token_s": "seconds that a token of a prompt has taken lately, 0: not known yet",
    "is_draining": "1 while it takes nothing new",
}
COUNTERS = {
    "num_steps": "model steps",
    "num_evictions": "sequences evicted for want of blocks",
    "num_preemptions": "evictions and sequences preempted by the scheduler",
    "num_swap_preemptions": "those of them that had KV blocks copied to host memory",
    "num_swapped_out": "KV blocks copied to host memory",
    "num_swapped_in": "KV blocks copied back from there",
    "num_prompt_tokens": "prompt tokens of sequences that have begun",
    "num_generation_tokens": "tokens drawn",
    "num_padded_rows": "rows computed for sequences that had ended, see --batching",
    "num_prefix_queries": "tokens of sequences that were admitted, looked up in the prefix cache",
    "num_prefix_hits": "those of them that were found",
    "num_drafts": "drafts tried, see --speculative-config",
    "num_draft_tokens": "tokens of those drafts",
    "num_accepted_tokens": "tokens of those drafts that were right",
}


class WorkerMetrics:
    """A registry that shows the last report taken; empty before the first one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._report: WorkerReport | None = None
        self.registry.register(self)

    def take(self, report: WorkerReport) -> None:
        """Show this one from now on."""
        self._report = report

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The series; called by prometheus_client."""
        report = self._report
        if report is None:
            return
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(_series(name), text, value=float(getattr(report, name)))
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(_series(name), text, value=float(getattr(report, name)))


def _series(name: str) -> str:
    return "quire:worker_" + name.removeprefix("num_")

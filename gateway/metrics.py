"""Prometheus metrics under vLLM's names; what vLLM lacks has the prefix `quire:`.

`/metrics` shows the cell (all workers' reports, and this gateway's own counters), `/metrics?scope=process` this process
only: scrape the latter where there is more than one gateway. Label values come from the configuration and from fixed
lists, never from a request, so the number of series is constant.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gateway.cell import CellTotals
from gateway.histogram import TokenHistogram

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
FINISH_REASONS = ("stop", "length", "abort", "error")


class GatewayMetrics:
    """All series of one gateway. `model` is the label value for the one model that it serves."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.ttft_s = self._histogram("vllm:time_to_first_token_seconds", "from request to first token", _TTFT_BUCKETS)
        self.tpot_s = self._histogram(
            "vllm:time_per_output_token_seconds", "mean time a token after the first", _TPOT_BUCKETS
        )
        self.itl_s = TokenHistogram(
            "vllm:inter_token_latency_seconds", "time between deliveries", _TPOT_BUCKETS, ("model_name", model)
        )
        self._registry.register(self.itl_s)
        self.e2e_s = self._histogram("vllm:e2e_request_latency_seconds", "from request to its end", _E2E_BUCKETS)
        self.prompt_tokens = self._histogram("vllm:request_prompt_tokens", "of finished requests", _TOKEN_BUCKETS)
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "output tokens of finished requests", _TOKEN_BUCKETS
        )
        success = Counter(
            "vllm:request_success", "choices by their end", ("model_name", "finished_reason"), registry=self._registry
        )
        self.finished_reason = {reason: success.labels(model, reason) for reason in FINISH_REASONS}
        self.accepted = self._counter("quire:requests_accepted", "requests stored by this gateway")
        self.outcome = {
            "finished": self._counter("quire:requests_finished", "accepted requests answered in full"),
            "failed": self._counter("quire:requests_failed", "accepted requests that ended with an error"),
            "cancelled": self._counter("quire:requests_cancelled", "accepted requests left by their client"),
        }
        self.error_answers = self._counter("quire:error_answers", "requests answered with an HTTP error")
        self.crashes = self._counter("quire:handler_errors", "unexpected errors in a handler")
        self.open_responses = Gauge(
            "quire:open_responses", "responses being written", ("model_name",), registry=self._registry
        ).labels(model)

    def render_process(self) -> bytes:
        """This process' series in Prometheus' text format."""
        return generate_latest(self._registry)

    def render_cell(self, totals: CellTotals) -> bytes:
        """The cell's series and this process'."""
        registry = CollectorRegistry()
        registry.register(_CellCollector(self._model, totals))
        return generate_latest(registry) + self.render_process()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=self._registry, buckets=buckets).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self._registry).labels(self._model)


class _CellCollector:
    def __init__(self, model: str, totals: CellTotals) -> None:
        self._model = model
        self._totals = totals

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        t = self._totals
        gauges = {
            "vllm:num_requests_running": ("sequences in the workers' batches", t.num_running),
            "vllm:num_requests_waiting": ("requests queued, and sequences waiting inside workers", t.num_waiting),
            "vllm:kv_cache_usage_perc": ("share of KV blocks in use, 1 is full", t.usage),
            "vllm:gpu_cache_usage_perc": ("older name of vllm:kv_cache_usage_perc", t.usage),
            "vllm:num_blocks_used": ("KV blocks in use", t.num_blocks_used),
            "quire:num_blocks": ("KV blocks there are", t.num_blocks),
            "vllm:num_preemption": ("older name of vllm:num_preemptions_total", t.num_preemptions),
            "quire:workers": ("workers that report", t.num_workers),
        }
        counters = {
            "vllm:num_preemptions": ("sequences preempted", t.num_preemptions),
            "vllm:prompt_tokens": ("prompt tokens computed", t.num_prompt_tokens),
            "vllm:generation_tokens": ("tokens generated", t.num_generation_tokens),
            "vllm:spec_decode_num_drafts": ("drafts tried", t.num_drafts),
            "vllm:spec_decode_num_draft_tokens": ("tokens of drafts", t.num_draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("tokens of drafts that were right", t.num_accepted_tokens),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model,), value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model,), value)
            yield counter

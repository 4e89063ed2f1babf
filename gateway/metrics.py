"""Prometheus metrics under vLLM's names; what vLLM lacks has the prefix `quire:`.

`/metrics` shows the cell (all workers' reports, and this gateway's own counters), `/metrics?scope=process` this process
only: scrape the latter where there is more than one gateway. Label values come from the configuration and from fixed
lists, never from a request, so the number of series is constant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gateway.cell import CellTotals
from gateway.cost_metrics import CostCollector
from gateway.errors import REFUSAL_REASONS
from gateway.histogram import TokenHistogram
from gateway.worker_info import WorkerInfoCollector
from shared.messages import WorkerHello

_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_E2E_BUCKETS = (0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
FINISH_REASONS = ("stop", "length", "abort", "error")


class GatewayMetrics:
    """All series of one gateway.

    Args:
        model: the label value for the one model that it serves.
        tenants: those that series of cost name.
        price_per_hour: of a worker; 0: not known.
    """

    def __init__(self, model: str, tenants: Collection[str] = (), price_per_hour: float = 0.0) -> None:
        self._model = model
        self._tenants = tenants
        self._price_per_hour = price_per_hour
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
        refused = Counter(
            "quire:requests_refused",
            "requests turned away with 429 or 503, by the limit or the lack that was the reason",
            ("model_name", "reason"),
            registry=self._registry,
        )
        self._refused = {reason: refused.labels(model, reason) for reason in REFUSAL_REASONS}
        self.crashes = self._counter("quire:handler_errors", "unexpected errors in a handler")
        self.open_responses = Gauge(
            "quire:open_responses", "responses being written", ("model_name",), registry=self._registry
        ).labels(model)

    def note_refusal(self, reason: str | None) -> None:
        """A request was turned away; None: it was not, or not for lack of anything."""
        if reason is not None:
            self._refused[reason].inc()

    def render_process(self) -> bytes:
        """This process' series in Prometheus' text format."""
        return generate_latest(self._registry)

    def render_cell(self, totals: CellTotals, workers: Sequence[WorkerHello] = ()) -> bytes:
        """The cell's series and this process'; `workers` are those that live."""
        registry = CollectorRegistry()
        registry.register(_CellCollector(self._model, totals))
        registry.register(WorkerInfoCollector(workers))
        registry.register(CostCollector(totals.worked, self._tenants, self._price_per_hour))
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
            "quire:num_queued_sequences": ("sequences that no worker has", t.queue.num_sequences),
            "quire:num_queued_tokens": ("prompt tokens of requests that no worker has", t.queue.num_tokens),
            "vllm:kv_cache_usage_perc": ("share of KV blocks in use, 1 is full", t.usage),
            "vllm:gpu_cache_usage_perc": ("older name of vllm:kv_cache_usage_perc", t.usage),
            "vllm:num_requests_swapped": ("requests with KV blocks in host memory", t.num_swapped_requests),
            "vllm:cpu_cache_usage_perc": ("share of the host memory for KV blocks in use, 1 is full", t.swap_usage),
            "vllm:num_blocks_used": ("KV blocks in use", t.num_blocks_used),
            "quire:num_blocks": ("KV blocks there are", t.num_blocks),
            "quire:most_blocks_used": ("the most KV blocks ever in use, summed over workers", t.most_blocks_used),
            "quire:most_running": ("the most sequences ever in the batch, summed over workers", t.most_running),
            "quire:num_kv_tokens": ("tokens that the KV cache holds", t.num_kv_tokens),
            "quire:kv_slot_utilization": ("share of token slots in KV blocks in use that hold one", t.slot_utilization),
            "quire:kv_fragmentation": ("share of those slots that are empty", 1.0 - t.slot_utilization),
            "vllm:num_preemption": ("older name of vllm:num_preemptions_total", t.num_preemptions),
            "quire:workers": ("workers that report", t.num_workers),
        }
        counters = {
            "vllm:num_preemptions": ("sequences preempted", t.num_preemptions),
            "vllm:prompt_tokens": ("prompt tokens computed", t.num_prompt_tokens),
            "vllm:generation_tokens": ("tokens generated", t.num_generation_tokens),
            "vllm:prefix_cache_queries": ("tokens looked up in the prefix cache", t.num_prefix_queries),
            "vllm:prefix_cache_hits": ("tokens found there", t.num_prefix_hits),
            "quire:padded_rows": ("rows computed for sequences that had ended", t.num_padded_rows),
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
        swapped = {"out": t.num_swapped_out, "in": t.num_swapped_in}
        ways = {"swap": t.num_swap_preemptions, "recompute": t.num_preemptions - t.num_swap_preemptions}
        yield self._split("quire:swapped_blocks", "KV blocks copied to host memory and back", "direction", swapped)
        yield self._split(
            "quire:preemptions", "sequences preempted, by whether blocks were copied to host memory", "way", ways
        )

    def _split(self, name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
        """A counter for each value of a label."""
        counter = CounterMetricFamily(name, text, labels=("model_name", label))
        for key, value in values.items():
            counter.add_metric((self._model, key), value)
        return counter

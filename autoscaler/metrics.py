"""What the autoscaler counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AutoscalerMetrics:
    """The autoscaler's series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.containers = Gauge(
            "quire:autoscaler_containers", "workers' containers that run and stay", registry=self.registry
        )
        self.leaving = Gauge(
            "quire:autoscaler_leaving",
            "workers' containers that this process waits for to drain",
            registry=self.registry,
        )
        self.started = self._counter("started", "containers that were started")
        self.stopped = self._counter("stopped", "containers that had drained and were removed")
        self.errors = self._counter("errors", "looks and stops that Docker or Redis refused")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"quire:autoscaler_{name}", text, registry=self.registry)

"""What the scheduler counts. No label comes from a request, so the number of series is fixed."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class SchedulerMetrics:
    """The scheduler's series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.is_leader = self._gauge("is_leader", "1 while this scheduler leads")
        self.queue_length = self._gauge("queue_length", "requests that wait for a place")
        self.requests_running = self._gauge("requests_running", "requests that are assigned to a worker")
        self.workers = self._gauge("workers", "workers that hold their lease")
        self.wanted_workers = Gauge(
            "quire:wanted_workers",
            "workers that there should be, in quire:scheduler_workers those there are; 0: --autoscale is off",
            registry=self.registry,
        )
        self.dispatches = self._counter("dispatches", "requests sent to a worker")
        self.preemptions = self._counter("preemptions", "requests told to give way")
        self.workers_lost = self._counter("workers_lost", "workers that lost their lease or stalled")
        self.rejections = self._counter("rejections", "requests that no worker could ever hold")
        self.aborts = self._counter("aborts", "requests ended by deadline, crashes or for want of a listener")
        self.errors = self._counter("errors", "terms of leading that an error ended")

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"quire:scheduler_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"quire:scheduler_{name}", text, registry=self.registry)

    def clear_gauges(self) -> None:
        """A standby knows nothing of the cell."""
        gauges = (self.is_leader, self.queue_length, self.requests_running, self.workers, self.wanted_workers)
        for gauge in gauges:
            gauge.set(0)

"""What the cell's workers computed for each tenant, in seconds and in money, as two series for `/metrics`.

The counts are those of the commit script (`shared/redis_lua.py`), so they are the same at every gateway and outlive
it. Label values are the tenants of this gateway's own keys; those of other gateways or of keys that are gone are
summed as `other`. With no price there is no cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily

from shared.work_time import NO_WORK, WorkTime, cost_of

OTHER = "other"


class CostCollector:
    """For a registry; `tenants` are those that are named."""

    def __init__(self, worked: Mapping[str, WorkTime], tenants: Collection[str], price_per_hour: float) -> None:
        self._price_per_hour = price_per_hour
        self._worked = dict.fromkeys(tenants, NO_WORK)
        for tenant, work in worked.items():
            name = tenant if tenant in tenants else OTHER
            self._worked[name] = self._worked.get(name, NO_WORK).plus(work)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The series; called by prometheus_client."""
        seconds = CounterMetricFamily(
            "quire:worker_seconds",
            "time of workers' steps, by whose requests they computed",
            labels=("tenant", "phase"),
        )
        cost = CounterMetricFamily(
            "quire:cost", "worker_seconds at --price-per-hour, in its money", labels=("tenant", "phase")
        )
        for tenant, work in self._worked.items():
            for phase, value in (("prefill", work.prefill_s), ("decode", work.decode_s)):
                seconds.add_metric((tenant, phase), value)
                cost.add_metric((tenant, phase), cost_of(value, self._price_per_hour))
        yield seconds
        if self._price_per_hour:
            yield cost

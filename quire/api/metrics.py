"""What `get_metrics` gives: a deployment's `/metrics` as values, in vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A name, as vLLM has it where vLLM has the metric, and labels."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """What only rises. Whole numbers but for seconds and money."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """What is now."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """`buckets`: how many were at most so much, by that bound as text."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(text: str) -> list[Metric]:
    """All metrics in Prometheus' text format; those of other kinds than the three are left out."""
    found: list[Metric] = []
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            found += _read_histograms(family.name, family.samples)
        elif family.type in ("counter", "gauge"):
            kind = Counter if family.type == "counter" else Gauge
            values = [sample for sample in family.samples if not sample.name.endswith("_created")]
            found += [kind(name=family.name, labels=dict(sample.labels), value=sample.value) for sample in values]
    return found


def _read_histograms(name: str, samples: Iterable[Sample]) -> Iterator[Histogram]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        groups.setdefault(labels, []).append(sample)
    for labels, group in groups.items():
        values = {sample.name: sample.value for sample in group}
        buckets = {sample.labels["le"]: int(sample.value) for sample in group if sample.name == f"{name}_bucket"}
        yield Histogram(
            name=name,
            labels=dict(labels),
            count=int(values.get(f"{name}_count", 0)),
            sum=values.get(f"{name}_sum", 0.0),
            buckets=buckets,
        )

"""From arrival times to the figures that people compare: TTFT, TPOT, ITL, rates, and stalls.

* TTFT: sent → first arrival that brought text or token ids.
* TPOT: (last − first arrival) / (output tokens − 1), one value a request.
* ITL: time between two arrivals of one stream; an arrival may bring several tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Trace:
    """One request as its client saw it. Times are monotonic seconds. `error` is empty when all went well."""

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between arrivals, one less than there are arrivals."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of `values` lie, linear between neighbours; NaN when there are none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(traces: Sequence[Trace], wall_s: float) -> dict[str, float]:
    """Figures of one repeat, milliseconds where the name says so. Failed requests count in nothing but `failed`."""
    good = [trace for trace in traces if not trace.error and trace.arrivals]
    ttfts = [1000 * (t.arrivals[0] - t.sent_at) for t in good]
    tpots = [
        1000 * (t.arrivals[-1] - t.arrivals[0]) / (t.num_output_tokens - 1) for t in good if t.num_output_tokens > 1
    ]
    gaps = [1000 * gap for trace in good for gap in trace.gaps]
    num_tokens = sum(t.num_output_tokens for t in good)
    return {
        "requests": len(good),
        "failed": len(traces) - len(good),
        "wall_s": wall_s,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / wall_s,
        "requests_per_s": len(good) / wall_s,
        "ttft_ms_p50": percentile(ttfts, 50),
        "ttft_ms_p99": percentile(ttfts, 99),
        "tpot_ms_p50": percentile(tpots, 50),
        "tpot_ms_p99": percentile(tpots, 99),
        "itl_ms_p50": percentile(gaps, 50),
        "itl_ms_p99": percentile(gaps, 99),
        "itl_ms_max": max(gaps, default=math.nan),
        "latency_ms_p95": percentile((1000 * (t.arrivals[-1] - t.sent_at) for t in good), 95),
    }


def summarize_intruder(streams: Sequence[Trace], intruder: Trace) -> dict[str, float]:
    """w4: what one long prompt costs itself and the short streams beside it."""
    gaps = [1000 * gap for trace in streams for gap in trace.gaps]
    first = intruder.arrivals[0] if intruder.arrivals else math.nan
    return {"long_ttft_ms": 1000 * (first - intruder.sent_at), "longest_stall_ms": max(gaps, default=math.nan)}


def medians(repeats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the repeats that have it; NaN when none has."""
    return {
        name: percentile((repeat[name] for repeat in repeats if not math.isnan(repeat[name])), 50)
        for name in repeats[0]
    }

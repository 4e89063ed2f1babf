"""Figures from arrival times that were chosen by hand."""

from __future__ import annotations

import math

import pytest

from quire.bench import statistics
from quire.bench.statistics import Trace


def make_trace(*arrivals: float, sent_at: float = 0.0, num_output_tokens: int | None = None) -> Trace:
    count = len(arrivals) if num_output_tokens is None else num_output_tokens
    return Trace(sent_at=sent_at, arrivals=list(arrivals), num_output_tokens=count)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([5.0], 99, 5.0), ([1.0, 3.0], 50, 2.0), ([4.0, 1.0, 2.0, 3.0], 0, 1.0), ([1.0, 2.0, 3.0, 4.0], 100, 4.0)],
)
def test_percentile_is_linear_between_neighbours(values: list[float], percent: float, expected: float) -> None:
    """A percentile should not depend on the order of values and lie between its two neighbours."""
    assert statistics.percentile(values, percent) == expected


def test_percentile_of_nothing_is_nan() -> None:
    """No values should give no number, not a zero."""
    assert math.isnan(statistics.percentile([], 50))


def test_summary_of_two_streams() -> None:
    """TTFT, TPOT, gaps and rates should be those worked out by hand."""
    traces = [make_trace(1.0, 1.1, 1.3), make_trace(2.0, 2.4, sent_at=0.5, num_output_tokens=5)]
    figures = statistics.summarize(traces, wall_s=4.0)
    assert figures["requests"] == 2
    assert figures["output_tokens_per_s"] == 2.0
    assert figures["requests_per_s"] == 0.5
    assert figures["ttft_ms_p50"] == pytest.approx(1250)
    assert figures["tpot_ms_p50"] == pytest.approx((150 + 100) / 2)
    assert figures["itl_ms_max"] == pytest.approx(400)
    assert figures["itl_ms_p50"] == pytest.approx(200)


def test_failed_requests_count_in_nothing_else() -> None:
    """A failed request should neither add tokens nor move a percentile."""
    failed = make_trace(9.0, num_output_tokens=100)
    failed.error = "HTTP 500"
    figures = statistics.summarize([make_trace(1.0, 2.0), failed], wall_s=1.0)
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (1, 1, 2)
    assert figures["ttft_ms_p99"] == pytest.approx(1000)


def test_intruder_figures() -> None:
    """The stall should be the short streams' longest gap, the TTFT the long request's own."""
    streams = [make_trace(1.0, 1.1, 1.9), make_trace(1.0, 1.3)]
    figures = statistics.summarize_intruder(streams, make_trace(5.0, 5.5, sent_at=3.0))
    assert figures == {"long_ttft_ms": pytest.approx(2000), "longest_stall_ms": pytest.approx(800)}


def test_medians_over_repeats() -> None:
    """Each figure's median should be taken by itself."""
    assert statistics.medians([{"a": 1, "b": 9}, {"a": 5, "b": 7}, {"a": 2, "b": 8}]) == {"a": 2, "b": 8}
    assert statistics.medians([{"a": math.nan}, {"a": 5.0}]) == {"a": 5.0}

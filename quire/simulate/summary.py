"""The figures of a simulation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quire.bench.statistics import percentile
from scheduler_svc.simulation_trace import Party, Sample, SimulatedRequest, SimulationResult
from scheduler_svc.simulator import Simulation
from shared.ids import RequestId

MIN_WINDOW_SAMPLES = 4
"""Fewer moments in which all tenants waited say nothing of shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What a run took: seconds by the clock, and of CPU time."""

    wall_s: float
    cpu_s: float


def summarize(
    cell: Simulation, requests: Sequence[SimulatedRequest], took: Took, weights: Mapping[str, float]
) -> dict[str, Any]:
    """All figures by name; seconds of the simulation unless a name says otherwise, NaN for what did not occur.

    Args:
        requests: what arrived, number i as request `r{i}`.
        weights: of tenants, 1 for the others.
    """
    result = cell.result
    span_s = max(result.end_s.values(), default=0.0) - min(r.arrival_s for r in requests)
    kv = [100 * s.used_blocks / s.num_blocks for s in result.samples if s.num_blocks and s.num_running]
    return {
        "requests": len(requests),
        "ended": dict(Counter(result.ended.values())),
        "simulated_s": span_s,
        "requests_per_s": _ratio(len(result.ended), span_s),
        "tokens_per_s": _ratio(result.num_tokens, span_s),
        "goodput_tokens_per_s": _ratio(_num_finished_tokens(cell), span_s),
        "steps": result.num_steps,
        "tokens_computed": result.num_computed,
        "prefix_hit_percent": 100 * _ratio(result.num_found, result.num_queried),
        "requests_by_worker": _spread(cell),
        "preemptions": len(result.preempted),
        "evictions": result.num_evictions,
        "blocks_swapped_out": result.num_swapped_out,
        "blocks_swapped_in": result.num_swapped_in,
        "worker_hours": _worker_hours(result.samples),
        "workers_max": max((s.num_workers for s in result.samples), default=0),
        "kv_use_percent": {"mean": _mean(kv), "p50": percentile(kv, 50), "max": max(kv, default=math.nan)},
        "classes": _classes(requests, result),
        "fairness": fairness(result.samples, weights),
        "wall_s": took.wall_s,
        "cpu_s": took.cpu_s,
        "policy_s": cell.policy_s,
        "events": cell.num_events,
        "decisions": cell.num_decisions,
        "events_per_policy_s": _ratio(cell.num_events, cell.policy_s),
        "decisions_per_policy_s": _ratio(cell.num_decisions, cell.policy_s),
    }


def fairness(samples: Sequence[Sample], weights: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """By priority: tokens a second over weight of each tenant while *all* tenants of that class had requests waiting,
    and the largest over the smallest of them.

    With one tenant, or few such moments, there is nothing to compare: `max_over_min` is NaN.
    """
    parties = sorted(samples[-1].queued) if samples else []
    priorities = sorted({priority for _, priority in parties})
    return {str(p): _shares([party for party in parties if party[1] == p], samples, weights) for p in priorities}


def _shares(parties: list[Party], samples: Sequence[Sample], weights: Mapping[str, float]) -> dict[str, Any]:
    served: Counter[Party] = Counter()
    window_s, num_moments = 0.0, 0
    for before, after in pairwise(samples):
        if all(before.queued.get(party, 0) and after.queued.get(party, 0) for party in parties):
            window_s += after.now_s - before.now_s
            num_moments += 1
            for party in parties:
                served[party] += after.served.get(party, 0) - before.served.get(party, 0)
    rates = {tenant: _ratio(served[tenant, p], window_s * weights.get(tenant, 1.0)) for tenant, p in parties}
    is_known = len(rates) > 1 and num_moments >= MIN_WINDOW_SAMPLES
    worst = _ratio(max(rates.values()), min(rates.values())) if is_known else math.nan
    return {"window_s": window_s, "weighted_tokens_per_s": rates, "max_over_min": worst}


def _classes(requests: Sequence[SimulatedRequest], result: SimulationResult) -> dict[str, dict[str, float]]:
    """By priority: how many, wait (arrival to a place in a batch) and TTFT."""
    waits: defaultdict[int, list[float]] = defaultdict(list)
    ttfts: defaultdict[int, list[float]] = defaultdict(list)
    for index, request in enumerate(requests):
        request_id = RequestId(f"r{index}")
        if request_id in result.start_s:
            waits[request.priority].append(result.start_s[request_id] - request.arrival_s)
        if request_id in result.first_token_s:
            ttfts[request.priority].append(result.first_token_s[request_id] - request.arrival_s)
    return {
        str(priority): {
            "requests": sum(r.priority == priority for r in requests),
            "wait_s_p50": percentile(waits[priority], 50),
            "wait_s_p99": percentile(waits[priority], 99),
            "ttft_s_mean": _mean(ttfts[priority]),
            "ttft_s_p50": percentile(ttfts[priority], 50),
            "ttft_s_p99": percentile(ttfts[priority], 99),
        }
        for priority in sorted({r.priority for r in requests})
    }


def _num_finished_tokens(cell: Simulation) -> int:
    """Output tokens of requests that have finished."""
    records = cell.cell.records
    return sum(sum(records[i].num_tokens) for i, reason in cell.result.ended.items() if reason == "finished")


def _spread(cell: Simulation) -> dict[str, int]:
    """The most and the fewest dispatches that any of the workers that are there has had."""
    counts = Counter(worker_id for _, worker_id in cell.result.dispatched)
    each = [counts[worker_id] for worker_id in cell.cell.workers]
    return {"most": max(each, default=0), "fewest": min(each, default=0)}


def _worker_hours(samples: Sequence[Sample]) -> float:
    return sum(a.num_workers * (b.now_s - a.now_s) for a, b in pairwise(samples)) / 3600


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else math.nan


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan

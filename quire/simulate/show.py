"""A simulation's figures as people read them: text, and charts over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from quire.bench.svg import Lines
from scheduler_svc.simulation_trace import Sample

MAX_POINTS = 120
MAX_LINES = 6


def format_summary(figures: dict[str, Any]) -> str:
    """A few lines."""
    ended = ", ".join(f"{count:,} {reason}" for reason, count in sorted(figures["ended"].items()))
    kv, fairness, spread = figures["kv_use_percent"], figures["fairness"], figures["requests_by_worker"]
    lines = [
        f"requests       {figures['requests']:,}: {ended}",
        f"simulated      {figures['simulated_s']:,.1f} s, {figures['steps']:,} steps",
        f"workers        {figures['workers_max']:,} at most, {figures['worker_hours']:,.2f} worker-hours",
        f"computed       {figures['tokens_computed']:,} tokens; {_number(figures['prefix_hit_percent'])} % of those of "
        f"admitted requests were found in prefix caches",
        f"dispatched     {spread['fewest']:,} to {spread['most']:,} requests to each worker",
        f"throughput     {figures['requests_per_s']:,.2f} requests/s, {figures['tokens_per_s']:,.0f} output tokens/s, "
        f"{figures['goodput_tokens_per_s']:,.1f} of finished requests",
        f"KV cache       {_number(kv['mean'])} % in use on average, {_number(kv['max'])} % at most",
        f"gave way       {figures['preemptions']:,} preempted, {figures['evictions']:,} evicted by workers; "
        f"{figures['blocks_swapped_out']:,} blocks copied to host memory, {figures['blocks_swapped_in']:,} back",
        "",
        "class      requests   wait p50    wait p99    TTFT p50    TTFT p99   [s]",
    ]
    for name, row in figures["classes"].items():
        times = (row["wait_s_p50"], row["wait_s_p99"], row["ttft_s_p50"], row["ttft_s_p99"])
        lines.append(f"{name:<10}{row['requests']:9,}" + "".join(f"{_number(time, 3):>11} " for time in times))
    lines += ["", *_format_fairness(fairness), ""]
    rates = (_number(figures["events_per_policy_s"], 0), _number(figures["decisions_per_policy_s"], 0))
    lines += [
        f"run            {figures['wall_s']:,.1f} s by the clock, {figures['cpu_s']:,.1f} s of CPU time, of which "
        f"{figures['policy_s']:,.2f} in the policy",
        f"policy         {figures['events']:,} events, {figures['decisions']:,} decisions: {rates[0]} events/s, "
        f"{rates[1]} decisions/s",
    ]
    return "\n".join(lines)


def charts(samples: Sequence[Sample]) -> list[Lines]:
    """Requests, KV cache, and each tenant's tokens a second, over time."""
    chosen = samples[:: max(1, math.ceil(len(samples) / MAX_POINTS))]
    tenants = sorted({tenant for tenant, _ in chosen[-1].queued})[:MAX_LINES]
    rates = {
        tenant: [
            (b.now_s, (_served(b, tenant) - _served(a, tenant)) / (b.now_s - a.now_s)) for a, b in pairwise(chosen)
        ]
        for tenant in tenants
    }
    requests = {
        "queued": [(s.now_s, float(sum(s.queued.values()))) for s in chosen],
        "with a worker": [(s.now_s, float(s.num_running)) for s in chosen],
    }
    workers = {"serving or starting": [(s.now_s, float(s.num_workers)) for s in chosen]}
    kv = {"KV blocks": [(s.now_s, 100 * s.used_blocks / s.num_blocks) for s in chosen if s.num_blocks]}
    return [
        Lines(title="requests", x_label="s", y_label="requests", series=requests),
        Lines(title="workers", x_label="s", y_label="workers", series=workers),
        Lines(title="KV cache in use", x_label="s", y_label="%", series=kv),
        Lines(title="tokens served by tenant", x_label="s", y_label="tokens/s", series=rates),
    ]


def _served(sample: Sample, tenant: str) -> int:
    return sum(tokens for (name, _), tokens in sample.served.items() if name == tenant)


def _format_fairness(fairness: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for priority, row in fairness.items():
        rates, ratio = row["weighted_tokens_per_s"], row["max_over_min"]
        if math.isnan(ratio):
            why = "one tenant" if len(rates) < 2 else "its tenants hardly ever waited together"
            lines.append(f"fairness       class {priority}: {why}, nothing to compare")
            continue
        shares = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        lines.append(f"fairness       class {priority}: largest over smallest share {ratio:.3f}")
        lines.append(f"               tokens/s over weight, in {row['window_s']:,.1f} s in which all waited: {shares}")
    return lines


def _number(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"

"""Swap against recompute in a cell that thrashes: the row of docs/simulate.md, with fewer requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from quire.simulate.run import simulate
from quire.simulate.settings import SimulateConfig, TrafficConfig, WorkersConfig
from quire.simulate.summary import Took, summarize
from quire.simulate.traffic import make_traffic
from shared.config import SchedulingConfig

TRAFFIC = TrafficConfig(requests=50, load=3.0, prompt_len=64, output_len=256, max_tokens=768, request_timeout_s=7200.0)


@cache
def figures_of(mode: str, copy_ratio: float) -> dict[str, Any]:
    """A worker with blocks for a third of its slots, and no headroom at admission."""
    fleet = WorkersConfig(workers=1, num_blocks=96, swap_blocks=512, copy_ratio=copy_ratio, preemption_mode=mode)
    settings = SimulateConfig(traffic=TRAFFIC, fleet=fleet, scheduling=SchedulingConfig(admission_headroom=0))
    requests = make_traffic(TRAFFIC, fleet)
    return summarize(simulate(settings, requests), requests, Took(wall_s=0.0, cpu_s=0.0), {})


def goodput(mode: str, copy_ratio: float) -> float:
    """Output tokens of finished requests a second; recomputing costs the same whatever copying does."""
    found = figures_of(mode, 1.0 if mode == "recompute" else copy_ratio)
    assert found["ended"] == {"finished": TRAFFIC.requests}
    assert found["preemptions"] + found["evictions"] > TRAFFIC.requests, "too easy to tell"
    return float(found["goodput_tokens_per_s"])


@pytest.mark.parametrize("copy_ratio", [0.1, 1.0, 10.0])
def test_auto_is_nearly_as_good_as_the_better_way(copy_ratio: float) -> None:
    """Whatever copying costs, choosing for each victim should give at least 95 % of the better way for all."""
    better = max(goodput("swap", copy_ratio), goodput("recompute", copy_ratio))
    assert goodput("auto", copy_ratio) >= 0.95 * better


def test_the_two_ways_differ() -> None:
    """Where copying is cheap swap should win, where it is dear recompute should, or there would be nothing to choose;
    what goes out comes back, but for nobody when all is computed again."""
    assert goodput("swap", 0.1) > 1.1 * goodput("recompute", 0.1)
    assert goodput("recompute", 10.0) > 1.1 * goodput("swap", 10.0)
    swapped, computed = figures_of("swap", 0.1), figures_of("recompute", 1.0)
    assert swapped["blocks_swapped_out"] == swapped["blocks_swapped_in"] > 0
    assert computed["blocks_swapped_out"] == computed["blocks_swapped_in"] == 0

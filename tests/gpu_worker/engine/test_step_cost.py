"""How much of a prompt fits into a step's time."""

from __future__ import annotations

import pytest

from gpu_worker.engine.step_cost import FIRST_UNITS, MIN_UNITS, StepCost


def test_units_are_tokens_and_the_keys_that_they_see() -> None:
    """Two tokens behind ten others see 11 and 12 keys."""
    assert StepCost(0.5).units(10, 2) == pytest.approx(2 + 0.5 * (11 + 12))


@pytest.mark.parametrize("key_cost", [0.0, 0.001, 0.3])
@pytest.mark.parametrize("start", [0, 1, 5000])
def test_longest_chunk_costs_what_is_left_and_no_more(key_cost: float, start: int) -> None:
    """One token more than the longest chunk should be too much."""
    cost = StepCost(key_cost)
    length = cost.longest(start, 1000.0)
    assert cost.units(start, length) <= 1000.0 + 1e-6 < cost.units(start, length + 1)


def test_cost_follows_the_steps() -> None:
    """After steps of 2 ms a unit, 100 ms should hold about 50 units; after faster ones, more."""
    cost = StepCost(0.0)
    assert cost.units_within(0.1) == FIRST_UNITS
    for _ in range(20):
        cost.observe(40.0, 0.08)
    assert cost.units_within(0.1) == pytest.approx(50.0)
    for _ in range(20):
        cost.observe(40.0, 0.04)
    assert cost.units_within(0.1) == pytest.approx(100.0, rel=0.05)


def test_an_interrupted_step_and_small_ones_change_little() -> None:
    """A step that slept for a minute should not shrink the next ones to nothing, nor should decode steps count."""
    cost = StepCost(0.0)
    cost.observe(50.0, 0.1)
    cost.observe(50.0, 60.0)
    cost.observe(MIN_UNITS - 1, 60.0)
    assert cost.units_within(0.1) > 40.0

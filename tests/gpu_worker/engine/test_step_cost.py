"""How much of a prompt fits into a step's time."""

from __future__ import annotations

import random

import pytest

from gpu_worker.engine.step_cost import FIRST_UNITS, StepCost


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


def test_fixed_cost_and_slope_are_told_apart() -> None:
    """30 ms and 0.5 ms a unit: decode steps and mixed ones together should give both."""
    cost = StepCost(0.0)
    for units in (8.0, 8.0, 150.0, 60.0, 8.0, 200.0, 8.0):
        cost.observe(units, 0.03 + 0.0005 * units)
    assert cost.fixed_s == pytest.approx(0.03, rel=0.01)
    assert cost.unit_s == pytest.approx(0.0005, rel=0.01)
    assert cost.units_within(0.1) == pytest.approx(140.0, rel=0.01)
    assert cost.step_s(140.0) == pytest.approx(0.1, rel=0.01)


def test_cost_follows_the_steps() -> None:
    """After a machine became faster, more should fit; after it became slower, less."""
    cost = StepCost(0.0)
    assert cost.units_within(0.1) == FIRST_UNITS
    for unit_s, units in ((0.002, 35.0), (0.001, 70.0), (0.002, 35.0)):
        for _ in range(50):
            cost.observe(8.0, 0.03 + 8 * unit_s)
            planned = cost.units_within(0.1)
            cost.observe(planned, 0.03 + planned * unit_s)
        assert cost.units_within(0.1) == pytest.approx(units, rel=0.05)


def test_the_slope_is_kept_while_steps_are_of_one_size() -> None:
    """A thousand decode steps, noisy ones, should not forget what a prompt's token costs."""
    cost = StepCost(0.0)
    for i in range(40):
        units = 8.0 if i % 2 else 200.0
        cost.observe(units, 0.03 + 0.0005 * units)
    noise = random.Random(1)
    for _ in range(1000):
        cost.observe(8.0, 0.034 * noise.uniform(0.95, 1.05))
    assert cost.unit_s == pytest.approx(0.0005, rel=0.1)


@pytest.mark.parametrize("seconds", [0.05, 0.15, 0.5])
@pytest.mark.parametrize("memory_s", [0.0, 0.034, 0.12])
def test_planned_steps_come_near_their_time_and_never_far_beyond(memory_s: float, seconds: float) -> None:
    """Where a step takes the longer of reading weights and of arithmetic, planning by what was learned should never
    take much more than asked (after the first step), and soon almost as much."""
    cost = StepCost(0.0)

    def take(units: float) -> float:
        return max(memory_s, 0.0003 * units) + 0.002

    for _ in range(30):
        cost.observe(8.0, take(8.0))
    taken = []
    for _ in range(60):
        units = max(16.0, cost.units_within(seconds))
        taken.append(take(units))
        cost.observe(units, taken[-1])
    shortest = take(16.0)
    assert max(taken) <= max(1.1 * seconds, shortest)
    assert taken[-1] >= 0.8 * seconds


def test_a_cold_first_step_is_forgotten() -> None:
    """A first step of many times its length should not keep the next ones short."""
    cost = StepCost(0.0)
    cost.observe(512.0, 1.3)
    for _ in range(10):
        planned = cost.units_within(0.15)
        cost.observe(planned, 0.03 + 0.0003 * planned)
    assert cost.units_within(0.15) == pytest.approx(400.0, rel=0.1)


def test_an_interrupted_step_changes_little() -> None:
    """A step that slept for a minute should not shrink the next ones to nothing."""
    cost = StepCost(0.0)
    for _ in range(5):
        cost.observe(50.0, 0.1)
        cost.observe(25.0, 0.06)
    before = cost.units_within(0.1)
    cost.observe(50.0, 60.0)
    assert cost.units_within(0.1) > before / 3
    for _ in range(5):
        planned = cost.units_within(0.1)
        cost.observe(planned, 0.02 + 0.0016 * planned)
        cost.observe(25.0, 0.06)
    assert cost.units_within(0.1) > 0.8 * before

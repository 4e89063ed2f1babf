"""A static batch runs to its end, with a row for each of its sequences in every step."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tests.gpu_worker.engine.workload import Driver, make_engine, make_random_sequence, make_sequence
from tests.scripted_runner import ScriptedRunner


@pytest.mark.parametrize("goes_on", [None, lambda: True], ids=["one by one", "ahead"])
def test_who_has_ended_should_stay_as_padding(goes_on: Callable[[], bool] | None) -> None:
    """Every step of a batch should have a row for each of its sequences; the next batch comes when all have ended."""
    runner = ScriptedRunner(64)
    driver = Driver(make_engine(runner, max_num_seqs=3, is_static=True), runner, goes_on=goes_on)
    sequences = [make_sequence(f"r{i}", [i, 1, 2], rank=i, max_tokens=4 + 4 * (i % 3)) for i in range(5)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    rows = [[chunk.is_padding for chunk in plan.chunks] for plan in runner.plans]
    if goes_on is None:
        assert [len(row) for row in rows] == 12 * [3] + 8 * [2]
        assert [sum(row) for row in rows] == 4 * [0] + 4 * [1] + 4 * [2] + 4 * [0] + 4 * [1]
    assert driver.engine.view().num_padded_rows == (16 if goes_on is None else 13)
    first = {chunk.sequence.request_id for plan in runner.plans[:12] for chunk in plan.chunks}
    assert first == {"r0", "r1", "r2"}


@pytest.mark.parametrize("goes_on", [None, lambda: True], ids=["one by one", "ahead"])
@pytest.mark.parametrize("seed", range(6))
def test_tokens_should_be_those_of_an_undisturbed_run(goes_on: Callable[[], bool] | None, seed: int) -> None:
    """Arrivals, ends by stop tokens, aborts and evictions in a small pool should change no token and leak no block."""
    rng = random.Random(seed)
    runner = ScriptedRunner(24, 16)
    driver = Driver(make_engine(runner, max_num_seqs=6, is_static=True), runner, goes_on=goes_on)
    sequences = [make_random_sequence(rng, number) for number in range(24)]
    coming, gone = list(sequences), set()
    while coming or driver.engine.has_work:
        if coming and rng.random() < 0.5:
            driver.engine.add(coming.pop(0))
        if rng.random() < 0.05:
            gone.add(name := rng.choice(sequences).request_id)
            driver.engine.drop(name)
        if driver.engine.has_work:
            driver.step()
    driver.run_until_idle()
    driver.assert_as_solo([s for s in sequences if s.request_id not in gone])

"""Sequences with adapters in the planner: how many run, and in which order."""

from __future__ import annotations

import random

import pytest

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from tests.gpu_worker.engine.workload import MAX_MODEL_LEN, Driver, make_random_sequence, make_sequence
from tests.scripted_runner import ScriptedRunner


def make_driver(max_adapters: int, *, num_blocks: int = 64) -> Driver:
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=4)
    engine = Engine(runner, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=64,
                    max_adapters=max_adapters)  # fmt: skip
    return Driver(engine, runner, goes_on=lambda: True)


def with_adapter(sequence: Sequence, adapter: str | None) -> Sequence:
    sequence.adapter = adapter
    return sequence


def adapters_of_plans(driver: Driver) -> list[set[object]]:
    return [{chunk.sequence.adapter for chunk in plan.chunks} - {None} for plan in driver.runner.plans]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_blocks", [200, 40])
def test_no_step_has_more_adapters_than_may_be(seed: int, num_blocks: int) -> None:
    """Whatever comes, is dropped, evicted or suspected, steps should have few enough adapters, and all should end as if
    alone."""
    rng = random.Random(seed)
    driver = make_driver(2, num_blocks=num_blocks)
    sequences = []
    for number in range(40):
        sequence = make_random_sequence(rng, number)
        sequence.is_alone = rng.random() < 0.1
        sequences.append(with_adapter(sequence, rng.choice((None, "a", "b", "c", "d"))))
        driver.engine.add(sequences[-1])
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert max(map(len, adapters_of_plans(driver))) == 2


def test_no_adapter_starves_another() -> None:
    """While requests of one adapter keep coming, one of another should run as soon as those before it have ended;
    requests without an adapter should not wait meanwhile."""
    driver = make_driver(1)
    driver.engine.add(with_adapter(make_sequence("a0", rank=0), "a"))
    driver.step()
    driver.engine.add(with_adapter(make_sequence("b", rank=1), "b"))
    driver.engine.add(make_sequence("plain", rank=2))
    for number in range(1, 6):
        driver.engine.add(with_adapter(make_sequence(f"a{number}", rank=10 + number), "a"))
    order = []
    while driver.engine.has_work:
        order += [new.request_id for new in driver.step().entries if new.finish]
    assert order.index("b") < min(order.index(f"a{number}") for number in range(1, 6))
    assert order[0] == "a0"
    assert order.index("plain") < order.index("b")


def test_many_adapters_share_a_step() -> None:
    """Up to the limit requests of different adapters should run at once."""
    driver = make_driver(3)
    for number, adapter in enumerate((None, "a", "b", "c")):
        driver.engine.add(with_adapter(make_sequence(f"r{number}", rank=number), adapter))
    driver.run_until_idle()
    assert {"a", "b", "c"} in adapters_of_plans(driver)

"""Whatever happens around a sequence, it draws the tokens that it would have drawn alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.sequence import Sequence, SequenceStatus
from tests.gpu_worker.engine.workload import Driver, make_engine, make_random_sequence
from tests.scripted_runner import ScriptedRunner


@pytest.mark.parametrize("budget", [1, 32, 100, 512])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("goes_on", [None, lambda: True], ids=["one by one", "ahead"])
def test_tokens_should_equal_the_solo_run_in_a_tiny_pool(
    block_size: int, budget: int, goes_on: Callable[[], bool] | None
) -> None:
    """Thirty-two arrivals at random moments, in a pool that forces evictions, should each be as alone."""
    rng = random.Random(block_size * 1000 + budget)
    runner = ScriptedRunner(304 // block_size, block_size)
    driver = Driver(make_engine(runner, max_num_batched_tokens=budget), runner, budget=budget, goes_on=goes_on)
    sequences = [make_random_sequence(rng, number, max_tokens=90, is_long=True) for number in range(32)]
    for sequence in sequences:
        driver.engine.add(sequence)
        for _ in range(rng.randrange(3)):
            driver.step()
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert driver.engine.num_evictions >= (5 if budget > 1 else 0)
    used = {id(plan) for plan in runner.plans} & {id(plan) for plan in runner.prepared}
    assert (len(used) > len(runner.plans) // 4) == (goes_on is not None), "steps should be made ready if they may be"


@pytest.mark.case(77)
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([8, 16]),
    budget=st.sampled_from([1, 7, 32, 100]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
    ahead=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_invariants_should_hold_for_any_history(
    *, seed: int, num_blocks: int, block_size: int, budget: int, max_num_seqs: int, ahead: float
) -> None:
    """Arrivals, cancels, preempts with a later return, and suspects in any order, while a share of `ahead` of the
    steps goes on with the next one: blocks never leak or are owned twice, the budget holds, the first in rank moves on
    in each step, and tokens are as solo."""
    rng = random.Random(seed)
    runner = ScriptedRunner(num_blocks, block_size)
    engine = make_engine(runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    driver = Driver(engine, runner, budget=budget, goes_on=(lambda: rng.random() < ahead) if ahead else None)
    sequences = [make_random_sequence(rng, n, max_tokens=30) for n in range(12)]
    dropped: set[str] = set()
    alive: dict[str, Sequence] = {}
    arriving: Iterator[Sequence] = iter(sequences)
    for _ in range(120):
        match rng.randrange(12):
            case 0 | 1 | 2:
                if (sequence := next(arriving, None)) is not None:
                    sequence.is_alone = rng.random() < 0.2
                    alive[sequence.request_id] = sequence
                    engine.add(sequence)
            case 3 if alive:
                name = rng.choice(sorted(alive))
                if engine.drop(alive.pop(name).request_id):
                    dropped.add(name)
            case 4 if alive:
                back = alive[rng.choice(sorted(alive))]
                if engine.preempt(back.request_id):
                    alive[back.request_id] = _as_dispatched_again(back)
                    engine.add(alive[back.request_id])
            case _ if engine.has_work:
                _step_and_check_progress(driver, list(alive.values()))
        engine.check_integrity()
    for sequence in arriving:
        engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([s for s in sequences if s.request_id not in dropped])


def _as_dispatched_again(sequence: Sequence) -> Sequence:
    return Sequence(
        request_id=sequence.request_id, attempt=sequence.attempt + 1, choice=sequence.choice, rank=sequence.rank,
        token_ids=sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens, sampling=sequence.sampling,
    )  # fmt: skip


def _step_and_check_progress(driver: Driver, sequences: list[Sequence]) -> None:
    """One step; unless someone is alone, the first of those that run should compute at least a token, be it one
    that is admitted now. What was in flight before may be of others."""
    was_computing, number = driver.runner.is_computing, len(driver.runner.plans)
    running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
    has_alone = any(s.is_alone for s in sequences if s.status is not SequenceStatus.ENDED)
    driver.step()
    if was_computing:
        return
    planned = [chunk.sequence for chunk in driver.runner.plans[number].chunks]
    assert len(planned) == 1 if has_alone else planned
    if running and not has_alone:
        assert min(running + planned, key=lambda s: s.rank) in planned


@pytest.mark.parametrize("goes_on", [None, lambda: True], ids=["one by one", "ahead"])
def test_prompts_should_not_be_cut_without_chunking(goes_on: Callable[[], bool] | None) -> None:
    """Every prompt, and what an evicted sequence computes again, should be in one step as a whole, with the tokens of
    an undisturbed run."""
    rng = random.Random(8)
    runner = ScriptedRunner(20, 16)
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=160, is_chunking=False)
    driver = Driver(engine, runner, budget=160, goes_on=goes_on)
    sequences = [make_random_sequence(rng, number, max_tokens=90, is_long=True) for number in range(24)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert driver.engine.num_evictions >= 3
    assert all(chunk.is_sampling for plan in runner.plans for chunk in plan.chunks)

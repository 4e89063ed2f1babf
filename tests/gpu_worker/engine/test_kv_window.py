"""Blocks that fall out of a window are free, and nothing that is still read ever is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.sequence import Sequence
from shared.capacity import blocks_for, resident_tokens
from shared.errors import InvalidRequest
from tests.gpu_worker.engine.random_history import BLOCK_SIZE, RandomHistory, make_sharers
from tests.gpu_worker.engine.workload import Driver, make_engine, make_sequence
from tests.scripted_runner import VOCAB_SIZE, ScriptedRunner

PREFIX = [(7 * i) % VOCAB_SIZE for i in range(120)]


def start(num_blocks: int, window: int, *, block_size: int = 4, budget: int = 16, **engine: object) -> Driver:
    runner = ScriptedRunner(num_blocks, block_size, window=window)
    settings_ = {"has_prefix_cache": True, "max_num_batched_tokens": budget} | engine
    return Driver(make_engine(runner, **settings_), runner, budget=budget)  # type: ignore[arg-type]


def run(driver: Driver, *sequences: Sequence) -> int:
    """How many tokens computing these took, to their end."""
    before = driver.runner.num_computed
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(list(sequences))
    return driver.runner.num_computed - before


def num_used(driver: Driver) -> int:
    view = driver.engine.view()
    return view.num_blocks - view.free_blocks


def test_blocks_in_use_should_stay_flat_while_a_sequence_grows() -> None:
    """A sequence many windows long should hold the blocks of its window, and of a step while its prompt is computed;
    what a report says of it should agree."""
    driver = start(64, window=20)
    driver.engine.add(make_sequence("a", PREFIX, max_tokens=100))
    used = []
    while driver.engine.has_work:
        driver.step()
        used.append(num_used(driver))
        held = driver.engine.view().running.get("a")  # type: ignore[call-overload]
        assert held is None or held.num_blocks == used[-1]
    num_chunks = len(PREFIX) // 16
    assert max(used) <= blocks_for(220, 4, resident_tokens(20, 16))
    assert max(used[num_chunks + 1 : -1]) <= blocks_for(220, 4, 20)
    assert min(used[num_chunks + 1 : -1]) >= 5
    assert driver.engine.view().most_blocks_used <= blocks_for(220, 4, resident_tokens(20, 16))


def test_nothing_should_be_freed_without_a_window() -> None:
    """The same sequence without one should hold all of its blocks."""
    driver = start(64, window=0)
    run(driver, make_sequence("a", PREFIX, max_tokens=100))
    assert driver.engine.view().most_blocks_used == blocks_for(219, 4)


@settings(max_examples=20, deadline=None)
@given(
    window=st.integers(1, 60),
    budget=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    length=st.integers(1, 200),
)
def test_a_pool_of_what_the_formula_says_should_be_enough(
    window: int, budget: int, block_size: int, length: int
) -> None:
    """What the door lets in should run in a pool of just that size, and be refused by one of a block less."""
    limit = length + 30
    num_blocks = blocks_for(limit - 1, block_size, resident_tokens(window, budget))
    driver = start(num_blocks, window, block_size=block_size, budget=budget)
    prompt = [i % VOCAB_SIZE for i in range(length)]
    run(driver, make_sequence("a", prompt, max_tokens=30), make_sequence("b", prompt, max_tokens=30, is_alone=True))
    assert driver.engine.view().most_blocks_used <= num_blocks
    with pytest.raises(InvalidRequest, match="do not fit the KV cache"):
        start(num_blocks - 1, window, block_size=block_size, budget=budget).engine.add(
            make_sequence("a", prompt, max_tokens=30)
        )


def test_should_find_a_prefix_whose_beginning_is_gone() -> None:
    """The next turn of a chat should find the last window, though what lies before it was given away."""
    driver = start(blocks_for(200, 4, resident_tokens(20, 16)), window=20)
    first = make_sequence("a", PREFIX, max_tokens=20)
    run(driver, first)
    turn = make_sequence("b", [*first.token_ids, 1, 2, 3])
    assert run(driver, turn) == 142 - 136 + 1 + 7
    assert turn.num_cached == 136


def test_should_not_find_what_lacks_a_block_of_its_window() -> None:
    """A prompt that leaves a known text earlier than a window before its end should only find what is whole."""
    driver = start(blocks_for(200, 4, resident_tokens(20, 16)), window=20)
    run(driver, make_sequence("a", PREFIX, max_tokens=40))
    other = make_sequence("b", [*PREFIX[:64], 1, 2, 3])
    run(driver, other)
    assert other.num_cached == 0


@pytest.mark.parametrize("ahead", [None, lambda: True], ids=["one by one", "ahead"])
def test_samples_of_a_request_should_share_its_prompt(ahead: object) -> None:
    """Of n samples the first should compute the prompt, the others what their last, part-filled block holds."""
    driver = start(200, window=20, has_prefix_cache=False)
    driver.goes_on = ahead  # type: ignore[assignment]
    samples = [make_sequence("a", [*PREFIX, 1, 2], choice=choice, temperature=1.0) for choice in range(4)]
    assert run(driver, *samples) == 122 + 3 * 2 + 4 * 7


@pytest.mark.parametrize("is_drafting", [False, True])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31), spare=st.integers(0, 25), budget=st.sampled_from([1, 8, 24, 64]),
    window=st.sampled_from([1, 3, 4, 5, 17, 40]),
)  # fmt: skip
def test_should_give_the_same_tokens_whatever_happens(
    seed: int, spare: int, budget: int, window: int, *, is_drafting: bool
) -> None:
    """Prompts that share beginnings and samples of one request, in a pool that hardly holds one of them, with aborts,
    preemptions, failures, priorities, suspects and steps that follow each other: every sequence should give the tokens
    of an undisturbed run, and no slot that a row sees be read that does not hold what it should."""
    rng = random.Random(seed)
    num_blocks = blocks_for(120, BLOCK_SIZE, resident_tokens(window, budget)) + spare
    history = RandomHistory(
        rng, num_blocks, budget, is_drafting=is_drafting, window=window,
        take_out=lambda driver, name: driver.engine.preempt(name),
    )  # fmt: skip
    history.run([s for number in range(rng.randint(2, 10)) for s in make_sharers(rng, number, num_samples=(1, 1, 3))])


def test_shared_blocks_should_be_its_own_no_longer_when_they_fall_out() -> None:
    """Two that found a prefix, but for what lies before the window, should be said to share just the blocks they found,
    fewer as these fall out of the window, and none from then on."""
    driver = start(64, window=20)
    run(driver, make_sequence("a", PREFIX, max_tokens=1))
    sequences = [make_sequence(name, [*PREFIX, 1, 2, 3], max_tokens=40) for name in "bc"]
    for sequence in sequences:
        driver.engine.add(sequence)
    shared = []
    while driver.engine.has_work:
        driver.step()
        for sequence in sequences:
            held = driver.engine.view().running.get(sequence.request_id)
            if held is not None:
                shared.append(held.num_shared_blocks)
                held_places = range(sequence.num_freed_blocks, len(sequence.block_ids))
                assert held.num_shared_blocks == sum(place < 30 for place in held_places), "the first 30 were found"
    assert [sequence.num_cached for sequence in sequences] == [120, 120]
    assert (shared[0], shared[-1]) == (4, 0)  # keys 104 .. 119 of the query at 123, in blocks 26 .. 29
    assert shared == sorted(shared, reverse=True)
    assert set(shared) == {0, 1, 2, 3, 4}

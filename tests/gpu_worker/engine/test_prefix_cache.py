"""What was computed once is found again, only by whom it belongs to, and never before it is there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.sequence import Sequence
from shared.prefix import PrefixNames
from tests.gpu_worker.engine.random_history import POISON, RandomHistory, make_sharers
from tests.gpu_worker.engine.workload import Driver, make_engine, make_sequence
from tests.scripted_runner import VOCAB_SIZE, ScriptedRunner

PREFIX = [(7 * i) % VOCAB_SIZE for i in range(48)]


def start(num_blocks: int = 64, **settings_: object) -> Driver:
    runner = ScriptedRunner(num_blocks)
    return Driver(make_engine(runner, **{"has_prefix_cache": True, **settings_}), runner)  # type: ignore[arg-type]


def run(driver: Driver, *sequences: Sequence) -> int:
    """How many tokens computing these took, to their end."""
    before = driver.runner.num_computed
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(list(sequences))
    return driver.runner.num_computed - before


def test_should_compute_a_known_prefix_once() -> None:
    """A second prompt with the same beginning should compute its own tokens only, and say so."""
    driver = start()
    first, second = make_sequence("a", [*PREFIX, 1, 2]), make_sequence("b", [*PREFIX, 3])
    assert run(driver, first) == 50 + 7
    assert run(driver, second) == 1 + 7
    assert (first.num_cached, second.num_cached) == (0, 48)
    view = driver.engine.view()
    assert (view.num_prefix_queries, view.num_prefix_hits) == (50 + 49, 48)


def test_should_always_compute_the_last_token() -> None:
    """A prompt that is known whole should compute its last block again, since its last token draws the next one."""
    driver = start()
    run(driver, make_sequence("a", PREFIX))
    assert run(driver, again := make_sequence("b", PREFIX)) == 16 + 7
    assert again.num_cached == 32


def test_should_find_what_was_drawn() -> None:
    """The next turn of a chat should find the answer of the last one, too."""
    driver = start()
    first = make_sequence("a", PREFIX, max_tokens=20)
    run(driver, first)
    turn = make_sequence("b", [*first.token_ids, 1, 2, 3])
    run(driver, turn)
    assert turn.num_cached == 64  # 67 of the 68 tokens were computed: four full blocks


@pytest.mark.parametrize("scope", [("other", ""), ("", "x"), ()])
def test_should_never_cross_a_scope(scope: tuple[str, ...]) -> None:
    """Equal prompts of another tenant or salt should find nothing."""
    driver = start()
    run(driver, make_sequence("a", PREFIX, scope=("", "")))
    run(driver, stranger := make_sequence("b", PREFIX, scope=scope))
    assert stranger.num_cached == 0


def test_should_find_nothing_of_others_when_it_is_off() -> None:
    """Without a cache everything should be computed."""
    driver = start(has_prefix_cache=False)
    run(driver, make_sequence("a", PREFIX))
    assert run(driver, make_sequence("b", PREFIX)) == 48 + 7


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_samples_of_a_request_should_share_its_prompt(*, has_prefix_cache: bool) -> None:
    """Of n samples the first should compute the prompt, the others what their last, part-filled block holds."""
    driver = start(num_blocks=3 + 8, max_num_batched_tokens=64, has_prefix_cache=has_prefix_cache)
    samples = [make_sequence("a", [*PREFIX, 1, 2], choice=choice, temperature=1.0) for choice in range(4)]
    assert run(driver, *samples) == 50 + 3 * 2 + 4 * 7
    assert len(driver.runner.plans) == 8, "all should run at the same time"


def test_sharers_that_come_together_should_compute_the_prefix_once() -> None:
    """Of many prompts that come at once with one prefix, longer than a step, the first should compute it for all."""
    prefix = [(5 * i) % VOCAB_SIZE for i in range(160)]
    driver = start(max_num_batched_tokens=64)
    sequences = [make_sequence(f"r{i}", [*prefix, i, i], rank=i) for i in range(6)]
    assert run(driver, *sequences) == 160 + 6 * (2 + 7)
    assert [s.num_cached for s in sequences] == [0] + 5 * [160]


def test_should_share_within_one_step() -> None:
    """Where the step has room, prefix and followers should be computed in the same one."""
    driver = start(max_num_batched_tokens=64)
    for i in range(4):
        driver.engine.add(make_sequence(f"r{i}", [*PREFIX, i], rank=i))
    output = driver.step()
    assert sorted(new.request_id for new in output.entries) == ["r0", "r1", "r2", "r3"]
    assert driver.runner.plans[0].num_tokens == 49 + 3


def test_shared_blocks_should_count_once() -> None:
    """Sequences that share a prefix should fit where their sum would not, and none should be evicted for room."""
    driver = start(num_blocks=3 + 8, max_num_batched_tokens=64)
    sequences = [make_sequence(f"r{i}", [*PREFIX, i], rank=i, max_tokens=3) for i in range(4)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    assert driver.engine.view().num_running == 4
    assert driver.engine.view().free_blocks == 11 - 3 - 4


def test_what_nobody_else_uses_should_be_its_own() -> None:
    """Blocks that a sequence found should be said to stay when it leaves only while another one runs on them: else
    nobody would see that its leaving makes room."""
    driver, prefix = start(), list(range(32))
    run(driver, make_sequence("gone", [*prefix, 1]))
    shared = []
    driver.engine.add(make_sequence("a", [*prefix, 2], max_tokens=12))
    driver.step()
    shared.append(driver.engine.view().running["a"].num_shared_blocks)
    driver.engine.add(make_sequence("b", [*prefix[:20], 3], max_tokens=2))
    driver.step()
    shared += [driver.engine.view().running[name].num_shared_blocks for name in "ab"]
    driver.step()
    driver.step()
    assert [*driver.engine.view().running] == ["a"]
    assert [*shared, driver.engine.view().running["a"].num_shared_blocks] == [0, 1, 1, 0]


def test_should_take_what_has_been_free_for_longest() -> None:
    """When blocks are short, the oldest prefix should go first, and of one prefix its end."""
    driver = start(num_blocks=8)
    old, new = PREFIX, [t + 1 for t in PREFIX]
    run(driver, make_sequence("a", old, max_tokens=1))
    run(driver, make_sequence("b", new, max_tokens=1))
    run(driver, make_sequence("c", [9] * 50, max_tokens=1))  # two blocks were never used: takes two of old
    run(driver, again_new := make_sequence("d", [*new, 1], max_tokens=1))
    assert again_new.num_cached == 48
    run(driver, again_old := make_sequence("e", [*old, 1], max_tokens=1))
    assert again_old.num_cached == 16


def test_nobody_should_wait_for_a_less_urgent_one() -> None:
    """A prompt should not depend on one of lower priority, however much of it that one has begun."""
    driver = start(max_num_batched_tokens=16)
    slow = make_sequence("slow", [*PREFIX, 1], priority=5)
    driver.engine.add(slow)
    driver.step()
    urgent = make_sequence("urgent", [*PREFIX, 2], priority=0)
    driver.engine.add(urgent)
    driver.step()
    assert (slow.num_computed, urgent.num_computed) == (16, 32)  # found the first block, computed the second
    driver.run_until_idle()
    driver.assert_as_solo([slow, urgent])


def test_who_waits_should_take_over_when_the_writer_leaves() -> None:
    """If a writer is dropped before it has computed anything, the first that waits for it should compute the prefix,
    for the others, too."""
    driver = start(max_num_batched_tokens=64)
    driver.goes_on = lambda: False
    long = make_sequence("long", list(range(64)), max_tokens=30)
    sequences = [make_sequence(f"r{i}", [*PREFIX, i], rank=i) for i in range(1, 5)]
    for sequence in (long, *sequences):
        driver.engine.add(sequence)
    driver.step()
    assert [s.num_computed for s in sequences] == [0, 48, 48, 48]  # admitted by a plan that is given up
    driver.engine.drop(sequences[0].request_id)
    assert [s.num_computed for s in sequences[1:]] == [0, 48, 48]
    assert [s.writer for s in sequences[1:]] == [None, sequences[1], sequences[1]]
    driver.run_until_idle()
    driver.assert_as_solo([long, *sequences[1:]])
    assert driver.runner.num_computed == 64 + 29 + 48 + 3 * 8


def test_who_waits_should_not_run_ahead_of_its_writer() -> None:
    """A plan that admitted writer and follower and was given up for somebody more urgent should not leave a follower
    that computes its last token before its prefix is there."""
    driver = start(max_num_batched_tokens=64)
    driver.goes_on = lambda: False
    sequences = [make_sequence("long", list(range(64)), max_tokens=30), make_sequence("writer", [*PREFIX, 1], rank=1)]
    sequences.append(follower := make_sequence("follower", [*PREFIX, 2], rank=2))
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    assert (follower.num_computed, follower.writer) == (48, sequences[1])  # admitted by the plan that is given up
    sequences.append(make_sequence("urgent", list(range(90, 0, -1)), priority=-1))
    driver.engine.add(sequences[-1])
    driver.step()
    assert follower not in [chunk.sequence for chunk in driver.runner.plans[-1].chunks]
    driver.run_until_idle()
    driver.assert_as_solo(sequences)


def test_a_failed_step_should_leave_nothing_to_find() -> None:
    """What a step that raised was to compute should be computed again by whoever shares it."""
    runner = ScriptedRunner(64, poison=POISON)
    driver = Driver(make_engine(runner, has_prefix_cache=True), runner)
    good = [make_sequence(f"r{i}", [*PREFIX, i], rank=i) for i in range(3)]
    bad = make_sequence("bad", [*PREFIX, POISON], rank=1)
    for sequence in (*good, bad):
        driver.engine.add(sequence)
    failed = [pair for _ in range(40) for pair in driver.step().failed if driver.engine.has_work]
    driver.run_until_idle()
    assert failed == [("bad", 1)]
    driver.assert_as_solo(good)


@pytest.mark.parametrize("is_drafting", [False, True])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_blocks=st.integers(30, 70), budget=st.sampled_from([8, 24, 64]))
def test_should_give_the_same_tokens_whatever_is_found(
    seed: int, num_blocks: int, budget: int, *, is_drafting: bool
) -> None:
    """Prompts that share beginnings, in a pool that is too small, with aborts, failures, priorities, suspects and steps
    that follow each other: every sequence should give the tokens of an undisturbed run, and no slot be read that does
    not hold what it should."""
    rng = random.Random(seed)
    history = RandomHistory(
        rng, num_blocks, budget, is_drafting=is_drafting, take_out=lambda driver, name: driver.engine.drop(name)
    )
    history.run([s for number in range(rng.randint(2, 14)) for s in make_sharers(rng, number, scopes=("x",))])


def test_names_should_depend_on_all_that_comes_before() -> None:
    """Names should differ by key, root, order and cut, and be the same however they were made."""
    names, tokens = PrefixNames(b"key", 4), [1, 2, 3, 4, 5, 6, 7, 8, 9]
    whole: list[bytes] = []
    names.extend(whole, names.root(("a", "b")), tokens)
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        names.extend(grown, names.root(("a", "b")), tokens[:end])
    assert grown == whole
    assert len(whole) == 2
    for other, parts, ids in [
        (PrefixNames(b"yek", 4), ("a", "b"), tokens), (names, ("ab", ""), tokens), (names, ("", "ab"), tokens),
        (names, ("b", "a"), tokens), (names, ("a", "b"), [5, 6, 7, 8, 1, 2, 3, 4]),
    ]:  # fmt: skip
        found: list[bytes] = []
        other.extend(found, other.root(parts), ids)
        assert not set(found) & set(whole)


def test_changes_should_be_told_from_the_first_sequence_on() -> None:
    """Names that came and went should be told once each, those of the very first sequence too; none without a cache."""
    driver = start(num_blocks=8)
    first = make_sequence("a", PREFIX, max_tokens=1)
    run(driver, first)
    assert driver.engine.take_prefix_changes() == [(name, True) for name in first.prefix_names]
    assert driver.engine.take_prefix_changes() == []
    run(driver, second := make_sequence("b", [9] * 128, max_tokens=1))
    changes = driver.engine.take_prefix_changes()
    assert {name for name, has_come in changes if has_come} == set(second.prefix_names)
    assert {name for name, has_come in changes if not has_come} == set(first.prefix_names)
    alone = start(has_prefix_cache=False)
    run(alone, make_sequence("a", PREFIX))
    assert alone.engine.take_prefix_changes() == []

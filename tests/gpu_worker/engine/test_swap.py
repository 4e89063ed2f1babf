"""Who gives way may have its blocks copied to host memory, and goes on from there as if nothing had happened."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.engine import EngineBroken
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.swap import SwapSpace
from shared.clock import ManualClock
from shared.ids import RequestId
from shared.preemption import MAX_PLANS_ASIDE
from shared.speculation import parse_speculative_config
from tests.gpu_worker.engine.workload import Driver, make_engine, make_sequence
from tests.scripted_runner import ScriptedHostMemory, ScriptedRunner, draw_repeating

POISON = 96


class SwapDriver(Driver):
    """A driver with the host memory beside its runner."""

    memory: ScriptedHostMemory


def start(
    num_blocks: int = 8, num_swap_blocks: int = 8, *, block_size: int = 4, mode: str = "swap", copy_s: float = 0.0,
    runner: ScriptedRunner | None = None, **settings_: object,
) -> SwapDriver:  # fmt: skip
    runner = runner or ScriptedRunner(num_blocks, block_size)
    memory = ScriptedHostMemory(runner, num_swap_blocks, copy_s)
    engine = make_engine(runner, host_memory=memory, preemption_mode=mode, **settings_)  # type: ignore[arg-type]
    driver = SwapDriver(engine, runner)
    driver.memory = memory
    return driver


def run(driver: Driver, *sequences: Sequence) -> int:
    """How many tokens computing these took, to their end."""
    before = driver.runner.num_computed
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(list(sequences))
    return driver.runner.num_computed - before


def pair() -> list[Sequence]:
    """Two that fit a pool of 8 blocks of 4 at first, and not to their ends."""
    prompts = [[10 * i + j for j in range(6)] for i in range(2)]
    return [make_sequence(f"r{i}", prompt, rank=i, max_tokens=14) for i, prompt in enumerate(prompts)]


def test_who_returns_should_compute_nothing_twice() -> None:
    """A sequence evicted at the wall should come back with all of its tokens: no token is computed twice, and what was
    copied out is copied back and given free."""
    driver = start(num_blocks=7)
    assert run(driver, *pair()) == 2 * (6 + 13)
    view = driver.engine.view()
    assert (view.num_evictions, view.num_swap_preemptions) == (1, 1)
    assert view.num_swapped_out > view.num_swapped_in > 0, "what is still in the cache is not copied back"
    assert view.free_swap_blocks == 8


@pytest.mark.parametrize(("mode", "num_swap_blocks"), [("recompute", 8), ("swap", 1), ("swap", 0)])
def test_should_compute_again_without_room_or_leave(mode: str, num_swap_blocks: int) -> None:
    """Where host memory is too small for a victim, or is not wanted, nothing should be copied."""
    driver = start(num_blocks=7, num_swap_blocks=num_swap_blocks, mode=mode)
    assert run(driver, *pair()) > 2 * (6 + 13)
    assert driver.memory.copies == []
    assert driver.engine.view().num_swap_preemptions == 0


@pytest.mark.parametrize(("copy_s", "is_worth_it"), [(0.001, True), (0.1, False)])
def test_auto_should_take_what_is_cheaper(copy_s: float, *, is_worth_it: bool) -> None:
    """With tokens that take 10 ms each, a block of four tokens should be copied twice if that takes 2 ms and not if it
    takes 200."""
    clock = ManualClock()
    driver = start(num_blocks=7, mode="auto", copy_s=copy_s, clock=clock)
    finish = driver.runner.finish

    def timed() -> list[object]:
        clock.advance(0.01 * driver.runner.plans[-1].num_tokens)
        return finish()  # type: ignore[return-value]

    driver.runner.finish = timed  # type: ignore[assignment,method-assign]
    run(driver, *pair())
    view = driver.engine.view()
    assert view.num_evictions == 1
    assert view.num_swap_preemptions == is_worth_it
    assert view.token_s == pytest.approx(0.01)
    assert view.block_copy_s == copy_s
    driver.engine.add(make_sequence("told", max_tokens=9))
    driver.step()
    driver.engine.preempt(RequestId("told"), keeps=True)
    assert driver.engine.view().num_swap_preemptions == is_worth_it + 1, "whoever says so has looked at what it costs"
    driver.run_until_idle()


def test_what_others_share_should_be_neither_copied_nor_computed_again() -> None:
    """Of two samples of a request the second should come back with the prompt of the first, and copy its own only."""
    driver = start(num_blocks=7)
    samples = [make_sequence("a", [*range(12), 1], choice=i, max_tokens=12) for i in range(2)]
    assert run(driver, *samples) == 13 + 1 + 2 * 11
    out = [copy for copy, _ in driver.memory.copies if not copy.is_back]
    assert driver.engine.view().num_evictions == 1
    assert 0 < len(out) < samples[0].num_known // 4 - 2


def test_host_blocks_behind_what_is_lost_should_be_given_up() -> None:
    """If the shared beginning of a sequence is gone when it returns, it should compute again from there, and its host
    blocks be free."""
    driver = start(num_blocks=9, num_swap_blocks=8, has_prefix_cache=True)
    prompt = list(range(12))
    first, second = make_sequence("a", [*prompt, 1], max_tokens=3), make_sequence("b", [*prompt, 2], rank=1)
    for sequence in (first, second):
        driver.engine.add(sequence)
    driver.step()
    assert driver.engine.view().running["b"].num_shared_blocks == 3
    driver.engine.preempt(second.request_id, keeps=True)
    assert driver.engine.view().running["b"].num_swapped_blocks == 1
    large = make_sequence("large", [(7 * i) % 90 for i in range(31)], max_tokens=2, priority=-1)
    driver.engine.add(large)
    while first.status is not SequenceStatus.ENDED:
        driver.step()
    driver.step()
    assert second.status is SequenceStatus.WAITING
    driver.run_until_idle()
    driver.assert_as_solo([first, second, large])
    assert driver.engine.view().num_swapped_in == 0
    assert driver.engine.view().free_swap_blocks == 8


def test_host_blocks_should_be_free_when_a_request_leaves() -> None:
    """A dropped sequence should leave nothing in host memory, whether or not its copy was made."""
    driver = start(num_blocks=8)
    sequences = pair()
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    driver.engine.preempt(sequences[1].request_id, keeps=True)
    assert driver.engine.view().free_swap_blocks < 8
    driver.engine.drop(sequences[1].request_id)
    assert driver.engine.view().free_swap_blocks == 8
    driver.run_until_idle()
    driver.assert_as_solo(sequences[:1])


@pytest.mark.parametrize("is_going_on", [False, True])
def test_a_kept_request_should_leave_room_for_whom_it_was_preempted(*, is_going_on: bool) -> None:
    """A request set aside should wait even while there is room, let one pass that is more urgent, and come back once
    another has left, with all of its tokens; also if a step was computing it."""
    driver = start(num_blocks=12, max_num_seqs=2)
    driver.goes_on = (lambda: True) if is_going_on else None
    sequences = [make_sequence(f"r{i}", [7 * i + j for j in range(6)], rank=i, max_tokens=8 + 6 * i) for i in range(2)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    assert driver.runner.is_computing == is_going_on
    assert driver.engine.preempt(RequestId("r1"), keeps=True)
    driver.step()
    assert (sequences[1].status, sequences[1].block_ids) == (SequenceStatus.WAITING, [])
    held = driver.engine.view().running["r1"]
    assert (held.num_running, held.num_waiting, held.num_blocks, held.num_swapped_blocks) == (0, 1, 0, 2)
    urgent = make_sequence("urgent", list(range(50, 56)), priority=-1, max_tokens=4)
    driver.engine.add(urgent)
    driver.run_until_idle()
    driver.assert_as_solo([*sequences, urgent])
    view = driver.engine.view()
    assert (view.num_evictions, view.num_preemptions, view.num_swap_preemptions) == (0, 1, 1)
    assert driver.runner.num_computed == 3 * 6 + 7 + 13 + 3 + is_going_on  # what was in flight counts for nothing


def test_a_kept_request_should_come_back_when_another_has_left() -> None:
    """A request set aside should return with the next plan once one that ran has ended, though others still run."""
    driver = start(num_blocks=40)
    sequences = [make_sequence(f"r{i}", [i] * 6, rank=i, max_tokens=5 if i == 1 else 90) for i in range(3)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    driver.engine.preempt(RequestId("r2"), keeps=True)
    while sequences[1].status is not SequenceStatus.ENDED:
        driver.step()
        assert sequences[2].status is SequenceStatus.WAITING
    driver.step()
    assert sequences[2].status is SequenceStatus.RUNNING
    driver.run_until_idle()
    driver.assert_as_solo(sequences)


def test_what_a_failed_step_left_should_not_be_copied() -> None:
    """Those that were in a step that raised should compute again what they had."""
    driver = start(runner=ScriptedRunner(40, 4, poison=POISON))
    good, bad = make_sequence("good"), make_sequence("bad", [1, 2, POISON], rank=1)
    driver.engine.add(good)
    driver.step()
    driver.engine.add(bad)
    failed = [request_id for _ in range(4) for request_id, _ in driver.step().failed]
    driver.run_until_idle()
    assert failed == ["bad"]
    driver.assert_as_solo([good])
    assert driver.memory.copies == []


def test_a_kept_request_should_not_wait_for_ever() -> None:
    """A request set aside for one that never comes should come back after some plans, and at once if nobody runs."""
    driver = start(num_blocks=40)
    sequences = [make_sequence(f"r{i}", [i] * 6, rank=i, max_tokens=90) for i in range(2)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    driver.engine.preempt(RequestId("r1"), keeps=True)
    for _ in range(MAX_PLANS_ASIDE - 1):
        driver.step()
        assert sequences[1].status is SequenceStatus.WAITING
    driver.step()
    assert sequences[1].status is SequenceStatus.RUNNING
    for sequence in sequences:
        driver.engine.preempt(sequence.request_id, keeps=True)
    driver.step()
    assert sequences[0].status is SequenceStatus.RUNNING
    driver.run_until_idle()
    driver.assert_as_solo(sequences)


@pytest.mark.parametrize("has_another_left", [False, True])
def test_copies_should_be_made_while_a_step_computes(*, has_another_left: bool) -> None:
    """What a set-aside request has should be copied beside the step that computes; what comes back for a step that is
    made ready, too, unless somebody left meanwhile whose blocks the step may write."""
    driver = start(num_blocks=60)
    driver.goes_on = lambda: True
    sequences = [make_sequence(f"r{i}", [i] * 6, rank=i, max_tokens=90) for i in range(3)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    driver.engine.preempt(RequestId("r2"), keeps=True)
    for _ in range(MAX_PLANS_ASIDE - 1):
        driver.step()
    assert [is_computing for _, is_computing in driver.memory.copies] == [True, True]
    if has_another_left:
        driver.engine.drop(RequestId("r1"))
    driver.step()
    assert [is_computing for copy, is_computing in driver.memory.copies if copy.is_back][-1:] == [not has_another_left]
    driver.run_until_idle()
    driver.assert_as_solo([s for s in sequences if not has_another_left or s is not sequences[1]])


def test_copies_that_must_wait_should_stay_in_order() -> None:
    """Of copies out, back and out again only those in front of the way back should be made while a step computes whose
    blocks may be free by now, and the others behind it, in their order."""
    pool, runner = BlockPool(4, 4), ScriptedRunner(4, 4)
    memory = ScriptedHostMemory(runner, 4)
    swap = SwapSpace(memory, "swap", StepCost(0.0), pool)
    first, second = make_sequence("a"), make_sequence("b")
    for sequence in (first, second):
        sequence.block_ids, sequence.num_computed = pool.allocate(1), 4
    swap.put_away(first)
    first.num_computed = 0
    swap.bring_back(first)
    swap.put_away(second)
    assert first.num_computed == 4
    swap.copy(is_computing=True, may_bring_back=False)
    assert [copy.is_back for copy, _ in memory.copies] == [False]
    swap.copy()
    assert [copy.is_back for copy, _ in memory.copies] == [False, True, False]
    assert (swap.num_copied_out, swap.num_copied_back) == (2, 1)
    swap.copy()
    assert len(memory.copies) == 3


def test_a_copy_that_seemed_dear_should_be_tried_again() -> None:
    """Where copies are believed to cost three times too much, one victim in some dozens should be copied all the same,
    or nobody would find out that they no longer do."""
    pool, cost = BlockPool(1, 4), StepCost(0.0)
    cost.observe(100.0, 1.0)
    runner = ScriptedRunner(1, 4)
    swap = SwapSpace(ScriptedHostMemory(runner, 99, block_copy_s=3 * 4 * 0.01 / 2), "auto", cost, pool)
    block_ids, tries = pool.allocate(1), []
    for number in range(120):
        victim = make_sequence(f"r{number}")
        victim.block_ids, victim.num_computed = block_ids, 4
        swap.put_away(victim)
        tries += [number] if swap.num_blocks_of(victim) else []
    assert [second - first for first, second in itertools.pairwise(tries)] == [tries[0] + 1] * 2
    assert 30 < tries[0] < 45


def test_a_failed_copy_should_end_the_engine() -> None:
    """If host memory fails, nobody knows what is where: the process should end rather than give wrong tokens."""
    driver = start(num_blocks=7)
    driver.memory.is_broken = True
    with pytest.raises(EngineBroken, match="host memory"):
        run(driver, *pair())


@pytest.mark.parametrize("is_drafting", [False, True])
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_blocks=st.integers(30, 60),
    num_swap_blocks=st.sampled_from([0, 1, 4, 9, 40]),
    budget=st.sampled_from([8, 24, 64]),
    mode=st.sampled_from(["auto", "swap"]),
    has_prefix_cache=st.booleans(),
)
def test_should_give_the_same_tokens_whatever_was_swapped(
    *, seed: int, num_blocks: int, num_swap_blocks: int, budget: int, mode: str, has_prefix_cache: bool,
    is_drafting: bool,
) -> None:  # fmt: skip
    """Samples and prompts that share beginnings, in pools that are too small, with aborts, failures, preemptions that
    keep, suspects, priorities and steps that follow each other: every sequence should give the tokens of an undisturbed
    run, and no slot be read that does not hold what it should."""
    rng = random.Random(seed)
    runner = ScriptedRunner(num_blocks, 4, poison=POISON, draw=draw_repeating)
    speculation = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}') if is_drafting else None
    driver = start(
        0, num_swap_blocks, mode=mode, runner=runner, max_num_seqs=6, max_num_batched_tokens=budget,
        speculation=speculation, has_prefix_cache=has_prefix_cache,
    )  # fmt: skip
    driver.budget, driver.goes_on = budget, lambda: rng.random() < 0.7
    requests = [_make_request(rng, number) for number in range(rng.randint(2, 10))]
    waiting, gone = list(requests), set[str]()
    while waiting or driver.engine.has_work:
        while waiting and rng.random() < 0.5:
            for sequence in waiting.pop(0):
                driver.engine.add(sequence)
        name = rng.choice(requests)[0].request_id
        if rng.random() < 0.2:
            driver.engine.preempt(name, keeps=True)
        elif rng.random() < 0.05:
            gone.add(name)
            driver.engine.drop(name)
        if driver.engine.has_work:
            gone.update(request_id for request_id, _ in driver.step().failed)
    driver.run_until_idle()
    driver.assert_as_solo([s for request in requests for s in request if s.request_id not in gone])
    assert driver.engine.view().free_swap_blocks == num_swap_blocks


def _make_request(rng: random.Random, number: int) -> list[Sequence]:
    """One to three samples of a cut of one of two texts and a few tokens of its own."""
    text = random.Random(rng.randrange(2)).choices(range(POISON), k=60)
    own = rng.choices(range(POISON), k=rng.choice((1, 1, 5, 20)))
    own += [POISON] if rng.random() < 0.05 else []
    prompt, is_alone, priority = text[: 4 * rng.randrange(16)] + own, rng.random() < 0.05, rng.randrange(3)
    return [
        make_sequence(
            f"r{number:02}", prompt, choice=choice, rank=number, is_alone=is_alone, priority=priority,
            max_tokens=rng.randint(1, 25), seed=number,
        )
        for choice in range(rng.choice((1, 1, 2, 3)))
    ]  # fmt: skip

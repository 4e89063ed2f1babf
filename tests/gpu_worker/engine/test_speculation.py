"""Drafts: the same tokens, sooner, in blocks and time that nobody else needs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.chunks import PlannedChunk
from gpu_worker.engine.drafter import Drafter
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_cost import StepCost
from shared.messages import SamplingParams
from shared.speculation import SpeculationConfig
from tests.gpu_worker.engine.workload import MAX_MODEL_LEN, Driver, make_engine, make_random_sequence, make_sequence
from tests.scripted_runner import DrawnToken, ScriptedRunner, draw_repeating

SPECULATION = SpeculationConfig(num_tokens=5, lookup_max=3, lookup_min=1)
PHRASE = [11, 12, 13, 14, 15, 16]


def draw_phrase(known: list[int], num_output: int, choice: int, sampling: SamplingParams) -> DrawnToken:
    """Always the token that comes after the last one in `PHRASE`, round and round."""
    return DrawnToken(PHRASE[(PHRASE.index(known[-1]) + 1) % len(PHRASE)])


def make_driver(
    num_blocks: int = 64, block_size: int = 16, *, budget: int = 64, max_num_seqs: int = 64, draw: object = draw_phrase
) -> Driver:
    runner = ScriptedRunner(num_blocks, block_size, draw=draw)  # type: ignore[arg-type]
    engine = make_engine(runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, speculation=SPECULATION)
    return Driver(engine, runner, budget=budget)


def drafts_of(driver: Driver) -> list[tuple[int, ...]]:
    return [chunk.draft for chunk in driver.runner.plans[-1].chunks]


def test_a_right_draft_gives_several_tokens_in_a_step() -> None:
    """A text that repeats a phrase should take about one step for six tokens, and count what was drafted."""
    driver = make_driver()
    sequence = make_sequence("a", PHRASE * 2, max_tokens=60)
    driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([sequence])
    view = driver.engine.view()
    assert view.num_steps == 11
    assert view.num_generation_tokens == 60
    assert (view.num_drafts, view.num_draft_tokens, view.num_accepted_tokens) == (10, 49, 49)


def test_wrong_drafts_are_thrown_away_and_end() -> None:
    """Where the text never goes on as before, tokens should be right all the same, and drafts should stop."""
    driver = make_driver(draw=None)
    sequence = make_sequence("a", PHRASE * 8, max_tokens=150)
    driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([sequence])
    view = driver.engine.view()
    assert view.num_accepted_tokens < 5 < view.num_draft_tokens
    assert not any(chunk.draft for plan in driver.runner.plans[-30:] for chunk in plan.chunks)


def test_a_stop_token_among_the_right_ones_ends_the_sequence_there() -> None:
    """Nothing should follow a stop token, though the draft went on and was right."""
    driver = make_driver()
    sequence = make_sequence("a", PHRASE * 2, max_tokens=60, stop_token_ids=(PHRASE[3],), min_tokens=13)
    driver.engine.add(sequence)
    outputs = [driver.step() for _ in range(4)]
    assert not driver.engine.has_work
    assert driver.tokens["a", 0] == (PHRASE * 3)[:16]
    assert driver.finish == {("a", 0): "stop"}
    assert [len(output.entries[0].entries) for output in outputs] == [1, 6, 6, 4]
    assert driver.engine.view().num_generation_tokens == 16


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6, 7, 8, 13])
def test_max_tokens_holds_exactly(max_tokens: int) -> None:
    """A draft should never bring more tokens than were asked for, nor be computed beyond them."""
    driver = make_driver()
    sequence = make_sequence("a", PHRASE * 2, max_tokens=max_tokens)
    driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([sequence])
    assert all(len(draft) < max_tokens for plan in driver.runner.plans for draft in [plan.chunks[0].draft])


def test_the_context_and_the_pool_hold_exactly() -> None:
    """A sequence that may fill the context, in a pool of just that size, should do so."""
    driver = make_driver(MAX_MODEL_LEN // 16)
    sequence = make_sequence("a", PHRASE * 40, max_tokens=100)
    driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([sequence])
    assert driver.engine.view().num_accepted_tokens > 5


def test_wrong_drafts_change_nothing_about_who_runs() -> None:
    """In a pool where each block counts, drafts should take free blocks only and give them back: with drafts that are
    all wrong every step should run, evict and leave free just what it does without speculation."""
    histories = []
    for speculation in (SPECULATION, None):
        runner = ScriptedRunner(9, 4)
        driver = Driver(make_engine(runner, speculation=speculation), runner)
        sequences = [make_sequence(name, PHRASE * 2, rank=rank, max_tokens=20) for rank, name in enumerate("abc")]
        for sequence in sequences:
            driver.engine.add(sequence)
        history = []
        while driver.engine.has_work:
            driver.step()
            view, chunks = driver.engine.view(), runner.plans[-1].chunks
            shapes = [(chunk.sequence.request_id, chunk.start, chunk.length) for chunk in chunks]
            history.append((shapes, view.num_evictions, view.free_blocks))
        driver.assert_as_solo(sequences)
        assert view.num_accepted_tokens == 0
        assert (view.num_draft_tokens > 10) == (speculation is not None)
        histories.append(history)
    assert histories[0] == histories[1]
    assert histories[0][-1][1] > 0


def test_drafts_take_no_block_while_somebody_waits() -> None:
    """Blocks that a waiting sequence needs should not go to drafts: only tokens that fit the blocks in hand do."""
    driver = make_driver(num_blocks=10, block_size=4, max_num_seqs=64)
    talker = make_sequence("talker", PHRASE * 2, max_tokens=28)
    driver.engine.add(talker)
    driver.step()
    driver.engine.add(make_sequence("waiting", PHRASE * 5, rank=1, max_tokens=2))
    driver.step()
    (draft,) = drafts_of(driver)
    assert len(draft) == 3
    assert len(talker.block_ids) == 4


def test_prompts_move_on_beside_drafts() -> None:
    """All drafts together should leave half of what the step has left to prompts."""
    driver = make_driver(budget=9)
    talkers = [make_sequence(name, PHRASE * 2, rank=rank, max_tokens=90) for rank, name in enumerate("abc")]
    for talker in talkers:
        driver.engine.add(talker)
    while any(talker.num_output < 2 for talker in talkers):
        driver.step()
    driver.engine.add(make_sequence("reader", PHRASE * 4, rank=9))
    driver.step()
    assert [(chunk.length, len(chunk.draft)) for chunk in driver.runner.plans[-1].chunks] == [
        (1, 3), (1, 0), (1, 0), (3, 0),
    ]  # fmt: skip


def test_penalties_have_no_drafts() -> None:
    """Sequences whose logits depend on earlier tokens should step by single tokens; others should not."""
    driver = make_driver()
    plain, counted = make_sequence("a", PHRASE * 2), make_sequence("b", PHRASE * 2, rank=1, presence_penalty=0.5)
    driver.engine.add(plain)
    driver.engine.add(counted)
    driver.step()
    driver.step()
    assert [len(draft) for draft in drafts_of(driver)] == [5, 0]


def make_drafter(num_streams: int, *, max_step_s: float = 1.0) -> tuple[StepCost, Drafter, list[PlannedChunk]]:
    """A drafter, and chunks of `num_streams` sequences in the middle of a phrase."""
    pool, cost = BlockPool(1000, 16), StepCost(0.0)
    drafter = Drafter(SPECULATION, cost=cost, pool=pool, max_model_len=MAX_MODEL_LEN, max_step_s=max_step_s)
    chunks = []
    for i in range(num_streams):
        sequence = make_sequence(f"r{i}", PHRASE * 3, max_tokens=90)
        sequence.num_computed = sequence.num_known - 1
        sequence.block_ids = pool.allocate(2)
        drafter.guess(sequence)
        chunks.append(PlannedChunk(sequence, sequence.num_computed, 1, is_sampling=True))
    return cost, drafter, chunks


def test_drafts_follow_what_steps_cost() -> None:
    """Where a step is bound by its weights drafts should be long; where each token costs as much as the first, and the
    streams share the step, there should be none."""
    lengths = []
    for num_streams, prompt_unit_s in ((1, 0.0005), (4, 0.0012), (4, 0.01)):
        cost, drafter, chunks = make_drafter(num_streams)
        for _ in range(20):
            cost.observe(float(num_streams), 0.02)
            cost.observe(100.0, 100.0 * prompt_unit_s)
        lengths.append([len(chunk.draft) for chunk in drafter.extend(chunks, 1000, may_allocate=True)])
    assert lengths == [[5], [4] * 4, [0] * 4]


def test_drafts_keep_to_the_time_of_a_step() -> None:
    """Drafts should take half of what `max_step_s` has left, in order of rank."""
    cost, drafter, chunks = make_drafter(3, max_step_s=0.019)
    for _ in range(20):
        cost.observe(3.0, 0.1)
        cost.observe(100.0, 0.1)
    assert [len(chunk.draft) for chunk in drafter.extend(chunks, 1000, may_allocate=True)] == [5, 3, 0]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([4, 8, 16]),
    budget=st.sampled_from([1, 7, 32, 100]),
    max_num_seqs=st.sampled_from([1, 3, 64]),
)
def test_tokens_are_those_of_single_steps_for_any_history(
    seed: int, num_blocks: int, block_size: int, budget: int, max_num_seqs: int
) -> None:
    """With arrivals, cancels, preempts with a later return and suspects in any order, and step times that make drafts
    pay or not, each choice should draw what it draws alone and one at a time."""
    rng = random.Random(seed)
    runner = ScriptedRunner(max(num_blocks, -(-100 // block_size)), block_size, draw=draw_repeating)
    engine = make_engine(
        runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, speculation=SPECULATION, clock=_Unsteady(rng)
    )
    driver = Driver(engine, runner, budget=budget)
    sequences = [make_random_sequence(rng, n, max_tokens=39) for n in range(12)]
    dropped: set[str] = set()
    alive: dict[str, Sequence] = {}
    arriving: Iterator[Sequence] = iter(sequences)
    for _ in range(100):
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
                driver.step()
        engine.check_integrity()
    for sequence in arriving:
        engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([s for s in sequences if s.request_id not in dropped])


def test_the_property_is_about_drafts() -> None:
    """In a history as above, drafts should be made, and be right and wrong."""
    runner = ScriptedRunner(100, 8, draw=draw_repeating)
    engine = make_engine(runner, speculation=SPECULATION)
    driver, rng = Driver(engine, runner), random.Random(3)
    sequences = [make_random_sequence(rng, n, max_tokens=39, is_long=True) for n in range(12)]
    for sequence in sequences:
        engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    view = engine.view()
    assert 50 < view.num_accepted_tokens < view.num_draft_tokens - 50


class _Unsteady:
    """A clock that is read at both ends of a step, and lets some of them take much longer than others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now = rng, 0.0

    def now(self) -> float:
        self._now += self._rng.choice((0.001, 0.001, 0.02))
        return self._now


def _as_dispatched_again(sequence: Sequence) -> Sequence:
    return Sequence(
        request_id=sequence.request_id, attempt=sequence.attempt + 1, choice=sequence.choice, rank=sequence.rank,
        token_ids=sequence.token_ids, num_prompt_tokens=sequence.num_prompt_tokens, sampling=sequence.sampling,
    )  # fmt: skip

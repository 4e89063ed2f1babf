"""The engine's promises, one by one, on a scripted model."""

from __future__ import annotations

import pytest

from gpu_worker.engine.engine import MAX_FAILURES_IN_A_ROW, EngineBroken
from shared.errors import InvalidRequest
from shared.ids import RequestId
from tests.gpu_worker.engine.workload import MAX_MODEL_LEN, Driver, make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner

POISON = 1000


def make_driver(num_blocks: int = 64, block_size: int = 16, *, budget: int = 64, max_num_seqs: int = 64) -> Driver:
    runner = ScriptedRunner(num_blocks, block_size, poison=POISON)
    engine = make_engine(runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    return Driver(engine, runner, budget=budget)


def test_should_mix_prompt_chunks_with_decodes() -> None:
    """A long prompt should be cut to what the decodes leave of the budget, and decodes should never pause."""
    driver = make_driver(budget=8)
    talker, reader = make_sequence("talker", [1, 2, 3], max_tokens=20), make_sequence("reader", list(range(30)), rank=1)
    driver.engine.add(talker)
    driver.step()
    driver.engine.add(reader)
    driver.step()
    shapes = [(c.sequence.request_id, c.start, c.length, c.is_sampling) for c in driver.runner.plans[-1].chunks]
    assert shapes == [("talker", 3, 1, True), ("reader", 0, 7, False)]
    driver.run_until_idle()
    driver.assert_as_solo([talker, reader])


def test_should_free_blocks_of_a_finished_sequence_for_the_next_plan() -> None:
    """What waits for blocks should run in the very next step after they are free."""
    driver = make_driver(num_blocks=2, block_size=4)
    first, second = make_sequence("a", max_tokens=1), make_sequence("b", rank=1, max_tokens=1)
    driver.engine.add(first)
    driver.engine.add(second)
    driver.step()
    assert driver.finish == {("a", 0): "length"}
    driver.step()
    assert driver.finish == {("a", 0): "length", ("b", 0): "length"}


def test_should_evict_the_highest_rank_and_never_the_lowest() -> None:
    """When blocks run out the youngest should give way, wait in its place, and still draw its own tokens."""
    driver = make_driver(num_blocks=8, block_size=4)
    sequences = [make_sequence(name, rank=rank, max_tokens=15) for rank, name in enumerate("abc")]
    for sequence in reversed(sequences):
        driver.engine.add(sequence)
    while driver.engine.num_evictions == 0:
        driver.step()
    assert (sequences[2].num_computed, sequences[2].block_ids) == (0, [])
    assert all(s.num_computed > 0 for s in sequences[:2])
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert list(driver.finish) == [("a", 0), ("b", 0), ("c", 0)]


def test_should_run_many_choices_in_portions() -> None:
    """Sixteen choices that fit four at a time should all finish, with different tokens each."""
    driver = make_driver(num_blocks=8, block_size=8)
    sequences = [make_sequence(choice=choice) for choice in range(16)]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert len({tuple(tokens) for tokens in driver.tokens.values()}) == 16


def test_should_refuse_what_can_never_fit() -> None:
    """A sequence that fills more than the whole pool should be refused; the largest that fits should run."""
    driver = make_driver(num_blocks=4, block_size=4)
    with pytest.raises(InvalidRequest, match="16 tokens"):
        driver.engine.add(make_sequence("big", max_tokens=13))
    assert not driver.engine.has_work
    largest = make_sequence("largest", max_tokens=12)
    driver.engine.add(largest)
    driver.run_until_idle()
    driver.assert_as_solo([largest])


def test_should_refuse_a_sequence_with_nothing_left_to_draw() -> None:
    """A prompt as long as the context, or an output that is complete, should be refused."""
    driver = make_driver()
    with pytest.raises(InvalidRequest, match="leave none"):
        driver.engine.add(make_sequence(prompt=[1] * 256))
    with pytest.raises(InvalidRequest, match="leave none"):
        driver.engine.add(make_sequence(max_tokens=0))


def test_should_stop_by_token_limit_and_context() -> None:
    """A stop token should count from `min_tokens` on; the limit and the context should end with "length"."""
    driver = make_driver()
    free = make_sequence("free", max_tokens=60)
    driver.engine.add(free)
    driver.run_until_idle()
    stop = driver.tokens["free", 0][4]
    stopping = make_sequence("stopping", max_tokens=60, stop_token_ids=(stop,))
    context = make_sequence("context", [1] * 250, max_tokens=100)
    late = make_sequence("late", max_tokens=60, min_tokens=10, stop_token_ids=(stop,))
    for sequence in (stopping, context, late):
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([stopping, context, late])
    assert driver.finish["stopping", 0] == "stop"
    assert driver.tokens["stopping", 0][-1] == stop
    assert stop not in driver.tokens["late", 0][:10]
    assert (len(driver.tokens["context", 0]), driver.finish["context", 0]) == (6, "length")


def test_should_continue_from_logged_tokens() -> None:
    """A sequence that comes with output should draw exactly what follows it."""
    driver = make_driver()
    whole = make_sequence("whole", max_tokens=20)
    driver.engine.add(whole)
    driver.run_until_idle()
    output = driver.tokens["whole", 0]
    resumed = make_sequence("resumed", max_tokens=20)
    resumed.token_ids += output[:9]
    driver.engine.add(resumed)
    driver.run_until_idle()
    assert driver.tokens["resumed", 0] == output[9:]


def test_should_step_a_suspect_alone_until_it_gains_a_token() -> None:
    """While a suspect reads its prompt nothing else should be in the plan, even if it must take blocks from others."""
    driver = make_driver(num_blocks=8, block_size=4, budget=8)
    others = [make_sequence(name, rank=rank, max_tokens=9) for rank, name in enumerate("ab")]
    for sequence in others:
        driver.engine.add(sequence)
    driver.step()
    driver.step()
    suspects = [make_sequence("s", list(range(18)), choice=choice, rank=9, is_alone=True) for choice in (0, 1)]
    for sequence in suspects:
        driver.engine.add(sequence)
    for _ in range(3):
        driver.step()
        assert [c.sequence for c in driver.runner.plans[-1].chunks] == [suspects[0]]
    assert len(driver.tokens["s", 0]) == 1
    driver.step()
    planned = [c.sequence for c in driver.runner.plans[-1].chunks]
    assert len(planned) > 1, "others should run again"
    assert not suspects[1].is_alone, "the request has a token, so all of its choices are free"
    driver.run_until_idle()
    driver.assert_as_solo([*others, *suspects])


def test_should_drop_one_choice_or_a_whole_request() -> None:
    """What is dropped should free its blocks at once and never show again; the rest should go on."""
    driver = make_driver()
    keep = [make_sequence("keep", choice=0), make_sequence("other")]
    for sequence in (*keep, make_sequence("keep", choice=1), make_sequence("gone")):
        driver.engine.add(sequence)
    driver.step()
    assert driver.engine.drop(RequestId("keep"), 1)
    assert driver.engine.drop(RequestId("gone"))
    assert not driver.engine.drop(RequestId("gone"))
    assert not driver.engine.drop(RequestId("nobody"))
    driver.run_until_idle()
    driver.assert_as_solo(keep)
    assert (len(driver.tokens["keep", 1]), len(driver.tokens["gone", 0])) == (1, 1)


def test_should_count_what_happens() -> None:
    """Prompts should count once with their first token, preemptions should be evictions plus those asked for."""
    driver = make_driver()
    driver.engine.add(make_sequence("a", max_tokens=3))
    driver.engine.add(make_sequence("b", max_tokens=3))
    driver.step()
    assert driver.engine.preempt(RequestId("b"))
    assert not driver.engine.preempt(RequestId("b"))
    driver.run_until_idle()
    view = driver.engine.view()
    assert (view.num_prompt_tokens, view.num_generation_tokens, view.num_steps) == (10, 4, 3)
    assert (view.num_evictions, view.num_preemptions) == (0, 1)


def test_view_should_describe_what_runs() -> None:
    """Reports need blocks and tokens by request of those that run, and how many there are in all."""
    driver = make_driver(num_blocks=4, block_size=4)
    for name, rank in (("a", 0), ("b", 1)):
        driver.engine.add(make_sequence(name, rank=rank))
    driver.step()
    view = driver.engine.view()
    assert (view.free_blocks, view.num_running, view.num_waiting, view.num_held) == (2, 1, 1, 2)
    shown = {r: (h.num_blocks, h.num_tokens, h.num_running, h.num_waiting) for r, h in view.running.items()}
    assert shown == {"a": (2, 6, 1, 0)}


def test_view_should_describe_a_request_of_which_a_part_runs() -> None:
    """All open choices of a request should be counted when one of them runs."""
    driver = make_driver(num_blocks=3, block_size=4)
    for choice in (0, 1):
        driver.engine.add(make_sequence("a", choice=choice))
    driver.step()
    held = driver.engine.view().running[RequestId("a")]
    assert (held.num_blocks, held.num_tokens, held.num_running, held.num_waiting) == (2, 11, 1, 1)


def test_a_suspect_that_is_dropped_should_not_hold_up_the_others() -> None:
    """The others should run again at once when the only suspect leaves, waiting or running."""
    driver = make_driver()
    other = make_sequence("other", max_tokens=30)
    driver.engine.add(other)
    for steps in (0, 1):
        suspect = make_sequence(f"suspect{steps}", list(range(200)), rank=1, is_alone=True)
        driver.engine.add(suspect)
        for _ in range(steps):
            driver.step()
        driver.engine.drop(suspect.request_id)
        driver.step()
        assert [chunk.sequence for chunk in driver.runner.plans[-1].chunks] == [other]


def test_only_the_poisoned_request_should_fail() -> None:
    """When a step raises, the request at fault should fail and its neighbours should be as solo."""
    driver = make_driver()
    good = [make_sequence(name, rank=rank) for rank, name in enumerate("abc")]
    bad = [make_sequence("bad", [1, POISON], choice=0, rank=1), make_sequence("bad", [1], choice=1, rank=1)]
    driver.engine.add(good[0])
    driver.step()
    for sequence in (*good[1:], *bad):
        driver.engine.add(sequence)
    failed = [driver.step().failed for _ in range(5)]
    assert [f for f in failed if f] == [(("bad", 1),)]
    driver.run_until_idle()
    driver.assert_as_solo(good)
    assert not driver.tokens["bad", 0]


def test_a_broken_model_should_end_the_engine() -> None:
    """When everything fails, each alone, the engine should say so rather than fail all requests of the cell."""
    driver = make_driver()
    driver.runner.is_broken = True
    for number in range(MAX_FAILURES_IN_A_ROW + 1):
        driver.engine.add(make_sequence(f"r{number}"))
    failed = [driver.engine.step().failed for _ in range(MAX_FAILURES_IN_A_ROW)]
    assert failed == [(), *(((f"r{n}", 1),) for n in range(MAX_FAILURES_IN_A_ROW - 1))]
    with pytest.raises(EngineBroken):
        driver.engine.step()


def test_failures_with_good_steps_between_should_not_end_the_engine() -> None:
    """However many requests fail, the engine should live as long as others can be computed."""
    driver = make_driver()
    for number in range(MAX_FAILURES_IN_A_ROW + 2):
        driver.engine.add(make_sequence(f"bad{number}", [POISON]))
        assert driver.step().failed == ((f"bad{number}", 1),)
        good = make_sequence(f"good{number}", max_tokens=2)
        driver.engine.add(good)
        driver.run_until_idle()
        driver.assert_as_solo([good])


def test_clear_should_forget_everything() -> None:
    """A worker that starts over should find the whole pool free and no row of the model in use."""
    driver = make_driver()
    for name in "abc":
        driver.engine.add(make_sequence(name))
    driver.step()
    driver.engine.clear()
    driver.run_until_idle(max_steps=0)


def test_reserved_memory_should_hold_as_many_as_it_is_reserved_for() -> None:
    """Where each sequence reserves blocks for the longest length, a pool for two should run two at a time, never evict,
    and share nothing."""
    runner = ScriptedRunner(2 * MAX_MODEL_LEN // 16, 16)
    engine = make_engine(runner, max_num_batched_tokens=128, has_prefix_cache=True, reserved_tokens=MAX_MODEL_LEN)
    driver = Driver(engine, runner, budget=128)
    sequences = [make_sequence(f"r{i}", list(range(40)), rank=i) for i in range(5)]
    for sequence in sequences:
        engine.add(sequence)
    driver.step()
    view = engine.view()
    assert (view.num_running, view.free_blocks, view.num_live_tokens) == (2, 0, 2 * 41)
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert engine.num_evictions == 0
    assert engine.view().num_prefix_hits == 0

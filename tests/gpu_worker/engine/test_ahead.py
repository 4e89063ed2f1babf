"""Steps that are made ready, and begun, before the engine has handed out what the one before them drew."""

from __future__ import annotations

from gpu_worker.engine.sequence import Sequence
from shared.clock import ManualClock
from shared.ids import RequestId
from tests.gpu_worker.engine.workload import MAX_MODEL_LEN, Driver, Engine, make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner

POISON = 1000


def make_driver(num_blocks: int = 64, block_size: int = 16, *, budget: int = 64) -> Driver:
    runner = ScriptedRunner(num_blocks, block_size, poison=POISON)
    return Driver(make_engine(runner, max_num_batched_tokens=budget), runner, budget=budget, goes_on=lambda: True)


def planned(driver: Driver) -> list[Sequence]:
    return [chunk.sequence for chunk in driver.runner.plans[-1].chunks]


def test_should_begin_the_next_step_as_it_was_made_ready() -> None:
    """A step should end with the next one in flight: the very plan that was prepared, with one token more of each."""
    driver = make_driver()
    sequences = [make_sequence(name, rank=rank) for rank, name in enumerate("ab")]
    for sequence in sequences:
        driver.engine.add(sequence)
    driver.step()
    for position in (5, 6):
        assert driver.runner.is_computing
        assert driver.runner.plans[-1] is driver.runner.prepared[-1]
        shapes = [(c.sequence, c.start, c.length, c.is_sampling) for c in driver.runner.plans[-1].chunks]
        assert shapes == [(sequence, position, 1, True) for sequence in sequences]
        driver.step()
    driver.run_until_idle()
    driver.assert_as_solo(sequences)
    assert driver.engine.view().num_steps == 8, "no step should be computed in vain"


def test_should_take_a_sequence_that_stopped_out_of_the_next_step() -> None:
    """A stop token is not foreseen: the step behind it should go on with the others only."""
    driver = make_driver()
    free = make_sequence("free", max_tokens=60)
    driver.engine.add(free)
    driver.run_until_idle()
    stop = driver.tokens["free", 0][4]
    stopping = make_sequence("stopping", max_tokens=60, stop_token_ids=(stop,))
    other = make_sequence("other", rank=1, max_tokens=60)
    for sequence in (stopping, other):
        driver.engine.add(sequence)
    while ("stopping", 0) not in driver.finish:
        driver.step()
    assert driver.runner.is_computing
    assert planned(driver) == [other]
    assert stopping in [chunk.sequence for chunk in driver.runner.prepared[-1].chunks]
    driver.run_until_idle()
    driver.assert_as_solo([stopping, other])


def test_should_foresee_an_end_by_length() -> None:
    """A sequence that comes to its limit should not be in the step that is made ready meanwhile."""
    driver = make_driver()
    short, long = make_sequence("short", max_tokens=3), make_sequence("long", rank=1, max_tokens=9)
    context = make_sequence("context", [1] * (MAX_MODEL_LEN - 3), rank=2, max_tokens=9)
    for sequence in (short, long, context):
        driver.engine.add(sequence)
    driver.run_until_idle()
    driver.assert_as_solo([short, long, context])
    assert driver.runner.plans[1:] == driver.runner.prepared


def test_nothing_computed_for_a_dropped_sequence_should_count() -> None:
    """A sequence that is dropped while its step is in flight should gain nothing; who gets its blocks should draw its
    own tokens."""
    driver = make_driver(num_blocks=4, block_size=8)
    stays, goes = make_sequence("stays", max_tokens=9), make_sequence("goes", rank=1, max_tokens=9)
    for sequence in (stays, goes):
        driver.engine.add(sequence)
    driver.step()
    blocks = set(goes.block_ids)
    assert goes in planned(driver)
    assert driver.engine.drop(goes.request_id)
    heir = make_sequence("heir", list(range(10)), rank=2, max_tokens=9)
    driver.engine.add(heir)
    output = driver.step()
    assert [new.request_id for new in output.entries] == ["stays"]
    assert heir in planned(driver)
    assert blocks <= set(heir.block_ids)
    driver.run_until_idle()
    driver.assert_as_solo([stays, heir])
    assert driver.engine.view().num_generation_tokens == 9 + 1 + 9


def test_should_finish_what_is_in_flight_when_nobody_is_left() -> None:
    """When all are dropped there should be work until the step is over, and nothing in flight afterwards."""
    driver = make_driver()
    driver.engine.add(make_sequence("a"))
    driver.step()
    driver.engine.drop(RequestId("a"))
    assert driver.engine.has_work
    assert driver.step().entries == ()
    driver.run_until_idle(max_steps=0)
    driver.engine.add(make_sequence("b"))
    driver.step()
    driver.engine.clear()
    driver.run_until_idle(max_steps=0)


def test_what_waits_should_run_in_the_step_behind_a_foreseen_end() -> None:
    """When blocks of a sequence at its limit are what another waits for, the next step should be planned afterwards."""
    driver = make_driver(num_blocks=8, block_size=4)
    stays, ends = make_sequence("stays"), make_sequence("ends", list(range(13)), rank=1, max_tokens=1)
    waits = make_sequence("waits", rank=2)
    for sequence in (stays, ends, waits):
        driver.engine.add(sequence)
    driver.step()
    assert planned(driver) == [stays, ends]
    assert not driver.runner.is_computing
    driver.step()
    assert [chunk.sequence for chunk in driver.runner.plans[1].chunks] == [stays, waits]
    driver.run_until_idle()
    driver.assert_as_solo([stays, ends, waits])


def test_an_arrival_should_wait_for_the_step_in_flight_only() -> None:
    """A sequence that comes while a step is in flight should be in the one behind it, with a prompt's first chunk."""
    driver = make_driver(budget=8)
    talker, reader = make_sequence("talker", max_tokens=20), make_sequence("reader", list(range(30)), rank=1)
    driver.engine.add(talker)
    driver.step()
    driver.engine.add(reader)
    driver.step()
    shapes = [(c.sequence, c.start, c.length) for c in driver.runner.plans[-1].chunks]
    assert shapes == [(talker, 6, 1), (reader, 0, 7)]
    driver.step()
    shapes = [(c.sequence, c.start, c.length) for c in driver.runner.plans[-1].chunks]
    assert shapes == [(talker, 7, 1), (reader, 7, 7)]
    driver.run_until_idle()
    driver.assert_as_solo([talker, reader])


def test_should_plan_afterwards_where_somebody_would_be_evicted() -> None:
    """The sequences that are evicted, and when, should be those of an engine that makes nothing ready."""
    plans = []
    for goes_on in (None, lambda: True):
        driver = make_driver(num_blocks=8, block_size=4)
        driver.goes_on = goes_on
        sequences = [make_sequence(name, rank=rank, max_tokens=15) for rank, name in enumerate("abc")]
        for sequence in sequences:
            driver.engine.add(sequence)
        driver.run_until_idle()
        driver.assert_as_solo(sequences)
        assert driver.engine.num_evictions > 0
        plans.append(
            [[(c.sequence.request_id, c.start, c.length) for c in plan.chunks] for plan in driver.runner.plans]
        )
    assert plans[0] == plans[1]


def test_a_suspect_should_step_alone() -> None:
    """A suspect that comes should run by itself behind the step in flight, and nothing be made ready beside it."""
    driver = make_driver()
    other = make_sequence("other", max_tokens=20)
    driver.engine.add(other)
    driver.step()
    suspect = make_sequence("suspect", list(range(100)), rank=1, is_alone=True)
    driver.engine.add(suspect)
    driver.step()
    assert not driver.runner.is_computing
    for _ in range(2):
        driver.step()
        assert planned(driver) == [suspect]
        assert not driver.runner.is_computing
    driver.run_until_idle()
    driver.assert_as_solo([other, suspect])


def test_only_the_poisoned_request_should_fail() -> None:
    """When a step fails that was begun ahead, its neighbours should be as solo, and so should who came meanwhile."""
    driver = make_driver(budget=8)
    good = [make_sequence(name, rank=rank, max_tokens=20) for rank, name in enumerate("abc")]
    bad = make_sequence("bad", [1] * 20 + [POISON], rank=1)
    for sequence in (*good[:2], bad):
        driver.engine.add(sequence)
    for _ in range(3):
        driver.step()
    driver.engine.add(good[2])
    failed = []
    while driver.engine.has_work:
        failed += driver.step().failed
    driver.run_until_idle(max_steps=0)
    driver.assert_as_solo(good)
    assert failed == [("bad", 1)]


def test_steps_should_be_timed_from_start_to_finish() -> None:
    """What a step costs should be learned from the time between its own start and end."""
    clock = ManualClock()

    class TimedRunner(ScriptedRunner):
        def finish(self):  # type: ignore[no-untyped-def]
            clock.advance(0.001 * self.plans[-1].num_tokens)
            return super().finish()

    runner = TimedRunner()
    engine = Engine(runner, max_model_len=MAX_MODEL_LEN, max_num_seqs=4, max_num_batched_tokens=40, clock=clock)
    driver = Driver(engine, runner, goes_on=lambda: True)
    driver.engine.add(make_sequence("a", list(range(200))))
    for _ in range(4):
        driver.step()
    assert round(engine._cost.units_within(0.05)) == 50

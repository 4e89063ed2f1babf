"""Whose a step's time was: every measured microsecond is somebody's, once, in the right phase."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.engine import StepOutput
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.step_work import StepWork, share_out
from shared.clock import ManualClock
from shared.work_time import US_PER_S
from tests.gpu_worker.engine.workload import make_engine, make_random_sequence, make_sequence
from tests.scripted_runner import ScriptedRunner

TOKEN_S = 0.001
START_S = 0.0037


class TimedRunner(ScriptedRunner):
    """A step takes `START_S` and `TOKEN_S` for each row; `seconds` is what all took."""

    def __init__(self, clock: ManualClock, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.clock = clock
        self.seconds = 0.0

    def finish(self) -> list[DrawnToken]:
        seconds = START_S + TOKEN_S * self.plans[-1].num_tokens
        self.clock.advance(seconds)
        self.seconds += seconds
        return super().finish()


def us(seconds: float) -> int:
    return round(seconds * US_PER_S)


def add_up(work: tuple[StepWork, ...]) -> dict[str, tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for request_id, _, prefill_us, decode_us in work:
        sums[request_id] = (sums[request_id][0] + prefill_us, sums[request_id][1] + decode_us)
    return dict(sums)


def test_divides_by_tokens_and_the_keys_they_see() -> None:
    """A token should count one, and each key it sees `key_cost`."""
    prompt, stream = make_sequence("p", [1] * 30), make_sequence("s", [1] * 5)
    stream.token_ids += [1] * 15
    plan = BatchPlan((PlannedChunk(prompt, 0, 10, False), PlannedChunk(stream, 19, 1, True)))
    assert share_out(plan, StepCost(0.0), 1.1) == (("p", 1, us(1.0), 0), ("s", 1, 0, us(0.1)))
    # keys: 1 + 2 + ... + 10 = 55, and 20
    assert share_out(plan, StepCost(0.1), 1.85) == (("p", 1, us(1.55), 0), ("s", 1, 0, us(0.3)))


@pytest.mark.parametrize(("start", "length", "draft", "phases"), [
    (4, 1, (), (us(1.0), 0)),  # the last token of a prompt of 5: the first one is drawn from it
    (0, 5, (), (us(1.0), 0)),
    (7, 1, (), (0, us(1.0))),  # the newest token
    (7, 1, (9, 9, 9), (0, us(1.0))),  # with a draft
    (0, 8, (), (us(0.875), us(0.125))),  # all again after a preemption: only the newest is new
    (0, 7, (), (us(1.0), 0)),  # a part of that
])  # fmt: skip
def test_tells_the_phases_apart(start: int, length: int, draft: tuple[int, ...], phases: tuple[int, int]) -> None:
    """Decode should be the newest token, if it is output, and its draft; prefill all that is computed before it."""
    sequence = make_sequence("a", [1] * 5)
    sequence.token_ids += [2] * 3
    if start + length < 8 and start + length <= 5:
        del sequence.token_ids[5:]
    is_sampling = start + length == sequence.num_known
    plan = BatchPlan((PlannedChunk(sequence, start, length, is_sampling, draft),))
    assert share_out(plan, StepCost(0.0), 1.0) == (("a", 1, *phases),)


def test_parts_add_up_to_the_step() -> None:
    """However odd the shares are, they should add up to the step's time and none be below nothing."""
    rng = random.Random(3)
    for _ in range(300):
        sequences = [make_random_sequence(rng, number) for number in range(rng.randint(1, 40))]
        chunks = []
        for sequence in sequences:
            start = rng.randrange(sequence.num_known)
            length = rng.randint(1, sequence.num_known - start)
            chunks.append(PlannedChunk(sequence, start, length, start + length == sequence.num_known))
        seconds = rng.choice([1e-6, 3.3e-5, 0.0123, 7.0]) * rng.random()
        work = share_out(BatchPlan(tuple(chunks)), StepCost(rng.choice([0.0, 0.003])), seconds)
        assert sum(part.prefill_us + part.decode_us for part in work) == us(seconds)
        assert all(min(part[2:]) >= 0 for part in work)


def test_padding_is_for_those_that_run() -> None:
    """Rows of a static batch that are computed for nothing should be paid by those that keep it going."""
    ended, running = make_sequence("e"), make_sequence("r", [1] * 5)
    running.token_ids.append(2)
    chunks = (PlannedChunk(ended, 4, 1, True, is_padding=True), PlannedChunk(running, 5, 1, True))
    assert share_out(BatchPlan(chunks), StepCost(0.0), 0.5) == (("r", 1, 0, us(0.5)),)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_run_is_paid_for_once(is_ahead: bool) -> None:
    """Over a run with evictions, drops in flight and a failing request the requests should have the steps' whole time;
    what is evicted should cost prefill again."""
    clock, rng = ManualClock(), random.Random(11)
    runner = TimedRunner(clock, num_blocks=20, block_size=4, poison=1000)
    engine = make_engine(runner, max_num_seqs=8, max_num_batched_tokens=24, clock=clock)
    sequences = [make_random_sequence(rng, number, max_tokens=15) for number in range(12)]
    for sequence in sequences:
        del sequence.token_ids[: max(0, sequence.num_known - 25)]
        sequence.num_prompt_tokens = sequence.num_known
        engine.add(sequence)
    engine.add(make_sequence("bad", [1000, 1], rank=13))
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs.append(engine.step((lambda: True) if is_ahead else None))
        if len(outputs) == 9:
            engine.drop(runner.plans[-1].chunks[0].sequence.request_id)
    sums = add_up(tuple(part for output in outputs for part in output.work))
    assert abs(sum(map(sum, sums.values())) - us(runner.seconds)) <= len(outputs)  # each step is rounded
    assert engine.num_evictions > 0
    assert set(sums) == {s.request_id for s in sequences} | {"bad"}
    for output in outputs:
        assert all(part.prefill_us + part.decode_us > 0 for part in output.work)


def test_without_a_clock_nothing_is_told() -> None:
    """An engine that cannot time its steps should say nothing of time."""
    engine = make_engine(ScriptedRunner())
    engine.add(make_sequence())
    assert engine.step().work == ()

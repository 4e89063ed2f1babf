"""The engine's thread: commands between steps, in order, and what each round says of them."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

import pytest

from gpu_worker.engine_thread import MAX_STEPS_AHEAD, Add, Applied, Command, Drop, EngineThread, Round, Withdraw
from shared.ids import EntryId, RequestId
from tests.gpu_worker.engine.workload import make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner
from tests.waiting import wait_until

Post = Callable[..., Round]


@pytest.fixture
def apply() -> Iterator[Post]:
    """Submits commands with an `Applied` behind them, and returns the round that has applied them all."""
    rounds: queue.Queue[Round] = queue.Queue()
    errors: list[Exception] = []
    thread = EngineThread(make_engine(ScriptedRunner()), post=rounds.put, on_broken=errors.append)
    thread.start()

    def submit(*commands: Command) -> Round:
        submit.count += 1  # type: ignore[attr-defined]
        mark = EntryId(f"{submit.count}-0")  # type: ignore[attr-defined]
        thread.submit(*commands, Applied(mark))
        while (round_ := rounds.get(timeout=10)).inbox_id != mark:
            thread.settle(round_.number)
        return round_

    submit.count = 0  # type: ignore[attr-defined]
    yield submit
    thread.stop()
    assert errors == []


def test_a_withdrawal_should_be_void_when_more_was_evicted(apply: Post) -> None:
    """A preemption based on another number of evictions should change nothing, one on the right number should work."""
    request_id = RequestId("a")
    apply(Add((make_sequence("a", max_tokens=200),)))
    void = apply(Withdraw(request_id, 1, 5))
    assert (void.withdrawn, list(void.view.running)) == ((), [request_id])
    command = Withdraw(request_id, 1, 0)
    done = apply(command)
    assert (done.withdrawn, done.view.num_held, done.view.num_preemptions) == ((command,), 0, 1)
    assert apply(command).withdrawn == (), "nothing is left to take out"


def test_a_preemption_that_keeps_should_withdraw_nothing(apply: Post) -> None:
    """The request should stay in the engine and be nobody's to give back; void as any preemption."""
    request_id = RequestId("a")
    apply(Add((make_sequence("a", max_tokens=200),)))
    assert apply(Withdraw(request_id, 1, 5, keeps=True)).view.num_preemptions == 0
    done = apply(Withdraw(request_id, 1, 0, keeps=True))
    assert (done.withdrawn, done.view.num_held, done.view.num_preemptions) == ((), 1, 1)


def test_a_request_should_be_added_as_a_whole_or_not_at_all(apply: Post) -> None:
    """When one of its sequences can never fit, none should stay."""
    fitting, too_long = make_sequence("a", max_tokens=200), make_sequence("a", [1] * 256, choice=1)
    round_ = apply(Add((fitting, too_long)))
    assert [(f.request_id, f.reason) for f in round_.failures] == [("a", "rejected")]
    assert round_.view.num_held == 0


def test_commands_should_be_applied_in_order(apply: Post) -> None:
    """A request dropped and taken again should be held once, as the later attempt."""
    round_ = apply(
        Add((make_sequence("a", max_tokens=200),)), Drop(RequestId("a")), Add((make_sequence("a", max_tokens=200),))
    )
    assert (round_.view.num_held, round_.view.num_running + round_.view.num_waiting) == (1, 1)


def test_should_go_ahead_unless_somebody_came() -> None:
    """A step should be begun as it was made ready, but a sequence that came meanwhile should be in the next one."""
    rounds: queue.Queue[Round] = queue.Queue()
    errors: list[Exception] = []
    runner = ScriptedRunner(is_gated=True)
    thread = EngineThread(make_engine(runner), post=rounds.put, on_broken=errors.append)
    thread.start()

    def step() -> Round:
        runner.permit(1)
        while not (round_ := rounds.get(timeout=10)).entries:
            pass
        thread.settle(round_.number)
        return round_

    thread.submit(Add((make_sequence("a", max_tokens=200),)))
    step()
    step()
    assert runner.plans[2] is runner.prepared[1]
    wait_until(lambda: len(runner.prepared) == 3, description="the fourth step is made ready")
    thread.submit(Add((make_sequence("b", max_tokens=200),)))
    step()
    wait_until(lambda: len(runner.plans) == 4, description="the fourth step has begun")
    assert [chunk.sequence.request_id for chunk in runner.plans[3].chunks] == ["a", "b"]
    runner.open()
    thread.stop()
    assert errors == []


def test_should_not_go_ahead_of_the_commits() -> None:
    """Nothing should be in flight while the thread waits for a commit."""
    rounds: queue.Queue[Round] = queue.Queue()
    runner = ScriptedRunner()
    thread = EngineThread(make_engine(runner), post=rounds.put, on_broken=lambda error: None)
    thread.start()
    thread.submit(Add((make_sequence("a", max_tokens=200),)))
    while rounds.get(timeout=10).number < MAX_STEPS_AHEAD + 1:
        pass
    assert not runner.is_computing
    thread.stop()
    assert runner.num_finished == MAX_STEPS_AHEAD + 1

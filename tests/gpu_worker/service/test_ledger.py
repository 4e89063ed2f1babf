"""The ledger says what is left to write, and lets nothing leave before its tokens are committed."""

from __future__ import annotations

from gpu_worker.engine.engine import Engine
from gpu_worker.engine_thread import Round
from gpu_worker.ledger import End, Held, HeldChoice, Ledger, Release, Unlogged
from shared.bus import CommitAnswer, CommitOutcome
from shared.ids import EntryId, RequestId
from shared.messages import HeldRequest
from tests.gpu_worker.engine.workload import make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner


def make_held(*, num_logged: int = 1, entries: tuple[bytes, ...] = (b"x",), finish: str = "") -> Held:
    choice = HeldChoice(0, prompt_len=4, entries=list(entries), num_logged=num_logged, finish=finish)
    return Held(RequestId("a"), attempt=1, choices={0: choice})


def settle(ledger: Ledger, answer: CommitAnswer, length: int = 0) -> Unlogged:
    """Answer the one thing that is to be committed."""
    (unlogged,) = ledger.unlogged()
    ledger.settle(unlogged, CommitOutcome(answer, length))
    return unlogged


def test_a_request_should_not_leave_before_its_tokens() -> None:
    """A release or an end should wait until all entries are in the log."""
    ledger, held = Ledger(), make_held(entries=(b"x", b"y"))
    held.exit = Release(is_preempted=True)
    ledger.hold(held)
    assert ledger.departing() == []
    assert settle(ledger, CommitAnswer.OK, 2).item.entries == (b"y",)
    assert ledger.departing() == [held]


def test_a_gap_should_be_filled_from_its_length() -> None:
    """After a gap the next item should start at the length of the log, earlier entries included."""
    ledger = Ledger()
    ledger.hold(make_held(num_logged=2, entries=(b"x", b"y", b"z")))
    settle(ledger, CommitAnswer.GAP, 0)
    (unlogged,) = ledger.unlogged()
    assert (unlogged.item.start, unlogged.item.entries) == (0, (b"x", b"y", b"z"))


def test_entries_that_come_during_a_commit_should_wait_for_the_next() -> None:
    """What was drawn while a commit was in flight should not count as logged by it."""
    ledger, held = Ledger(), make_held(num_logged=0)
    ledger.hold(held)
    (unlogged,) = ledger.unlogged()
    held.choices[0].entries.append(b"finish")
    held.choices[0].finish = "stop"
    ledger.settle(unlogged, CommitOutcome(CommitAnswer.OK, 1))
    assert ledger.is_held(held)
    assert settle(ledger, CommitAnswer.OK, 2).item.finish == "stop"
    assert len(ledger) == 0


def test_a_later_attempt_should_not_be_forgotten_for_an_earlier_one() -> None:
    """What happens to an old holding should not touch the one that took its place."""
    ledger, old, new = Ledger(), make_held(), make_held()
    new.attempt = 2
    ledger.hold(old)
    ledger.hold(new)
    ledger.forget(old)
    assert ledger.get(RequestId("a")) is new
    assert ledger.get(RequestId("a"), 1) is None


def test_what_leaves_should_be_reported_as_holding_nothing() -> None:
    """A request on its way out should be listed (it is still this worker's) with no sequences."""
    held = make_held()
    assert (held.describe().num_waiting, held.describe().num_tokens) == (1, 5)
    held.exit = End("failed", "internal_error", "")
    assert (held.describe().num_waiting, held.describe().num_tokens) == (0, 0)


def test_a_report_should_list_what_waits_beside_what_runs() -> None:
    """What runs should be told as the engine has it, what waits (never admitted, or evicted) from the ledger: no
    blocks, all known tokens."""
    ledger, engine = Ledger(), make_engine(ScriptedRunner(num_blocks=3, block_size=4))
    for rank, name in enumerate("ab"):
        sequence = make_sequence(name, [1, 2, 3], rank=rank, max_tokens=8)
        engine.add(sequence)
        ledger.hold(
            Held(RequestId(name), attempt=1, choices={0: HeldChoice(0, prompt_len=3, entries=[], num_logged=0)})
        )
    seen = set()
    while engine.num_evictions == 0:
        _step(engine, ledger)
        seen.add(tuple(held.num_running for held in ledger.describe(engine.view())))
    assert (1, 1) in seen
    first, second = ledger.describe(engine.view())
    assert (first.num_blocks, first.num_running) == (2, 1)
    num_known = 3 + len(ledger_entries(ledger, "b"))
    assert second == HeldRequest(
        request_id=RequestId("b"), attempt=1, num_blocks=0, num_tokens=num_known, num_running=0, num_waiting=1
    )
    assert num_known > 3, "it had drawn tokens before it was evicted"


def _step(engine: Engine, ledger: Ledger) -> None:
    output = engine.step()
    ledger.take(Round(number=1, view=engine.view(), inbox_id=EntryId("0-0"), entries=output.entries))


def ledger_entries(ledger: Ledger, name: str) -> list[bytes]:
    held = ledger.get(RequestId(name))
    assert held is not None
    return held.choices[0].entries

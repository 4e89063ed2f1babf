"""What the policy asks for: it sees queue, slots, blocks and first tokens as they are, and names who should go."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.ids import RequestId, WorkerId
from tests.scheduler_svc.cell import PolicyCell, dispatched, held, make_hello, make_record

SCALING = AutoscaleConfig(min_workers=1, max_workers=4, ttft_target_s=0.5, grow_after_s=2.0, shrink_after_s=10.0)


def make_cell(**changes: Any) -> PolicyCell:
    """Workers of 4 slots and 16 blocks, as everywhere here."""
    return PolicyCell(PolicyConfig(worker_lease_s=1e6, autoscale=SCALING, **changes))


def ask(cell: PolicyCell, after_s: float = 0.0) -> d.WantWorkers | None:
    """What is asked for `after_s` later; None: nothing new."""
    cell.now += after_s
    asked = [decision for decision in cell.feed(d.Tick()) if isinstance(decision, d.WantWorkers)]
    assert len(asked) <= 1
    return asked[0] if asked else None


def want(num_workers: int, *leaving: str) -> d.WantWorkers:
    return d.WantWorkers(num_workers=num_workers, leaving=tuple(map(WorkerId, leaving)))


def test_without_limits_nothing_is_asked_for() -> None:
    """A policy that was given no limits should not speak of workers at all."""
    cell = PolicyCell()
    cell.join("w:1")
    assert ask(cell, 100.0) is None


def test_a_new_leader_asks_for_what_there_is_within_the_limits() -> None:
    """Its first wish should be the workers it finds, or the limit that they are beyond; and be told once."""
    nobody, some, many = make_cell(), make_cell(), make_cell()
    assert ask(nobody) == want(1)
    some.join("a:1", "b:1")
    assert ask(some) == want(2)
    assert ask(some, 1.0) is None
    many.join(*(f"w{i}:1" for i in range(6)))
    assert ask(many) == want(4, "w5:1", "w4:1")


def test_an_old_queue_brings_workers() -> None:
    """Requests that wait for longer than the target, and for the patience on end, should bring what they need: 4 that
    run and 8 that wait are three workers' work, at three quarters full four."""
    cell = make_cell()
    cell.join("a:1")
    assert ask(cell) == want(1)
    cell.submit(*(make_record(f"r{i}", i) for i in range(13)))
    assert cell.policy.num_queued > 0
    assert ask(cell, 0.4) is None, "nobody has waited for long"
    assert ask(cell, 0.2) is None, "not for long enough"
    assert ask(cell, 2.0) == want(4)


def test_who_is_starting_is_waited_for() -> None:
    """One that was asked for and has not come yet should count; nothing more be asked for meanwhile."""
    cell = make_cell()
    cell.join("a:1")
    ask(cell)
    cell.submit(*(make_record(f"r{i}", i) for i in range(7)))
    assert ask(cell, 0.6) is None
    assert ask(cell, 2.0) == want(3)
    assert [ask(cell, 5.0) for _ in range(3)] == [None] * 3


def test_who_was_sent_ahead_of_a_slot_waits_too() -> None:
    """A request that its worker holds back should count as those in the queue do, once reports show that it waits."""
    cell = make_cell()
    cell.join("a:1")
    ask(cell)
    records = [make_record(f"r{i}", i) for i in range(5)]
    sent = cell.submit(*records)
    assert (len(dispatched(sent)), cell.policy.num_queued) == (5, 0)
    running_ones = tuple(held(f"r{i}", blocks=2, tokens=17) for i in range(4))
    found = []
    for _ in range(7):
        cell.now += 0.5
        cell.report("a:1", applied=cell.last_entry, held=(*running_ones, held("r4", blocks=0, tokens=16, seqs=0)))
        found.append(ask(cell))
    assert found == [None] * 5 + [want(2), None]


def test_late_first_tokens_bring_a_worker_and_slow_reports_do_not() -> None:
    """A first token counts from the report before the one that shows it: only if that, too, came after the target has
    anybody waited for too long."""
    for gap_s, expected in ((0.4, None), (0.9, want(2))):
        cell = make_cell()
        cell.join("a:1")
        ask(cell)
        found = []
        for i in range(6):
            name = f"r{i}"
            cell.submit(make_record(name, i))
            cell.report("a:1", applied=cell.last_entry, held=(held(name, blocks=1, tokens=16),))
            cell.now += gap_s
            cell.report("a:1", applied=cell.last_entry, held=(held(name, blocks=1, tokens=16),))
            cell.now += 2.0  # the report that shows the token comes late
            cell.report("a:1", applied=cell.last_entry, held=(held(name, blocks=2, tokens=17),))
            cell.feed(d.Ended(request_ids=(RequestId(name),), completion_tokens=(1,)))
            found.append(ask(cell))
        assert [asked for asked in found if asked is not None][:1] == ([] if expected is None else [expected]), gap_s


@pytest.mark.parametrize("gap_s", [0.4, 0.9])
def test_a_request_that_ends_between_reports_has_had_its_first_token(gap_s: float) -> None:
    """Short outputs that no report ever shows should count as those of long ones do."""
    cell = make_cell()
    cell.join("a:1")
    ask(cell)
    found = []
    for i in range(6):
        cell.submit(make_record(f"r{i}", i))
        cell.now += gap_s
        cell.report("a:1", applied=cell.last_entry, held=(held(f"r{i}", blocks=1, tokens=16),))
        cell.now += 1.0
        cell.feed(d.Ended(request_ids=(RequestId(f"r{i}"),), completion_tokens=(3,)))
        found.append(ask(cell))
    assert (want(2) in found) == (gap_s > SCALING.ttft_target_s)


def test_full_caches_bring_a_worker() -> None:
    """Blocks that are nearly all in use for the patience should bring one more, whatever waits."""
    cell = make_cell()
    cell.join("a:1")
    ask(cell)
    cell.report("a:1", free=0)
    assert ask(cell) is None
    asked = ask(cell, 2.0)
    assert asked is not None
    assert asked.num_workers == 2


def test_the_one_that_holds_least_is_named_until_it_drains() -> None:
    """After the patience the idle one should be named, stay named when the other one holds less, and be forgotten when
    its report says that it drains."""
    cell = make_cell()
    cell.join("a:1", "b:1")
    assert ask(cell) == want(2)
    cell.submit(make_record("r", 1))
    (busy,) = [w for w in ("a:1", "b:1") if cell.policy._workers[WorkerId(w)].assigned]
    (idle,) = {"a:1", "b:1"} - {busy}
    assert ask(cell, 1.0) is None
    assert ask(cell, 10.0) == want(1, idle)
    assert dispatched(cell.submit(make_record("s", 2))) == [("s", idle)]
    cell.feed(d.Ended(request_ids=(RequestId("r"),), completion_tokens=(1,)))
    assert ask(cell, 1.0) is None, "it stays with its choice, though the other one holds less now"
    cell.report(idle, is_draining=True)
    assert ask(cell, 1.0) == want(1)
    cell.see_workers(make_hello(busy))
    assert ask(cell, 1.0) is None


def test_workers_that_came_unasked_stay_for_the_patience() -> None:
    """A worker that somebody else started should not be sent away at once."""
    cell = make_cell()
    cell.join("a:1")
    assert ask(cell) == want(1)
    cell.join("a:1", "b:1")
    assert ask(cell, 1.0) == want(2)
    assert ask(cell, 10.0) == want(1, "b:1")


def test_a_lost_worker_is_waited_for() -> None:
    """A crash should change no wish: whoever runs the worker starts it again."""
    cell = make_cell()
    cell.join("a:1", "b:1")
    assert ask(cell) == want(2)
    cell.see_workers(make_hello("a:1"))
    assert ask(cell, 1.0) is None

"""Leases, lost workers, forgotten requests."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc import decisions as d
from scheduler_svc.policy.liveness import Watch
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.ids import RequestId, WorkerId
from tests.scheduler_svc.cell import GATEWAY, PolicyCell, dispatched, held, make_hello, make_record, running


def test_a_still_counter_lapses_after_the_period_and_a_moving_one_never() -> None:
    """Only "no change" for the whole period should count, by the watcher's clock."""
    watch: Watch[str] = Watch(3.0)
    lapsed = [watch.lapsed({"still": 7, "moving": step}, 10.0 + step) for step in range(5)]
    assert lapsed == [[], [], [], ["still"], ["still"]]


def test_a_watcher_that_was_away_starts_its_timers_again() -> None:
    """After a pause of its own (SIGSTOP, no Redis) an old counter should prove nothing."""
    watch: Watch[str] = Watch(3.0)
    assert watch.lapsed({"w": 1}, 0.0) == []
    assert watch.lapsed({"w": 1}, 60.0) == []
    assert watch.lapsed({"w": 1}, 61.0) == []
    assert watch.lapsed({"w": 1}, 62.0) == []
    assert watch.lapsed({"w": 1}, 63.0) == ["w"]


def test_one_who_was_expected_and_never_came_lapses() -> None:
    """A listener's gateway that has no counter at all should be given the same time."""
    watch: Watch[str] = Watch(2.0)
    watch.expect("g", 0.0)
    assert [watch.lapsed({}, now) for now in (0.0, 1.0, 2.0)] == [[], [], ["g"]]


def watch_for(cell: PolicyCell, seconds: float, *hellos: str, **pulse: object) -> list[d.Decision]:
    """Read the workers every half second, with this pulse."""
    decisions: list[d.Decision] = []
    for _ in range(int(seconds * 2)):
        cell.now += 0.5
        decisions += cell.see_workers(*(make_hello(name) for name in hellos), **pulse)
    return decisions


def test_a_silent_worker_is_requeued_once_and_its_requests_go_elsewhere() -> None:
    """Lease over: one Requeue, then a look at what it owned; the records then say queued."""
    cell = PolicyCell()
    cell.join("w")
    record = make_record("a")
    cell.observe(record)
    decisions = watch_for(cell, 4, "w", beat=1)
    assert [WorkerId("w")] == [x.worker_id for x in decisions if isinstance(x, d.Requeue)]
    assert d.Recheck(request_ids=(RequestId("a"),)) in decisions
    cell.join("v")
    assert dispatched(cell.observe(make_record("a", attempt=1, crashes=1))) == [("a", "v")]


def test_a_worker_with_work_that_makes_no_step_is_lost_and_an_idle_one_is_not() -> None:
    """Beats alone should not save a worker whose engine hangs."""
    cell = PolicyCell(PolicyConfig(worker_stall_s=10.0))
    cell.join("w")
    assert watch_for(cell, 30, "w", num_steps=5, has_work=False) == []
    decisions = watch_for(cell, 11, "w", num_steps=5, has_work=True)
    assert [x.why for x in decisions if isinstance(x, d.Requeue)] == ["stalled"]


def test_a_worker_that_left_gives_its_requests_back() -> None:
    """A clean good-bye should make the service look at what it still owned; its records name a worker that is gone."""
    cell = PolicyCell()
    cell.join("w")
    record = make_record("a")
    cell.observe(record)
    assert [d.Recheck(request_ids=(RequestId("a"),))] == cell.see_workers()
    requeue = d.RequeueOne(request_id=RequestId("a"), owner=WorkerId("w"), attempt=1)
    assert [requeue] == cell.observe(running(record, "w"))


def test_the_request_behind_a_dispatch_that_found_no_worker_goes_elsewhere() -> None:
    """The worker should be dropped and the request looked at again."""
    cell = PolicyCell()
    cell.join("w")
    cell.observe(make_record("a"))
    left = cell.feed(d.WorkerLeft(worker_id=WorkerId("w")))
    assert [d.Recheck(request_ids=(RequestId("a"),))] == left
    cell.join("v")
    assert dispatched(cell.observe(make_record("a"))) == [("a", "v")]


def test_a_new_leader_leaves_running_requests_where_they_are() -> None:
    """After a take-over a request that its worker lists should just be counted."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w"))
    assert cell.observe(running(make_record("a"), "w")) == []
    for _ in range(50):
        cell.now += 0.1
        assert cell.report("w", free=14, held=(held("a", blocks=2, tokens=20),)) == []
    assert (cell.policy.num_queued, cell.policy.num_running) == (0, 1)


def test_a_request_that_vanished_from_the_report_is_looked_up_and_then_taken_back() -> None:
    """First the record is asked (ended? released?); a worker that forgot it loses it soon."""
    cell = PolicyCell()
    cell.join("w")
    record = make_record("a")
    cell.observe(record)
    entry = cell.last_entry
    assert cell.report("w", free=16, applied="0-0") == [], "not read yet: it waits in the inbox"
    assert [d.Recheck(request_ids=(RequestId("a"),))] == cell.report("w", applied=entry)
    assert cell.observe(running(record, "w")) == []
    cell.now += 0.6
    requeue = d.RequeueOne(request_id=RequestId("a"), owner=WorkerId("w"), attempt=1)
    assert [requeue] == cell.report("w", applied=entry)


def test_an_unread_request_of_an_earlier_leader_gets_a_lease_of_patience() -> None:
    """Without knowing whether its inbox was read, a request should not be taken back at once."""
    cell = PolicyCell()
    cell.see_workers(make_hello("w"))
    cell.observe(running(make_record("a"), "w"))
    for _ in range(29):
        assert cell.report("w") == []
        cell.now += 0.1
    cell.now += 0.2
    assert [RequestId("a")] == [x.request_id for x in cell.report("w") if isinstance(x, d.RequeueOne)]


def test_a_held_request_of_an_older_attempt_is_not_ours() -> None:
    """A zombie's listing should not pass for the attempt we dispatched."""
    cell = PolicyCell()
    cell.join("w")
    cell.observe(make_record("a", attempt=4))
    cell.report("w", applied=cell.last_entry, held=(held("a", blocks=2, tokens=20, attempt=4),))
    cell.now += 1
    zombie = (held("a", blocks=2, tokens=20, attempt=4),)
    decisions = cell.report("w", applied=cell.last_entry, held=zombie)
    assert [x.attempt for x in decisions if isinstance(x, d.RequeueOne)] == [5]


def test_a_gateway_that_said_goodbye_leaves_no_listeners() -> None:
    """A drained gateway leaves the bus and not its records: its listeners should be removed after a lease, too."""
    cell = PolicyCell()
    cell.join("w")
    cell.feed(d.GatewaysSeen(beats={GATEWAY: 1}))
    removed: list[d.Decision] = []
    for _ in range(8):
        cell.now += 0.5
        removed += cell.feed(d.GatewaysSeen(beats={}))
        cell.observe(make_record("a"))
    assert [d.RemoveGateway(gateway_id=GATEWAY)] == removed


def test_a_dead_gateway_is_removed_and_its_orphans_get_time() -> None:
    """Its requests should run on for the orphan time, and end then as cancelled."""
    cell = PolicyCell(PolicyConfig(orphan_ttl_s=30.0))
    cell.join("w")
    record = make_record("a")
    cell.observe(record)
    removed: list[d.Decision] = []
    for _ in range(8):
        removed += cell.feed(d.GatewaysSeen(beats={GATEWAY: 1}))
        cell.now += 0.5
    assert [d.RemoveGateway(gateway_id=GATEWAY)] == removed
    cell.feed(d.GatewayRemoved(orphans=(RequestId("a"),)))
    orphan = make_record("a", **{"state": "running", "owner": WorkerId("w"), "attempt": 1, "listeners": ()})
    cell.now += 29
    assert cell.observe(orphan) == []
    cell.now += 2
    assert [d.Abort(request_id=RequestId("a"), reason="cancelled")] == cell.observe(orphan)


IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"last_inbox_id": "abc"},
    {"last_inbox_id": "1-x"},
    {"free_blocks": -1},
    {"free_blocks": 10**9},
    {"num_steps": -5},
    {"held": (held("a", blocks=-1, tokens=5),)},
)


@pytest.mark.parametrize("lie", IMPOSSIBLE)
def test_an_impossible_report_changes_nothing(lie: dict[str, Any]) -> None:
    """What no worker with that hello could report should neither raise, nor be planned with, nor hide true reports."""
    cell = PolicyCell()
    cell.join("w")
    assert cell.report("w", **lie) == []
    assert dispatched(cell.observe(make_record("a"))) == [("a", "w")]

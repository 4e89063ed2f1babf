"""How the scheduler ends requests, and that an ended one leaves nothing behind."""

from __future__ import annotations

from scheduler_svc import decisions as d
from shared.bus import RequestState
from shared.ids import RequestId
from tests.scheduler_svc.cell import PolicyCell, dispatched, make_hello, make_record, running

A = RequestId("a")


def test_the_deadline_counts_from_when_this_leader_saw_it_first() -> None:
    """Queued or running, a request should end when its time is up, once."""
    cell = PolicyCell()
    cell.observe(make_record("a", timeout_s=10.0))
    cell.now += 9
    cell.observe(make_record("a", timeout_s=10.0))
    assert cell.feed(d.Tick()) == []
    cell.now += 1
    (abort,) = cell.feed(d.Tick())
    assert isinstance(abort, d.Abort)
    assert (abort.request_id, abort.reason) == (A, "deadline")
    assert abort.message
    assert cell.feed(d.Tick()) == []


def test_a_poison_request_is_given_up_after_max_crashes() -> None:
    """A request that killed its owners K times in a row should fail and not be sent again."""
    cell = PolicyCell()
    cell.join("w")
    decisions = cell.observe(make_record("a", attempt=3, crashes=3), make_record("b", 2))
    assert [(x.request_id, x.reason) for x in decisions if isinstance(x, d.Abort)] == [("a", "failed")]
    assert dispatched(decisions) == [("b", "w")]


def test_fewer_crashes_are_tried_again() -> None:
    """Below K it should go out as any other."""
    cell = PolicyCell()
    cell.join("w")
    assert dispatched(cell.observe(make_record("a", attempt=2, crashes=2))) == [("a", "w")]


def test_a_cancel_frees_its_place_at_every_stage() -> None:
    """Queued, sent, or running: after the end the next request should have all the room."""
    big = {"prompt_len": 200, "max_tokens": 40}
    for stage in ("queued", "sent", "running"):
        cell = PolicyCell()
        cell.see_workers(make_hello("w"))
        if stage == "sent":
            cell.report("w")
        first = make_record("a", 1, **big)
        cell.observe(running(first, "w") if stage == "running" else first)
        cell.feed(d.Ended(request_ids=(A,)))
        cell.report("w", applied=cell.last_entry)
        assert dispatched(cell.observe(make_record("b", 2, **big))) == [("b", "w")], stage
        assert {RequestId("b")} == cell.policy.request_ids


def test_an_ended_record_and_an_end_are_the_same() -> None:
    """Whichever comes first, the request should be gone and the second one harmless."""
    cell = PolicyCell()
    cell.observe(make_record("a"))
    cell.observe(make_record("a", **{"state": RequestState.ENDED}))
    assert set() == cell.policy.request_ids
    cell.feed(d.Ended(request_ids=(A,)))
    assert dispatched(cell.join("w")) == []


def test_a_request_that_nobody_listens_to_ends_after_its_own_time() -> None:
    """A client that left with an Idempotency-Key has orphan_ttl_s to come back; then it is cancelled."""
    cell = PolicyCell()
    alone = make_record("a", **{"listeners": (), "orphan_ttl_s": 5.0})
    cell.observe(alone)
    cell.now += 4.5
    assert cell.observe(alone) == []
    cell.now += 0.5
    assert [d.Abort(request_id=A, reason="cancelled")] == cell.observe(alone)


def test_a_request_with_a_listener_again_is_no_orphan() -> None:
    """A resume should stop the clock, and leaving again start it from the beginning."""
    cell = PolicyCell()
    alone = make_record("a", **{"listeners": (), "orphan_ttl_s": 5.0})
    for _ in range(5):
        cell.observe(alone)
        cell.now += 4
        assert cell.observe(alone) == []
        assert cell.observe(make_record("a", orphan_ttl_s=5.0)) == []
        cell.now += 4


def test_a_dead_gateways_requests_get_the_longer_time() -> None:
    """After a gateway's death orphan_ttl holds for all of its requests, whatever they asked for."""
    cell = PolicyCell()
    alone = make_record("a", **{"listeners": (), "orphan_ttl_s": 1.0})
    cell.observe(make_record("a", orphan_ttl_s=1.0))
    cell.feed(d.GatewayRemoved(orphans=(A,)))
    cell.now += 29
    assert cell.observe(alone) == []
    cell.now += 1
    assert len(cell.observe(alone)) == 1

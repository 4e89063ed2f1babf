"""Deadlines: each once, and no more kept than lives."""

from __future__ import annotations

from scheduler_svc.policy.deadlines import MAX_STALE, Deadlines
from scheduler_svc.policy.state import Request
from tests.scheduler_svc.cell import make_record


def test_what_has_ended_is_not_kept_until_its_deadline() -> None:
    """A flood of short requests with long deadlines should leave nothing, and those that live should fall due."""
    deadlines = Deadlines()
    stays = Request(make_record("stays"), now=0.0)
    deadlines.add(stays, stays.deadline)
    for number in range(10 * MAX_STALE):
        request = Request(make_record(f"r{number}"), now=0.0)
        deadlines.add(request, request.deadline)
        deadlines.remove(request)
    assert len(deadlines) <= MAX_STALE + 2
    assert deadlines.due(stays.deadline) == ["stays"]
    assert deadlines.due(stays.deadline) == []

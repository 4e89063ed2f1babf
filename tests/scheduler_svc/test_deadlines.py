"""Deadlines: each once, and no more kept than lives."""

from __future__ import annotations

from scheduler_svc.policy.deadlines import MAX_STALE, Deadlines
from scheduler_svc.policy.state import Request
from tests.scheduler_svc.cell import make_record


def make_request(name: str) -> Request:
    return Request(make_record(name).summary, (1, 0), now=0.0)


def test_what_has_ended_is_not_kept_until_its_deadline() -> None:
    """A flood of short requests with long deadlines should leave nothing, and those that live should fall due."""
    deadlines = Deadlines()
    stays = make_request("stays")
    deadlines.add(stays, stays.deadline)
    for number in range(10 * MAX_STALE):
        request = make_request(f"r{number}")
        deadlines.add(request, request.deadline)
        deadlines.remove(request)
    assert len(deadlines) <= MAX_STALE + 2
    assert deadlines.due(stays.deadline) == ["stays"]
    assert deadlines.due(stays.deadline) == []

"""What an event costs the policy, in calls: flat in workers, and as good as flat in the length of the queue."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.ids import RequestId
from tests.scheduler_svc.cell import PolicyCell, held, make_hello, make_record

SLOTS = 4
TENANTS = 5


class FullCell(PolicyCell):
    """All workers run `SLOTS` requests and have one sent ahead; `num_queued` more wait."""

    def __init__(self, num_workers: int, num_queued: int) -> None:
        super().__init__(PolicyConfig(aging_s=60.0, passing_s=2.0))
        names = [f"w{i}" for i in range(num_workers)]
        self.see_workers(*(make_hello(name, max_num_seqs=SLOTS, num_blocks=100) for name in names))
        self._held: dict[str, list[str]] = {name: [] for name in names}
        self._num_submitted = 0
        for name in names:
            self.show(name)
        for _ in range(num_workers * (SLOTS + 1) + num_queued):
            self.submit_one()
        for name in names:
            self.show(name)

    def feed(self, event: d.Event) -> list[d.Decision]:
        decisions = super().feed(event)
        for decision in decisions:
            if isinstance(decision, d.Dispatch):
                self._held[decision.worker_id].append(decision.request_id)
        return decisions

    def submit_one(self) -> None:
        number = self._num_submitted = self._num_submitted + 1
        self.submit(make_record(f"r{number}", number, tenant=f"t{number % TENANTS}", max_tokens=64))

    def show(self, name: str) -> None:
        """A report in which all that was sent to a worker runs, as far as there are slots."""
        running = [held(request, blocks=2, tokens=20) for request in self._held[name][:SLOTS]]
        waiting = [held(request, blocks=0, tokens=16, seqs=0) for request in self._held[name][SLOTS:]]
        lists = (*running, *(replace(x, num_waiting=1) for x in waiting))
        self.report(name, free=100 - 2 * len(running), num_blocks=100, applied=self.last_entry, held=lists)

    def turn(self, name: str) -> None:
        """One of a worker's requests ends, it reports, and another one arrives."""
        self.feed(d.Ended(request_ids=(RequestId(self._held[name].pop(0)),), completion_tokens=(4,)))
        self.show(name)
        self.submit_one()


def calls_per_turn(num_workers: int, num_queued: int) -> float:
    """Calls of functions, built-in ones too, that one turn of a full cell makes."""
    cell = FullCell(num_workers, num_queued)
    names = [f"w{i % num_workers}" for i in range(100)]
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    for name in names:
        cell.turn(name)
    sys.setprofile(note)
    try:
        for name in names:
            cell.turn(name)
    finally:
        sys.setprofile(None)
    return count / len(names)


def test_an_event_costs_the_same_whatever_the_number_of_workers() -> None:
    """Thirty times the workers should not make an event dearer by more than a tenth."""
    assert calls_per_turn(300, 200) <= 1.1 * calls_per_turn(10, 200)


def test_an_event_costs_as_good_as_the_same_whatever_waits() -> None:
    """With fifty times as many in the queue, calls (comparisons inside a heap are none) should not rise by more than a
    tenth."""
    assert calls_per_turn(10, 5000) <= 1.1 * calls_per_turn(10, 100)

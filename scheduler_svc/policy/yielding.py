"""Who gives its place to somebody of a better class, though nothing runs out.

A request of class `c` counts only what stands before it on a worker, and what lower classes run there. Lower ones that
merely wait in the worker stand behind it anyway, and the growth of those that run is theirs to lose: the worker evicts
them first. Strictly lower: equals never take each other's place, so nobody changes places in a circle.
"""

from __future__ import annotations

from itertools import islice

from scheduler_svc.policy import admission, forecast
from scheduler_svc.policy.fleet import Fleet
from scheduler_svc.policy.state import Request, Worker

MAX_TRIED = 8
"""Workers tried for one request: those with the lowest class. Where these cannot make room (for a request of many
choices, say), the next change of any of them is another chance."""


def choose(fleet: Fleet, request: Request, max_preemptions: int) -> tuple[Worker, list[Request]] | None:
    """A worker that can run `request` once these requests have left it; None if none can by that."""
    for worker in islice(fleet.yielding(request.level), MAX_TRIED):
        victims = choose_victims(worker, request, max_preemptions)
        if victims is not None:
            return worker, victims
    return None


def choose_victims(worker: Worker, request: Request, max_preemptions: int) -> list[Request] | None:
    """Requests of lower classes, last in standing first, whose leaving lets `request` run on `worker` at once.

    Empty when enough of them are leaving already; None when that would not do. `request` may be assigned to `worker`,
    and wait there.
    """
    if not admission.can_ever_hold(worker, request):
        return None
    room = _Room(worker, request)
    victims: list[Request] = []
    for victim in sorted(room.lower, key=lambda other: other.standing, reverse=True):
        if room.is_enough():
            break
        if victim.preemptions < max_preemptions:
            room.gain(victim)
            victims.append(victim)
    return victims if room.is_enough() else None


class _Room:
    """Blocks and slots of `worker` that `request` could have; `lower` are those of lower classes that run, or may by
    the time it comes."""

    def __init__(self, worker: Worker, request: Request) -> None:
        assert worker.report is not None
        self._worker = worker
        self._headroom = admission.headroom(worker)
        self._blocks = worker.report.free_blocks - admission.demand(worker, request)
        self._slots = worker.hello.max_num_seqs - min(request.num_open, worker.hello.max_num_seqs)
        self.lower: list[Request] = []
        for other in worker.assigned.values():
            if other is not request:
                self._count(other, request.level)

    def is_enough(self) -> bool:
        return self._blocks >= 0 and self._slots >= 0

    def gain(self, victim: Request) -> None:
        """`victim` leaves."""
        blocks, seqs = self._taken(victim)
        self._blocks += blocks
        self._slots += seqs

    def _count(self, other: Request, level: int) -> None:
        held = other.held
        if other.is_preempting and not (other.is_staying and other.level <= level):
            self._blocks += 0 if held is None else forecast.num_own_blocks(held)
        elif other.level <= level:
            blocks, seqs = admission.claim(self._worker, other, self._headroom)
            self._blocks -= blocks
            self._slots -= seqs
        elif held is None or held.num_running:
            blocks, seqs = self._taken(other)
            self._blocks -= 0 if held is not None else blocks
            self._slots -= seqs
            self.lower.append(other)

    def _taken(self, lower: Request) -> tuple[int, int]:
        """(blocks, slots) that somebody of a lower class has, or will have when it comes."""
        if lower.held is None:
            return admission.demand(self._worker, lower), lower.num_open
        return forecast.num_own_blocks(lower.held), lower.held.num_running

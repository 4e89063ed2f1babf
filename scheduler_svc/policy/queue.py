"""Who waits, in which order: a lane for each model fingerprint, in it a line for each class.

No model waits behind another's worker. A request's class is its priority, lower first, until it has waited a whole
`aging_s`: then it rises into the next better class that anybody live is in, and so on for each further window. It
never rises above the best class there is, and keeps what it has risen while it lives.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from scheduler_svc.policy.deadlines import Deadlines
from scheduler_svc.policy.line import Line
from scheduler_svc.policy.state import Party, Request
from shared.ids import RequestId


class _Lane:
    """One model's lines by class; `parked` are those that no worker could hold now."""

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.classes: list[int] = []
        self.queued: list[int] = []
        self.parked: dict[RequestId, Request] = {}
        self.blocked: Request | None = None


class Queue:
    """Queued requests; every operation is O(log n) in requests, tenants and users.

    Args:
        aging_s: a request rises a class after this long in the queue; 0: never.
        weights: of tenants.
    """

    def __init__(self, *, aging_s: float = 0.0, weights: Mapping[str, float] | None = None) -> None:
        self._aging_s = aging_s
        self._weights = weights or {}
        self._lanes: dict[str, _Lane] = {}
        self._requests: dict[RequestId, Request] = {}
        self._windows = Deadlines()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def open(self, request: Request) -> None:
        """Count a live request in its class, queued or not."""
        lane = self._lanes.setdefault(request.summary.fingerprint, _Lane())
        self._count(lane, request.level, +1)

    def close(self, request: Request) -> None:
        """It lives no longer."""
        self.remove(request)
        fingerprint = request.summary.fingerprint
        lane = self._lanes[fingerprint]
        self._count(lane, request.level, -1)
        if not lane.lines:
            del self._lanes[fingerprint]

    def fingerprints(self) -> list[str]:
        """Models that somebody waits for in a line."""
        return [fingerprint for fingerprint, lane in self._lanes.items() if lane.queued]

    def add(self, request: Request, now: float) -> None:
        """Let `request` wait at its place; a no-op if it waits already."""
        if request in self:
            return
        self._requests[request.request_id] = request
        self._enter(self._lanes[request.summary.fingerprint], request)
        if self._aging_s:
            self._windows.add(request, now + self._aging_s)

    def remove(self, request: Request) -> None:
        """Take `request` out; a no-op if it does not wait."""
        if self._requests.pop(request.request_id, None) is None:
            return
        lane = self._lanes[request.summary.fingerprint]
        if lane.parked.pop(request.request_id, None) is None:
            self._leave(lane, request)
        self._windows.remove(request)

    def block(self, request: Request) -> None:
        """There is no room for `request`, the first of its model."""
        self._lanes[request.summary.fingerprint].blocked = request

    def is_blocked(self, fingerprint: str) -> bool:
        """Whether there was no room for who is next already."""
        return self._lanes[fingerprint].blocked is self.first(fingerprint)

    def first(self, fingerprint: str) -> Request | None:
        """Who is next for a model, None if nobody waits."""
        lane = self._lanes.get(fingerprint)
        return lane.lines[lane.queued[0]].first() if lane is not None and lane.queued else None

    def line(self, request: Request) -> Line:
        """The line of its class."""
        return self._lanes[request.summary.fingerprint].lines[request.level]

    def park(self, request: Request) -> None:
        """Let it wait beside the line until `unpark`: no worker there is could hold it."""
        lane = self._lanes[request.summary.fingerprint]
        self._leave(lane, request)
        lane.parked[request.request_id] = request

    def unpark(self, fingerprint: str) -> None:
        """Workers have come: those beside the line of their model stand in it again."""
        lane = self._lanes.get(fingerprint)
        if lane is not None:
            parked, lane.parked = lane.parked, {}
            for request in parked.values():
                self._enter(lane, request)

    def age(self, now: float) -> None:
        """Let those rise whose window is over."""
        for request_id in self._windows.due(now):
            request = self._requests[request_id]
            self._rise(self._lanes[request.summary.fingerprint], request)
            self._windows.add(request, now + self._aging_s)

    def charge(self, request: Request, total: int) -> None:
        """`request` has been served `total` tokens by now: count what is new to its tenant and user."""
        if total != request.charged:
            lane, summary = self._lanes[request.summary.fingerprint], request.summary
            lane.lines[request.level].charge(summary.tenant, summary.user, total - request.charged)
            request.set_charged(total)

    def charge_all(self, served: Mapping[Party, int]) -> None:
        """Count these tokens, too."""
        for (level, fingerprint, tenant, user), num_tokens in served.items():
            self._lanes[fingerprint].lines[level].charge(tenant, user, num_tokens)

    def _rise(self, lane: _Lane, request: Request) -> None:
        better = bisect_left(lane.classes, request.level) - 1
        if better < 0 or request.request_id in lane.parked:
            return
        self._leave(lane, request)
        self._count(lane, lane.classes[better], +1)
        old = request.level
        request.rise(lane.classes[better])
        self._count(lane, old, -1)
        self._enter(lane, request)

    def _enter(self, lane: _Lane, request: Request) -> None:
        line = lane.lines[request.level]
        if not len(line):
            insort(lane.queued, request.level)
        line.add(request)

    def _leave(self, lane: _Lane, request: Request) -> None:
        if lane.blocked is request:
            lane.blocked = None
        line = lane.lines[request.level]
        line.remove(request)
        if not len(line):
            del lane.queued[bisect_left(lane.queued, request.level)]

    def _count(self, lane: _Lane, level: int, change: int) -> None:
        """Keep a line, with its counters, for each class that anybody live is in."""
        if level not in lane.lines:
            lane.lines[level] = Line(self._weights)
            insort(lane.classes, level)
        lane.lines[level].num_live += change
        if lane.lines[level].num_live == 0:
            del lane.lines[level], lane.classes[bisect_left(lane.classes, level)]

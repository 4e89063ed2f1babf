"""Who waits, in which order: one lane for each model fingerprint, so that no model waits behind another's worker.

Inside a lane the order is arrival (`Request.order`), which a request keeps over preemptions and requeues. A fairer
order is another key here; the scheduler only ever walks a lane from its front.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.policy.state import Request

_Place = tuple[tuple[int, int], str]


class Queue:
    """Queued requests."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[_Place]] = {}
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._requests

    def fingerprints(self) -> list[str]:
        """Models that somebody waits for."""
        return list(self._lanes)

    def add(self, request: Request) -> None:
        """Let `request` wait at its place; a no-op if it waits already."""
        if request not in self:
            self._requests[request.request_id] = request
            insort(self._lanes.setdefault(request.summary.fingerprint, []), _place(request))

    def remove(self, request: Request) -> None:
        """Take `request` out; a no-op if it does not wait."""
        if self._requests.pop(request.request_id, None) is None:
            return
        fingerprint = request.summary.fingerprint
        lane = self._lanes[fingerprint]
        del lane[bisect_left(lane, _place(request))]
        if not lane:
            del self._lanes[fingerprint]

    def at(self, fingerprint: str, index: int) -> Request | None:
        """Who stands at `index` of a lane (0 is next), None behind its end."""
        lane = self._lanes.get(fingerprint, [])
        return self._requests[lane[index][1]] if index < len(lane) else None


def _place(request: Request) -> _Place:
    return request.order, request.request_id

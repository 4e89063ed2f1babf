"""When something is due for each request: a heap whose stale entries are skipped."""

from __future__ import annotations

import heapq

from scheduler_svc.policy.state import Request
from shared.ids import RequestId

MAX_STALE = 64
"""Stale entries kept beside as many as there are live ones; beyond that the heap is made anew, so that it is bounded by
what lives and not by all that came within a deadline's time."""


class Deadlines:
    """Requests by the time at which something is due for them."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._live: dict[RequestId, float] = {}

    def __len__(self) -> int:
        """Entries kept, stale ones too."""
        return len(self._heap)

    def add(self, request: Request, at: float) -> None:
        """Watch `request` until `at`."""
        self._live[request.request_id] = at
        heapq.heappush(self._heap, (at, request.request_id))

    def remove(self, request: Request) -> None:
        """Watch it no longer."""
        self._live.pop(request.request_id, None)
        if len(self._heap) > 2 * len(self._live) + MAX_STALE:
            self._heap = [(deadline, request_id) for request_id, deadline in self._live.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> list[RequestId]:
        """Those whose time has come; each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._live.get(request_id) == deadline:
                del self._live[request_id]
                found.append(request_id)
        return found

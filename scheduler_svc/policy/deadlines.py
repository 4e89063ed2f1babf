"""When each request's time is up: a heap whose stale entries are skipped."""

from __future__ import annotations

import heapq

from scheduler_svc.policy.state import Request
from shared.ids import RequestId


class Deadlines:
    """Live requests by deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self._live: dict[RequestId, float] = {}

    def add(self, request: Request) -> None:
        """Watch `request`."""
        self._live[request.request_id] = request.deadline
        heapq.heappush(self._heap, (request.deadline, request.request_id))

    def remove(self, request: Request) -> None:
        """Watch it no longer."""
        self._live.pop(request.request_id, None)

    def due(self, now: float) -> list[RequestId]:
        """Those whose deadline has come; each once."""
        found = []
        while self._heap and self._heap[0][0] <= now:
            deadline, request_id = heapq.heappop(self._heap)
            if self._live.get(request_id) == deadline:
                del self._live[request_id]
                found.append(request_id)
        return found

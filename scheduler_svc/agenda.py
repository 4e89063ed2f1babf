"""A simulation's time: a heap of what is to happen, in an order that does not depend on how steps are grouped.

At one moment the ends of steps come first, by worker; all else follows in the order in which it was planned.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]
_STEPS, _REST = 0, 1
_MAX_RUNS = 2**40


class Agenda:
    """Timed actions; `now` is the time of the last one that was done, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, int, Action]] = []
        self._num_planned = 0

    def at(self, time_s: float, action: Action) -> None:
        """Do `action` at `time_s`, which is not before `now`."""
        self._num_planned += 1
        heapq.heappush(self._heap, (time_s, _REST, self._num_planned, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do `action` that much later."""
        self.at(self.now + delay_s, action)

    def at_step_end(self, time_s: float, worker: int, run: int, action: Action) -> None:
        """Do `action` when run number `run` of the worker of that index ends; each run has a number of its own."""
        heapq.heappush(self._heap, (time_s, _STEPS, worker * _MAX_RUNS + run, action))

    def run(self, until_s: float) -> None:
        """Do all that is planned up to `until_s`, and what that plans."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, _, action = heapq.heappop(heap)
            action()
        self.now = until_s

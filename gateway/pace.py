"""How fast something goes on: a sum over the last half minute."""

from __future__ import annotations

from collections import deque

from shared.clock import Clock

WINDOW_S = 30.0


class Pace:
    """Amounts and when they came, forgotten after `WINDOW_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.now()
        self._notes: deque[tuple[float, int]] = deque()
        self._sum = 0

    def note(self, amount: int) -> None:
        """So much has happened now."""
        self._notes.append((self._clock.now(), amount))
        self._sum += amount
        self._forget()

    def per_s(self) -> float:
        """The mean over the window, or over the life of this object if it is shorter; 0 when nothing happened."""
        self._forget()
        watched_s = min(WINDOW_S, self._clock.now() - self._since)
        return self._sum / max(watched_s, 1.0)

    def _forget(self) -> None:
        before = self._clock.now() - WINDOW_S
        while self._notes and self._notes[0][0] < before:
            self._sum -= self._notes.popleft()[1]

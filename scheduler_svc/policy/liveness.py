"""Leases: a counter that its owner raises, timed by the watcher's clock.

Nothing is judged by age alone: only a fresh reading that shows the old value counts. A watcher that was away itself
(stopped, or cut off from the bus) starts all its timers again, since those it watches may have been cut off, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Watch(Generic[K]):
    """Finds counters that stand still for `period_s`."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._last: dict[K, tuple[int | None, float]] = {}
        self._read_at: float | None = None

    def expect(self, key: K, now: float) -> None:
        """Start the timer of somebody whose counter has not been seen yet."""
        self._last.setdefault(key, (None, now))

    def forget(self, key: K) -> None:
        """Watch `key` no longer."""
        self._last.pop(key, None)

    def lapsed(self, counters: Mapping[K, int], now: float) -> list[K]:
        """Take a reading; those whose counter is the same as `period_s` ago, or that were expected and never came.

        Args:
            counters: all there are now. A missing one that had been read before has left, and is forgotten.
            now: seconds.
        """
        was_away = self._read_at is not None and now - self._read_at > self._period_s / 2
        self._read_at = now
        if was_away:
            self._last = {key: (counter, now) for key, (counter, _) in self._last.items()}
        for key, counter in counters.items():
            known = self._last.get(key)
            if known is None or known[0] != counter:
                self._last[key] = (counter, now)
        for key in [k for k, (counter, _) in self._last.items() if counter is not None and k not in counters]:
            self.forget(key)
        return [key for key, (_, since) in self._last.items() if now - since >= self._period_s]

"""Time as something that is passed in, so that pure code has none and tests turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds. Wall-clock jumps never show here."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: {seconds}")
        self._now += seconds


def unix_now() -> int:
    """Wall-clock seconds, for what people read (`created`); never for deciding anything."""
    return int(time.time())

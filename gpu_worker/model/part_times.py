"""Where the time of a runner's steps goes: seconds by part, summed up since the runner was made."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PartTimes:
    """Adds up wall time by part. Two clock readings a part, about a microsecond; parts must not nest.

    On a GPU a part lasts until its work is queued, except where it waits for a result.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the `with` block as `name`."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - since

    def seconds(self) -> dict[str, float]:
        """All parts so far."""
        return dict(self._seconds)

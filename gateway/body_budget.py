"""How many bytes of large request bodies a gateway holds at once, so that a flood of them cannot take its memory.

Parsed JSON is many times larger than its bytes, but only as many bodies are parsed at once as the text pool has
threads; what waits is raw bytes, and those are counted here as they come in. What a client declares counts nothing, and
small bodies are free: clients that send large ones slowly keep out other large ones only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway import limits
from shared.errors import Overloaded


class BodyBudget:
    """Bytes that may be held by all requests together, `max_bytes`, beyond the free ones of each."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """One request's share, given back at the end of the block."""
        share = Share(self)
        try:
            yield share
        finally:
            self.num_bytes -= share.num_counted

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` more. Raises `Overloaded` when there is no room."""
        if num_bytes and self.num_bytes + num_bytes > self._max_bytes:
            raise Overloaded("too many large bodies at once; try again", code="too_many_bodies")
        self.num_bytes += num_bytes


class Share:
    """What one body has taken so far."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self.num_counted = 0

    def add(self, num_bytes: int) -> None:
        """`num_bytes` more have come. Raises `Overloaded` when there is no room for them."""
        counted = max(0, self._num_bytes + num_bytes - limits.FREE_BODY_BYTES)
        self._budget.take(counted - self.num_counted)
        self._num_bytes += num_bytes
        self.num_counted = counted

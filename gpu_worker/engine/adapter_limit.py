"""How many adapters may run at once, and who may pass whom because of it.

A step computes with so many different adapters at most. Who waits for one more keeps its place: of those behind only
sequences without an adapter pass it, since others would keep the adapters that run from ever leaving. So an adapter
waits at most until all that run now with one of them have ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import islice

from gpu_worker.engine.sequence import Sequence

MAX_LOOKED_AT = 64
"""Sequences behind one that waits for an adapter of which one without may pass; a plan looks at no more."""


class AdapterLimit:
    """At most `most` different adapters run; 0: sequences have none."""

    def __init__(self, most: int) -> None:
        self._most = most

    def has_room(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether `sequence` may join those that run."""
        if sequence.adapter is None:
            return True
        others = {other.adapter for other in running} - {None}
        return sequence.adapter in others or len(others) < self._most

    def first(self, waiting: List[Sequence], running: Iterable[Sequence]) -> Sequence | None:
        """The first of `waiting` that may join those that run, as the module says."""
        if self.has_room(waiting[0], running):
            return waiting[0]
        return next((s for s in islice(waiting, 1, MAX_LOOKED_AT) if s.adapter is None), None)

    def check(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError when too many adapters run."""
        assert len({s.adapter for s in running} - {None}) <= self._most, "more adapters run than may"

"""Going down without losing a stream.

First signal: new work is refused with 503, open responses go on. When they are done, or after the grace time, those
still open are cut without a terminal event; their requests run on, and their clients resume at another gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Overloaded


class Drain:
    """Knows every response that is being written, by its task."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.is_draining = False
        self.is_closing = False

    def check(self) -> None:
        """Raise `Overloaded` once the gateway drains."""
        if self.is_draining:
            raise Overloaded("this gateway is shutting down; use another one", retry_after_s=1, code="draining")

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Within, the current task is a response that a drain waits for."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._is_idle.clear()
        try:
            yield
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._is_idle.set()

    async def run(self, grace_s: float) -> None:
        """Refuse new work, wait for open responses up to `grace_s`, then cut the rest."""
        self.is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._is_idle.wait()
        except TimeoutError:
            self.is_closing = True
            for task in list(self._tasks):
                task.cancel()

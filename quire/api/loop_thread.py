"""An event loop in a thread of its own, so that blocking calls work wherever they are made, a notebook included."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")

LEAVE_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines; `close` at the end. Of no use in a fork of the process that made it: threads are not copied."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="quire-client", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it can run anything."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """What `work` returns or raises. Whatever interrupts the caller (Ctrl-C) cancels it and waits for its end."""
        has_ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_told(work, has_ended), self._loop)
        try:
            return future.result()
        finally:
            if not future.done():
                future.cancel()
                has_ended.wait(LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """End the thread; harmless when it has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _told(work: Coroutine[Any, Any, R], has_ended: threading.Event) -> R:
    try:
        return await work
    finally:
        has_ended.set()

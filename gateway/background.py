"""Small tasks that outlive the response that began them: telling the bus about a departure or a stop string."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from shared.errors import BusError
from shared.logs import get_log

RETRY_S = 0.2

_log = get_log("gateway.background")


class Background:
    """Holds tasks so that they are not lost, and waits for them at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout_s: float) -> None:
        """Wait for what still runs, then cancel it."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in late:
            task.cancel()


async def insist(step: Callable[[], Awaitable[Any]], *, request_id: str, timeout_s: float) -> None:
    """Do `step` (idempotent) again until the bus takes it, for at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await step()
                    return
                except BusError as error:
                    _log.recurring("write.failed", request_id=request_id, error=error)
                    await asyncio.sleep(RETRY_S)
    except TimeoutError:
        _log.error("write.abandoned", request_id=request_id)

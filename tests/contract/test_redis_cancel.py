"""A task that waits for Redis can be cancelled at any moment; else a service would not stop."""

from __future__ import annotations

import asyncio

from shared.bus import Bus
from shared.ids import EntryId


async def _read_for_ever(bus: Bus) -> None:
    while True:
        await bus.ping()
        await bus.read_reports(EntryId("$"), 1, 1)


async def test_a_cancelled_caller_ends_whatever_it_was_doing(redis_bus: Bus) -> None:
    """Cancelled after any number of turns of the loop, before or after a send completes, the task should be done."""
    await redis_bus.ping()
    for turns in range(200):
        task = asyncio.create_task(_read_for_ever(redis_bus))
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2.0)
        assert done, f"not cancelled after {turns} turns"

"""A caller that is cancelled in the middle of a call to Redis stays cancelled."""

from __future__ import annotations

import asyncio
import random

from shared.bus import Bus
from shared.ids import EntryId, GatewayId, WorkerId


async def _call_for_ever(bus: Bus, kind: str) -> None:
    while True:
        if kind == "script":
            await bus.gateway_beat(GatewayId("g"))
        elif kind == "command":
            await bus.list_live()
        else:
            await bus.read_inbox(WorkerId("w"), EntryId("0-0"), 10, 2000)


async def test_a_cancellation_is_never_swallowed(redis_bus: Bus) -> None:
    """Wherever in a call the cancellation comes, the task should end by it (asyncio.wait_for of 3.11 may lose one)."""
    moments = random.Random(1)
    for number in range(300):
        task = asyncio.create_task(_call_for_ever(redis_bus, ("script", "command", "read")[number % 3]))
        await asyncio.sleep(moments.random() * 0.002)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=1)
        assert done, "the cancellation was lost, or came only when the server answered"
        assert task.cancelled()
    await redis_bus.gateway_bye(GatewayId("g"))

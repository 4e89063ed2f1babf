"""A cancelled bus call ends as cancelled: a loop that is told to stop must not go on as if nothing had been said."""

from __future__ import annotations

import asyncio

import pytest

from quire.embedded_redis import EmbeddedRedis
from shared.ids import WorkerId
from shared.redis_bus import open_bus


@pytest.mark.parametrize("num_turns", range(30))
async def test_a_call_cancelled_while_it_connects_should_end_as_cancelled(
    redis_server: EmbeddedRedis, num_turns: int
) -> None:
    """Wherever between opening the socket and the first reply the cancellation comes, the task should end by it."""
    bus = open_bus(redis_server.url)
    task = asyncio.create_task(bus.beat(WorkerId("w:1"), 1, []))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    was_done = task.done()
    task.cancel()
    await asyncio.wait([task])
    await bus.close()
    assert task.cancelled() or was_done

"""The cell that contract tests work on, and its end: every request still live is ended, so that each test also shows
that the end cleans up from the state it left."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import pytest

from quire.embedded_redis import EmbeddedRedis
from shared.bus import Bus, BusLimits
from shared.memory_bus import MemoryBus
from tests.contract.cell import W1, W2, Cell, MemoryProbe, Probe, RedisProbe


@pytest.fixture
async def cell(bus: Bus) -> AsyncIterator[Cell]:
    yield await Cell.start(bus)
    for request_id in await bus.list_live():
        await bus.end(request_id, "cancelled")
    await bus.bye(W1)
    await bus.bye(W2)


@pytest.fixture
async def probe(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Probe]:
    if isinstance(bus, MemoryBus):
        yield MemoryProbe(bus, time.monotonic)
        return
    from shared.redis_link import RedisLink

    server: EmbeddedRedis = request.getfixturevalue("redis_server")
    link = RedisLink(server.url)
    yield RedisProbe(link)
    await link.close()


@pytest.fixture
async def open_limited(bus: Bus, request: pytest.FixtureRequest) -> AsyncIterator[Callable[[BusLimits], Bus]]:
    """Opens a bus of the kind in turn with other limits; on Redis it shares the data of `bus`."""
    opened: list[Bus] = []

    def open_one(limits: BusLimits) -> Bus:
        if isinstance(bus, MemoryBus):
            return MemoryBus(limits)
        from shared.redis_bus import open_bus

        opened.append(open_bus(request.getfixturevalue("redis_server").url, limits))
        return opened[-1]

    yield open_one
    for one in opened:
        for request_id in await one.list_live():
            await one.end(request_id, "cancelled")
        await one.close()

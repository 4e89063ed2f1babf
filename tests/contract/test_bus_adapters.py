"""The adapters of a cell: registered, replaced and forgotten by name."""

from __future__ import annotations

import dataclasses

from shared import keys
from shared.bus import Bus
from shared.messages import AdapterCard
from shared.redis_link import RedisLink

CARD = AdapterCard(name="sql", model="m", path="/adapters/sql", content="0" * 32)


async def test_an_adapter_is_known_until_it_is_dropped(bus: Bus) -> None:
    """Whoever asks should find what was registered last under a name."""
    assert await bus.read_adapters() == {}
    await bus.put_adapter(CARD)
    other = dataclasses.replace(CARD, name="täxt", path="/adapters/täxt")
    await bus.put_adapter(other)
    changed = dataclasses.replace(CARD, content="1" * 32)
    await bus.put_adapter(changed)
    assert await bus.read_adapters() == {"sql": changed, "täxt": other}
    assert await bus.drop_adapter("sql")
    assert not await bus.drop_adapter("sql")
    assert await bus.read_adapters() == {"täxt": other}


async def test_what_nobody_can_read_is_left_out(redis_bus: Bus, redis_server: object) -> None:
    """Foreign bytes under a name should be put away, and the others stay."""
    link = RedisLink(redis_server.url)  # type: ignore[attr-defined]
    await redis_bus.put_adapter(CARD)
    await link.call("HSET", keys.ADAPTERS, "odd", b"\x00odd")
    assert await redis_bus.read_adapters() == {"sql": CARD}
    assert await link.call("HEXISTS", keys.ADAPTERS, "odd") == 0
    assert await link.call("XLEN", keys.DEAD) == 1
    await link.close()

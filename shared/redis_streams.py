"""Streams in Redis as typed messages: reading, dead letters, and a consumer group that comes back by itself.

Entries have the fields `d`, the message, and mostly `id`, the request it is about: with it a message that cannot be
read still names the request that must be ended. A bad entry is buried, removed and never returned, so no reader stops
at it; removal comes last, so a crash in between only buries it twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from shared import keys, wire
from shared.dead_letters import MAX_BURIED_BYTES, named_request
from shared.errors import BusBroken, BusUnavailable, WireError
from shared.ids import EntryId, RequestId
from shared.logs import get_log
from shared.redis_link import MAX_BLOCK_MS, RedisLink

M = TypeVar("M")

GROUP_ATTEMPTS = 3
"""How often in a row one read makes a lost group again."""

log = get_log("bus")


@dataclass(frozen=True, slots=True)
class _Entry:
    id: EntryId
    fields: dict[bytes, bytes]


class RedisStreams:
    """Readers of one bus. `fail` ends a request that a bad message names."""

    def __init__(self, link: RedisLink, fail: Callable[[RequestId], Awaitable[None]]) -> None:
        self._link = link
        self._fail = fail

    async def read(
        self, stream: str, kinds: tuple[type[M], ...], after: EntryId, count: int, block_ms: int
    ) -> list[tuple[EntryId, M]]:
        """Messages after entry `after`."""
        reply = await self._link.wait("XREAD", "COUNT", count, *_block(block_ms), "STREAMS", stream, after)
        return await self._decode(stream, _entries(reply[0][1]) if reply else [], kinds)

    async def read_group(
        self, stream: str, kinds: tuple[type[M], ...], consumer: str, count: int, block_ms: int
    ) -> list[tuple[EntryId, M]]:
        """New messages for the group; the group is made at 0 when it is not there."""
        read = partial(self._link.wait, "XREADGROUP", "GROUP", keys.SUBMIT_GROUP, consumer, "COUNT", count)
        reply = await self._with_group(stream, partial(read, *_block(block_ms), "STREAMS", stream, ">"))
        return await self._decode(stream, _entries(reply[0][1]) if reply else [], kinds)

    async def claim(
        self, stream: str, kinds: tuple[type[M], ...], consumer: str, min_idle_ms: int, count: int
    ) -> list[tuple[EntryId, M]]:
        """Messages that a consumer of the group read `min_idle_ms` ago and did not ack."""
        entries: list[_Entry] = []
        cursor = b"0-0"
        while True:
            claim = partial(self._link.call, "XAUTOCLAIM", stream, keys.SUBMIT_GROUP, consumer, min_idle_ms, cursor)
            reply = await self._with_group(stream, partial(claim, "COUNT", count))
            cursor = reply[0]
            entries += _entries(reply[1])
            if cursor == b"0-0" or len(entries) >= count:
                return await self._decode(stream, entries, kinds)

    async def bury(self, source: str, data: bytes, why: str) -> None:
        """Put bytes that nobody can read into `dead`; where `dead` is no stream they are only logged, since a message
        that can be neither read nor buried would hold up all that come after it."""
        log.warning("message.buried", source=source, size=len(data), why=why)
        kept = data[:MAX_BURIED_BYTES]
        with contextlib.suppress(BusBroken):
            await self._link.call(
                "XADD", keys.DEAD, "MAXLEN", "~", keys.DEAD_CAP, "*", "source", source, "d", kept, "why", why
            )

    async def _with_group(self, stream: str, read: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(GROUP_ATTEMPTS):
            try:
                return await read()
            except BusBroken as error:
                if "NOGROUP" not in str(error):
                    raise
            try:
                await self._link.call("XGROUP", "CREATE", stream, keys.SUBMIT_GROUP, "0", "MKSTREAM")
            except BusBroken as error:
                if "BUSYGROUP" not in str(error):  # another scheduler was faster
                    raise
        raise BusUnavailable(f"the consumer group of {stream} is lost again and again")

    async def _decode(self, stream: str, entries: list[_Entry], kinds: tuple[type[M], ...]) -> list[tuple[EntryId, M]]:
        messages: list[tuple[EntryId, M]] = []
        for entry in entries:
            data = entry.fields.get(b"d", b"")
            try:
                messages.append((entry.id, wire.decode(data, *kinds)))
            except WireError as error:
                await self._remove(stream, entry, data, str(error))
        return messages

    async def _remove(self, stream: str, entry: _Entry, data: bytes, why: str) -> None:
        await self.bury(stream, data, why)
        name = entry.fields.get(b"id")
        request_id = named_request(data) if name is None else RequestId(name.decode(errors="replace"))
        if request_id is not None:
            await self._fail(request_id)
        if stream == keys.SUBMIT:
            await self._link.call("XACK", stream, keys.SUBMIT_GROUP, entry.id)
        await self._link.call("XDEL", stream, entry.id)


def _block(block_ms: int) -> tuple[str, ...]:
    """BLOCK 0 would wait for ever: no wait is no BLOCK."""
    return ("BLOCK", str(min(block_ms, MAX_BLOCK_MS))) if block_ms > 0 else ()


def _entries(raw: list[Any]) -> list[_Entry]:
    """Entries of a reply; Redis 6.2 answers nil for those deleted meanwhile."""
    pairs = [item for item in raw if item is not None and item[1] is not None]
    return [_Entry(EntryId(i.decode()), dict(zip(f[::2], f[1::2], strict=True))) for i, f in pairs]

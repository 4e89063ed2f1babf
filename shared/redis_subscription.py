"""A subscription to a gateway's channel that lives through lost connections.

Whatever goes wrong with a connection, it is dropped and `next` makes a new one; the caller sees `Subscribed` and knows
that publications may have been missed. A dead network path shows no error, so a silent connection is asked with PING.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from shared import keys, wire
from shared.bus import ChannelMessage, Subscribed
from shared.errors import BusError, WireError
from shared.ids import GatewayId
from shared.messages import RequestEnded, TokenChunk
from shared.redis_link import COMMAND_TIMEOUT_S, RedisLink
from shared.redis_streams import RedisStreams

PING_AFTER_S = 5.0
"""Silence after which the connection is asked; the same again without an answer, and it is given up."""
RETRY_S = 0.2


class RedisSubscription:
    """See `shared.bus.Subscription`. One task at a time may wait in `next`."""

    def __init__(self, link: RedisLink, streams: RedisStreams, gateway_id: GatewayId) -> None:
        self._link = link
        self._streams = streams
        self._channel = keys.token_channel(gateway_id)
        self._pubsub: Any = None
        self._connecting: asyncio.Task[Any] | None = None
        self._heard_at = 0.0
        self._is_asked = False

    async def next(self, timeout_s: float) -> list[ChannelMessage] | Subscribed | None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while True:
            event = await self._receive(min(deadline - clock(), PING_AFTER_S))
            if event is not None:
                return event
            if clock() >= deadline:
                return None

    async def close(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait({connecting})
            if not connecting.cancelled() and connecting.exception() is None:
                pubsub = connecting.result()
        if pubsub is not None:
            await pubsub.aclose()

    async def _receive(self, wait_s: float) -> list[ChannelMessage] | Subscribed | None:
        """One frame from the connection, None when there was none for us in `wait_s`."""
        from redis.exceptions import RedisError

        try:
            if self._pubsub is None and not await self._connect(wait_s):
                return None
            frame = await self._pubsub.get_message(timeout=max(wait_s, 0.001))
            await self._note(is_silent=frame is None)
        except (RedisError, OSError):
            await self.close()
            await asyncio.sleep(max(0.0, min(RETRY_S, wait_s)))
            return None
        if frame is None or frame["type"] not in ("subscribe", "message"):
            return None
        return Subscribed() if frame["type"] == "subscribe" else await self._decode(frame["data"])

    async def _connect(self, wait_s: float) -> bool:
        """Whether the connection stands; one that takes longer than `wait_s` goes on by itself until the next call."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open())
        done, _ = await asyncio.wait({self._connecting}, timeout=wait_s)
        if not done:
            return False
        connecting, self._connecting = self._connecting, None
        self._pubsub = connecting.result()
        self._heard_at, self._is_asked = asyncio.get_running_loop().time(), False
        return True

    async def _open(self) -> Any:
        async with contextlib.AsyncExitStack() as undo:
            pubsub = self._link.reads.pubsub()
            undo.push_async_callback(pubsub.aclose)
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await pubsub.subscribe(self._channel)
            undo.pop_all()
        return pubsub

    async def _note(self, *, is_silent: bool) -> None:
        """Keep the silence timer; PING after a while of it, raise `ConnectionError` when that has no answer."""
        now = asyncio.get_running_loop().time()
        if not is_silent:
            self._heard_at, self._is_asked = now, False
        elif now - self._heard_at >= PING_AFTER_S:
            if self._is_asked:
                raise ConnectionError("no answer to PING")
            await self._pubsub.ping()
            self._heard_at, self._is_asked = now, True

    async def _decode(self, data: bytes) -> list[ChannelMessage] | None:
        try:
            return wire.decode_batch(data, TokenChunk, RequestEnded)
        except WireError as error:
            with contextlib.suppress(BusError):  # it is logged too, and what it told is found in the token log
                await self._streams.bury(self._channel, data, str(error))
            return None

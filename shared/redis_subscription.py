"""A subscription to a gateway's channel that lives through lost connections.

Whatever goes wrong with a connection, it is dropped and `next` makes a new one; the caller sees `Subscribed` and knows
that publications may have been missed. A dead network path shows no error, so a silent connection is asked with PING.
Frames that came and were not asked for yet are kept; when they are many, the connection is not read until they are
fewer, and then it is Redis that keeps them, or drops the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from shared import keys, wire
from shared.bus import ChannelMessage, Subscribed
from shared.errors import BusError, WireError
from shared.ids import GatewayId
from shared.redis_connection import RedisConnection
from shared.redis_link import RedisLink
from shared.redis_streams import RedisStreams

PING_AFTER_S = 5.0
"""Silence after which the connection is asked; the same again without an answer, and it is given up."""
RETRY_S = 0.2
MAX_FRAMES = 256


class RedisSubscription:
    """See `shared.bus.Subscription`. One task at a time may wait in `next`."""

    def __init__(self, link: RedisLink, streams: RedisStreams, gateway_id: GatewayId) -> None:
        self._link = link
        self._streams = streams
        self._channel = keys.token_channel(gateway_id)
        self._connection: RedisConnection | None = None
        self._connecting: asyncio.Task[RedisConnection] | None = None
        self._frames: deque[Any] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._heard_at = 0.0
        self._is_asked = False
        self._is_paused = False
        self.deliver: Callable[[list[ChannelMessage]], None] | None = None

    async def next(self, timeout_s: float) -> list[ChannelMessage] | Subscribed | None:
        clock = self._loop.time
        deadline = clock() + timeout_s
        while True:
            while self._frames:
                event = await self._read(self._frames.popleft())
                if event is not None:
                    return event
            wait_s = deadline - clock()
            if wait_s <= 0:
                return None
            await self._listen(min(wait_s, PING_AFTER_S))

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            await asyncio.wait({connecting})
            if not connecting.cancelled() and connecting.exception() is None:
                connection = connecting.result()
        if connection is not None:
            connection.close()
        self._frames.clear()

    async def _listen(self, wait_s: float) -> None:
        """Until a frame may have come, for at most `wait_s`; a connection that is lost or dead is dropped."""
        try:
            if self._connection is None and not await self._connect(wait_s):
                return
            if not self._frames:
                self._check_life()
                await self._wait(wait_s)
        except OSError:
            await self.close()
            await asyncio.sleep(max(0.0, min(RETRY_S, wait_s)))

    async def _connect(self, wait_s: float) -> bool:
        """Whether the connection stands; one that takes longer than `wait_s` goes on by itself until the next call."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._link.open_channel(self._channel, self._on_push))
        done, _ = await asyncio.wait({self._connecting}, timeout=wait_s)
        if not done:
            return False
        connecting, self._connecting = self._connecting, None
        self._connection = connecting.result()
        self._heard_at, self._is_asked, self._is_paused = self._loop.time(), False, False
        return True

    def _on_push(self, frame: Any) -> None:
        if self.deliver is not None and self._is_delivered(frame, self.deliver):
            return
        if frame is not None:
            self._frames.append(frame)
            if len(self._frames) > MAX_FRAMES and self._connection is not None and not self._is_paused:
                self._is_paused = True
                self._connection.pause()
        self._wake()

    def _is_delivered(self, frame: Any, deliver: Callable[[list[ChannelMessage]], None]) -> bool:
        """Whether `frame` went by a plain call, which spares waking the task that waits in `next`."""
        if self._waiting is None or self._waiting.done() or self._frames:
            return False
        match frame:
            case [b"message", _, data]:
                try:
                    messages = wire.decode_publication(data)
                except WireError:
                    return False
                self._heard_at, self._is_asked = self._loop.time(), False
                deliver(messages)
                return True
        return False

    async def _wait(self, wait_s: float) -> None:
        """Until a frame comes or the connection is lost, for at most `wait_s`. Called for each publication: a future
        and a timer cost a third of an event and a time-out."""
        self._waiting = self._loop.create_future()
        timer = self._loop.call_later(wait_s, self._wake)
        try:
            await self._waiting
        finally:
            timer.cancel()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _check_life(self) -> None:
        """PING after a while of silence. Raises `OSError` when the connection is lost, or that has had no answer."""
        connection = self._connection
        if connection is None or not connection.is_open:
            raise ConnectionError("the connection is lost")
        now = self._loop.time()
        if now - self._heard_at >= PING_AFTER_S:
            if self._is_asked:
                raise ConnectionError("no answer to PING")
            connection.tell(("PING",))
            self._heard_at, self._is_asked = now, True

    async def _read(self, frame: Any) -> list[ChannelMessage] | Subscribed | None:
        """What `frame` brings, None when that is nothing for the caller."""
        self._heard_at, self._is_asked = self._loop.time(), False
        if self._is_paused and not self._frames and self._connection is not None:
            self._is_paused = False
            self._connection.resume()
        match frame:
            case [b"message", _, data]:
                return await self._decode(data)
            case [b"subscribe", *_]:
                return Subscribed()
        return None

    async def _decode(self, data: bytes) -> list[ChannelMessage] | None:
        try:
            return wire.decode_publication(data)
        except WireError as error:
            with contextlib.suppress(BusError):  # it is logged too, and what it told is found in the token log
                await self._streams.bury(self._channel, data, str(error))
            return None

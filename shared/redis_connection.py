"""One connection to Redis: commands go out in the order they are asked, replies come back in the same order.

Design note. redis-py connects (addresses, TLS, AUTH, SELECT); then its stream is taken over, hiredis parses, and what
is ours is the line of those who wait. Commands are pipelined: whoever asks gets a future, and all that is asked in one
turn of the event loop goes out in one write. There is no task, no pool, no lock and no time-out behind a command, which
is most of what one costs through `redis.asyncio.Redis`, and a publication reaches `on_push` by plain calls from the
event loop. What follows from it:

* a caller that is cancelled leaves its place in the line; the reply is dropped when it comes (the command was sent);
* a connection that breaks, or on which a command has waited longer than `patience_s`, fails everybody in the line with
  `ConnectionError`: nobody knows which commands took effect;
* frames that no command waits for (publications) go to `on_push`.

RESP2: replies are bytes, ints, None and lists; an error reply raises `redis.exceptions.ResponseError`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from shared.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Argument = bytes | str | int | float

_OPTIONS = {"protocol": 2, "socket_timeout": None, "socket_connect_timeout": None, "health_check_interval": 0}
"""Whatever the address says: the time-outs and the PING of redis-py are for callers that take turns."""
_NOT_YET = object()


class RedisConnection(asyncio.Protocol):
    """See the module; made by `connect`.

    Args:
        stream: of redis-py's connection, which has entered; nobody else uses it.
        patience_s: how long a command may wait for its reply.
        on_push: takes frames that no command waits for; called with None when the connection is lost.
    """

    def __init__(
        self, stream: asyncio.StreamWriter, patience_s: float, on_push: Callable[[Any], None] | None = None
    ) -> None:
        import hiredis
        from redis.connection import HiredisRespSerializer
        from redis.exceptions import ResponseError

        self._reply_error = ResponseError
        self._protocol_error = hiredis.ProtocolError
        self._reader = hiredis.Reader(replyError=ResponseError, notEnoughData=_NOT_YET)
        self._pack: Callable[..., list[bytes]] = HiredisRespSerializer().pack
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._on_push = on_push
        self._line: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._outgoing: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._is_open = True
        self._why_lost = "the connection is lost"
        self._lost = asyncio.Event()
        self._stream = stream  # kept: one that is forgotten closes its transport
        self._transport = cast(asyncio.Transport, stream.transport)
        self._transport.set_protocol(self)

    @property
    def is_open(self) -> bool:
        """Whether commands can be asked."""
        return self._is_open

    @property
    def is_waiting(self) -> bool:
        """Whether a reply is out."""
        return bool(self._line)

    @property
    def waited_s(self) -> float:
        """How long the command that is next in the line has waited; 0 when there is none."""
        return self._loop.time() - self._line[0][1] if self._line else 0.0

    def ask(self, command: tuple[Argument, ...]) -> asyncio.Future[Any]:
        """The reply to `command`, to be awaited. Raises `ConnectionError` when the connection is lost."""
        self.tell(command)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._line.append((future, self._loop.time()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._patience_s, self._check_patience)
        return future

    def tell(self, command: tuple[Argument, ...]) -> None:
        """Send `command`, whose reply is a push. Raises `ConnectionError` when the connection is lost."""
        if not self._is_open:
            raise ConnectionError(self._why_lost)
        packed = self._pack(*command)
        if not self._outgoing:
            self._loop.call_soon(self._send)
        self._outgoing += packed

    def pause(self) -> None:
        """Read no more until `resume`."""
        if self._is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_open:
            self._transport.resume_reading()

    def close(self, why: str = "the connection was closed") -> None:
        """Drop the connection; everybody in the line fails."""
        if self._is_open:
            self._is_open, self._why_lost = False, why
            self._transport.abort()
        self._fail_all()

    async def wait_closed(self) -> None:
        """Until a connection that was closed is gone."""
        await self._lost.wait()

    def data_received(self, data: bytes) -> None:
        """Of the event loop: hand out what has come."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets(False)) is not _NOT_YET:
                self._take(reply)
        except self._protocol_error as error:
            self.close(f"not the protocol of Redis: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Of the event loop: nothing comes any more."""
        if self._is_open:
            self._is_open, self._why_lost = False, str(exc or "Connection closed by server.")
        self._fail_all()
        self._lost.set()
        if self._on_push is not None:
            self._on_push(None)

    def _take(self, reply: Any) -> None:
        if not self._is_open:
            return
        if not self._line:
            if self._on_push is not None:
                self._on_push(reply)
            return
        future, _ = self._line.popleft()
        if future.done():
            return
        if isinstance(reply, self._reply_error):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    def _send(self) -> None:
        """Write what was asked since the last turn of the loop."""
        packed, self._outgoing = self._outgoing, []
        if self._is_open and not self._transport.is_closing():  # a socket that broke in this turn: `connection_lost`
            self._transport.write(packed[0] if len(packed) == 1 else b"".join(packed))

    def _check_patience(self) -> None:
        """Give the connection up when the first in the line has waited too long; else look again when it would have."""
        self._watch = None
        if not self._line:
            return
        left_s = self._patience_s - self.waited_s
        if left_s <= 0:
            self.close(f"no answer in {self._patience_s:g} s")
        else:
            self._watch = self._loop.call_later(left_s, self._check_patience)

    def _fail_all(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._line:
            future, _ = self._line.popleft()
            if not future.done():
                future.set_exception(ConnectionError(self._why_lost))


def connection_maker(url: str) -> Callable[[], AbstractConnection]:
    """What makes redis-py's connections, not connected yet, to the Redis at `url`, whose options are redis-py's.

    Raises:
        ConfigError: it is no address of a Redis, or it has an option that there is not.
    """
    from redis.asyncio.connection import Connection, parse_url
    from redis.exceptions import RedisError

    try:
        options: dict[str, Any] = {**parse_url(url), **_OPTIONS}
        if not (options.get("host") or options.get("path")):
            raise ValueError("no host, no path")
        make = partial(options.pop("connection_class", Connection), **options)
        make()
    except (TypeError, ValueError, RedisError):  # its text may hold a part of the password
        forms = "redis://[:password@]host:port/db, rediss://... or unix:///path"
        raise ConfigError(f"--redis-url: no address of a Redis; use {forms}") from None
    return make


async def connect(
    make: Callable[[], AbstractConnection],
    *,
    timeout_s: float,
    patience_s: float,
    on_push: Callable[[Any], None] | None = None,
) -> RedisConnection:
    """A connection that has entered.

    Raises:
        OSError: it cannot be made (`ConnectionError`: Redis refused, or did not answer in `timeout_s`).
    """
    from redis.exceptions import RedisError

    connection = make()
    async with AsyncExitStack() as undo:
        undo.push_async_callback(connection.disconnect, nowait=True)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
        except (RedisError, RuntimeError) as error:  # RuntimeError: uvloop's, of a socket that broke in this turn
            raise ConnectionError(str(error)) from error
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {timeout_s:g} s") from error
        stream = _take_over(connection)
        undo.pop_all()
    return RedisConnection(stream, patience_s, on_push)


def _take_over(connection: AbstractConnection) -> asyncio.StreamWriter:
    """The stream of `connection`, which for redis-py is disconnected then. Raises `ConnectionError` when it is lost."""
    reader, stream = connection._reader, connection._writer
    if reader is None or stream is None or reader.at_eof() or stream.transport.is_closing():
        raise ConnectionError("the connection is lost")
    connection._reader = connection._writer = None
    return stream

"""One connection to Redis: commands go out in the order they are asked, replies come back in the same order.

Design note. redis-py connects (TLS, AUTH, SELECT), packs and parses; what is ours is the line of those who wait.
Commands are pipelined: whoever asks gets a future, and all that is asked in one turn of the event loop goes out in one
write. One task reads; replies that came together are handed out without leaving it. So a command needs no pool, no lock
and no time-out of its own, which is most of what one costs through `redis.asyncio.Redis`. What follows from it:

* a caller that is cancelled leaves its place in the line; the reply is dropped when it comes (the command was sent);
* a connection that breaks, or on which a command has waited longer than `patience_s`, fails everybody in the line with
  `ConnectionError`: nobody knows which commands took effect. redis-py takes some error replies for a broken connection
  too (LOADING, NOAUTH, too many clients); each would meet every command behind it;
* frames that no command waits for (publications) go to `on_push`.

RESP2: replies are bytes, ints, None and lists; an error reply raises `redis.exceptions.ResponseError`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigError

if TYPE_CHECKING:
    from redis.asyncio.connection import AbstractConnection

Argument = bytes | str | int | float

_OPTIONS = {"protocol": 2, "socket_timeout": None, "socket_connect_timeout": None, "health_check_interval": 0}
"""Whatever the address says: the time-outs and the PING of redis-py are for callers that take turns."""


class RedisConnection:
    """See the module; made by `connect`.

    Args:
        connection: redis-py's, connected.
        patience_s: how long a command may wait for its reply.
        on_push: takes frames that no command waits for; called with None when the connection is lost.
    """

    def __init__(
        self, connection: AbstractConnection, patience_s: float, on_push: Callable[[Any], None] | None = None
    ) -> None:
        from redis.connection import HiredisRespSerializer

        self._connection = connection
        self._pack: Callable[..., list[bytes]] = HiredisRespSerializer().pack  # the connection's own takes 3 × as long
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._on_push = on_push
        self._line: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._outgoing: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._is_open = True
        self._why_lost = "the connection is lost"
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._reading = self._loop.create_task(self._read())
        self._sending: asyncio.Task[None] | None = None

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
            self._sending = self._loop.create_task(self._send())
        self._outgoing += packed

    def pause(self) -> None:
        """Read no more until `resume`."""
        self._may_read.clear()

    def resume(self) -> None:
        """Read on."""
        self._may_read.set()

    def close(self, why: str = "the connection was closed") -> None:
        """Drop the connection; everybody in the line fails."""
        if self._is_open:
            self._is_open, self._why_lost = False, why
            self._loop.call_soon(self._reading.cancel)  # by then it has begun, so that it disconnects
        self._fail_all()

    async def wait_closed(self) -> None:
        """Until a connection that was closed is gone."""
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        """Hand out what comes until the connection is lost or closed."""
        from redis.exceptions import RedisError, ResponseError

        read = partial(
            self._connection.read_response, disable_decoding=True, timeout=math.inf, disconnect_on_error=False
        )
        try:
            while await self._may_read.wait():
                try:
                    self._take(await read())
                except ResponseError as error:
                    self._take(error)
        except RedisError as error:
            self._why_lost = str(error)
        finally:
            self._is_open = False
            self._fail_all()
            await self._connection.disconnect(nowait=True)
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
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)

    async def _send(self) -> None:
        """Write what was asked since the last turn of the loop."""
        from redis.exceptions import RedisError

        packed, self._outgoing = self._outgoing, []
        if not self._is_open:  # redis-py would connect again
            return
        try:
            await self._connection.send_packed_command(packed, check_health=False)
        except (RedisError, RuntimeError) as error:  # RuntimeError: uvloop's, of a socket that broke in this turn
            self.close(str(error))

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
        except (RedisError, RuntimeError) as error:  # RuntimeError: as in `_send`
            raise ConnectionError(str(error)) from error
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {timeout_s:g} s") from error
        undo.pop_all()
    return RedisConnection(connection, patience_s, on_push)

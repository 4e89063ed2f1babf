"""One connection to Redis: commands go out in the order they are asked, replies come back in the same order.

Design note. Commands are pipelined: whoever asks gets a future, and all that is asked in one turn of the event loop
goes out in one write. There is no task and no lock behind it, so a command costs little more than packing it, one
system call each way, and waking its caller; that is most of what a service pays for a token. What follows from it:

* a caller that is cancelled leaves its place in the line; the reply is dropped when it comes (the command was sent);
* a connection that breaks, or on which a command has waited longer than `patience_s`, fails everybody in the line with
  `ConnectionError`: nobody knows which commands took effect;
* frames that no command waits for (publications) go to `on_push`.

RESP2 through hiredis: replies are bytes, ints, None and lists; an error reply raises `hiredis.ReplyError`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from shared.redis_address import RedisAddress

Argument = bytes | str | int | float

_NOT_YET = object()


class RedisConnection(asyncio.Protocol):
    """See the module; made by `connect`.

    Args:
        patience_s: how long a command may wait for its reply.
        on_push: takes frames that no command waits for; called with None when the connection is lost.
    """

    def __init__(self, patience_s: float, on_push: Callable[[Any], None] | None = None) -> None:
        import hiredis

        self._pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
        self._reader = hiredis.Reader(notEnoughData=_NOT_YET)
        self._reply_error = hiredis.ReplyError
        self._protocol_error = hiredis.ProtocolError
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._on_push = on_push
        self._transport: asyncio.Transport | None = None
        self._line: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._outgoing: list[bytes] = []
        self._watch: asyncio.TimerHandle | None = None
        self._why_lost = "the connection is lost"

    @property
    def is_open(self) -> bool:
        """Whether commands can be asked."""
        return self._transport is not None and not self._transport.is_closing()

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
        if not self.is_open:
            raise ConnectionError(self._why_lost)
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(self._pack(command))

    def pause(self) -> None:
        """Read no more until `resume`."""
        if self._transport is not None and self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and self.is_open:
            self._transport.resume_reading()

    def close(self, why: str = "the connection was closed") -> None:
        """Drop the connection; everybody in the line fails."""
        if self.is_open and self._transport is not None:
            self._why_lost = why
            self._transport.abort()
        self._fail_all()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOT_YET:
                self._take(reply)
        except self._protocol_error as error:
            self.close(f"not the protocol of Redis: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._why_lost = str(exc) or type(exc).__name__
        self._fail_all()
        if self._on_push is not None:
            self._on_push(None)

    def _take(self, reply: Any) -> None:
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

    def _flush(self) -> None:
        data, self._outgoing = b"".join(self._outgoing), []
        if self._transport is not None and self.is_open:
            self._transport.write(data)

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


async def connect(
    address: RedisAddress, *, timeout_s: float, patience_s: float, on_push: Callable[[Any], None] | None = None
) -> RedisConnection:
    """A connection that has entered.

    Raises:
        OSError: it cannot be made (`ConnectionError`: Redis refused, or did not answer in `timeout_s`).
    """
    import hiredis

    loop = asyncio.get_running_loop()
    connection = RedisConnection(patience_s, on_push)
    with ExitStack() as undo:
        undo.callback(connection.close)
        try:
            async with asyncio.timeout(timeout_s):
                if address.path:
                    await loop.create_unix_connection(lambda: connection, address.path)
                else:
                    await loop.create_connection(lambda: connection, address.host, address.port, ssl=address.tls())
                for command in address.greeting():
                    await connection.ask(command)
        except hiredis.HiredisError as error:
            raise ConnectionError(str(error)) from error
        except TimeoutError as error:
            raise ConnectionError(f"no connection in {timeout_s:g} s") from error
        undo.pop_all()
    return connection

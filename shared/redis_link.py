"""The connections of one process to Redis, and what its errors mean to us.

Commands and scripts share one connection, which pipelines them; another one is opened only when a command on it has
been waiting for long (a stuck script, a large record). Blocking reads have connections of their own, so that they never
delay a script. Nothing is sent twice by itself: a caller of the bus decides what to do again, since only it knows
whether that is safe. Replies are raw RESP2 (bytes, ints, lists), the same from every server version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from shared.errors import BusBroken, BusError, BusRefused, BusUnavailable, LeaderLost, shorten
from shared.redis_connection import Argument, RedisConnection, connect, connection_maker
from shared.redis_lua import NOT_LEADER, Script

if TYPE_CHECKING:
    from redis.exceptions import ResponseError

CONNECT_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 5.0
MAX_BLOCK_MS = 2_000
"""Longest a blocking read waits: it bounds how late a dead network path is noticed. Callers loop anyway."""
MAX_COMMAND_CONNECTIONS = 4
STALLED_S = 0.005
"""A connection whose next reply is out for longer than this gets no more commands while another one can be had."""

_REFUSALS = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
_ABSENCES = frozenset({"READONLY", "BUSY", "UNBLOCKED", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"})


class RedisLink:
    """Runs commands and scripts on the Redis at `url`. Raises `ConfigError` for an URL that is none."""

    def __init__(self, url: str) -> None:
        from redis.exceptions import ResponseError

        self._reply_error = ResponseError
        self._make = connection_maker(url)
        self._commands: list[RedisConnection] = []
        self._connecting: asyncio.Task[RedisConnection] | None = None
        self._idle_reads: list[RedisConnection] = []
        self._busy_reads: set[RedisConnection] = set()

    async def call(self, *command: Argument) -> Any:
        """The raw reply of one command."""
        try:
            connection = self._ready() or await self._connected()
            return await connection.ask(command)
        except (OSError, self._reply_error) as error:
            raise _our_error(error) from error

    async def wait(self, *command: Argument) -> Any:
        """The raw reply of one command that may block, on a connection of its own."""
        try:
            connection = self._take_idle_read() or await self._open(COMMAND_TIMEOUT_S + MAX_BLOCK_MS / 1000)
            self._busy_reads.add(connection)
            try:
                return await connection.ask(command)
            finally:
                self._give_back(connection)
        except (OSError, self._reply_error) as error:
            raise _our_error(error) from error

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """The raw reply of a script. Raises `LeaderLost` when it says so."""
        try:
            return await self.call("EVALSHA", script.sha, 0, *arguments)
        except BusBroken as error:
            if "NOSCRIPT" not in str(error):
                raise
        return await self.call("EVAL", script.source, 0, *arguments)

    async def open_channel(self, channel: str, on_push: Callable[[Any], None]) -> RedisConnection:
        """A connection that is subscribing to `channel`: `on_push` takes its frames, None when it is lost. Close it.

        Raises:
            OSError: it cannot be made.
        """
        connection = await self._open(COMMAND_TIMEOUT_S, on_push)
        connection.tell(("SUBSCRIBE", channel))
        return connection

    async def close(self) -> None:
        """Drop all connections."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        connections = (*self._commands, *self._idle_reads, *self._busy_reads)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.wait_closed()
        self._commands.clear()
        self._idle_reads.clear()
        await asyncio.sleep(0)  # lets the loop close what was dropped

    def _ready(self) -> RedisConnection | None:
        """A connection that answers swiftly, None when there is none and one more may be opened."""
        for connection in self._commands:
            if connection.is_open and connection.waited_s < STALLED_S:
                return connection
        self._commands = [connection for connection in self._commands if connection.is_open]
        if len(self._commands) < MAX_COMMAND_CONNECTIONS:
            return None
        return min(self._commands, key=lambda connection: connection.waited_s)

    async def _connected(self) -> RedisConnection:
        """One more connection for commands. All who need one at a time share it, so it outlives a cancelled caller."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open(COMMAND_TIMEOUT_S))
            self._connecting.add_done_callback(self._note_connected)
        return await asyncio.shield(self._connecting)

    def _note_connected(self, connecting: asyncio.Task[RedisConnection]) -> None:
        self._connecting = None
        if not connecting.cancelled() and connecting.exception() is None:
            self._commands.append(connecting.result())

    def _open(
        self, patience_s: float, on_push: Callable[[Any], None] | None = None
    ) -> Coroutine[Any, Any, RedisConnection]:
        return connect(self._make, timeout_s=CONNECT_TIMEOUT_S, patience_s=patience_s, on_push=on_push)

    def _take_idle_read(self) -> RedisConnection | None:
        while self._idle_reads:
            connection = self._idle_reads.pop()
            if connection.is_open:
                return connection
        return None

    def _give_back(self, connection: RedisConnection) -> None:
        """Keep a connection for the next read, unless its reply is still out: the reader was cancelled."""
        self._busy_reads.discard(connection)
        if connection.is_waiting:
            connection.close()
        else:
            self._idle_reads.append(connection)


def _our_error(error: OSError | ResponseError) -> BusError | LeaderLost:
    """What a lost connection or an error reply means."""
    if isinstance(error, OSError):
        return BusUnavailable(f"Redis: {shorten(error)}")  # it may name a socket, which may be anything
    text = f"{error.status_code or ''} {error}".strip()  # redis-py takes the first word off when it knows it
    words = {word.lstrip("-") for word in text.split()}  # Redis 6.2 wraps a script's error in a sentence
    if NOT_LEADER in words:
        return LeaderLost(text)
    if words & _REFUSALS:
        return BusRefused(f"Redis refuses writes: {text}")
    if words & _ABSENCES:
        return BusUnavailable(f"Redis: {text}")
    return BusBroken(f"Redis: {text}")

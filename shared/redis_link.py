"""The connections of one process to Redis, and what its errors mean to us.

Commands and scripts share a small pool that queues callers; blocking reads have connections of their own, so that they
never delay a script. redis-py's own retries are off: a caller of the bus decides what to do again, since only it knows
whether that is safe. So are its time-outs: it sends under `asyncio.wait_for`, which before Python 3.12 forgets a
cancellation that comes just as the sending ends; one `asyncio.timeout` around each call covers all of it. Replies are
raw RESP2 (bytes, ints, lists), the same from every server version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from shared.errors import BusBroken, BusRefused, BusUnavailable, ConfigError, LeaderLost
from shared.redis_lua import NOT_LEADER, Script

Argument = bytes | str | int | float

CONNECT_TIMEOUT_S = 2.0
COMMAND_TIMEOUT_S = 5.0
MAX_BLOCK_MS = 2_000
"""Longest a blocking read waits: it bounds how late a dead network path is noticed. Callers loop anyway."""
MAX_CONNECTIONS = 16

_REFUSALS = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
_ABSENCES = frozenset({"READONLY", "BUSY", "UNBLOCKED", "LOADING"})


class RedisLink:
    """Runs commands and scripts on the Redis at `url`. Raises `ConfigError` for an URL that is none."""

    def __init__(self, url: str) -> None:
        from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        options: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": None,
        }
        try:
            commands = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=None, **options)
            reads = ConnectionPool.from_url(url, **options)
        except ValueError:
            forms = "redis://[:password@]host:port/db, rediss://... or unix:///path"
            raise ConfigError(f"--redis-url: no address of a Redis; use {forms}") from None
        self._commands: Any = Redis(connection_pool=commands)
        self.reads: Any = Redis(connection_pool=reads)
        for client in (self._commands, self.reads):
            client.response_callbacks.clear()

    async def call(self, *command: Argument) -> Any:
        """The raw reply of one command."""
        async with _our_errors(COMMAND_TIMEOUT_S):
            return await self._commands.execute_command(*command)

    async def wait(self, *command: Argument) -> Any:
        """The raw reply of one command that may block, on a connection of its own."""
        async with _our_errors(COMMAND_TIMEOUT_S + MAX_BLOCK_MS / 1000):
            return await self.reads.execute_command(*command)

    async def run(self, script: Script, *arguments: Argument) -> Any:
        """The raw reply of a script. Raises `LeaderLost` when it says so."""
        from redis.exceptions import NoScriptError

        async with _our_errors(COMMAND_TIMEOUT_S):
            try:
                return await self._commands.execute_command("EVALSHA", script.sha, 0, *arguments)
            except NoScriptError:
                return await self._commands.execute_command("EVAL", script.source, 0, *arguments)

    async def close(self) -> None:
        """Free all connections."""
        for client in (self._commands, self.reads):
            await client.aclose()
            await client.connection_pool.disconnect()


@asynccontextmanager
async def _our_errors(timeout_s: float) -> AsyncIterator[None]:
    from redis import exceptions

    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise BusUnavailable(f"Redis: no answer in {timeout_s:g} s") from error
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise BusUnavailable(f"Redis: {error}") from error
    except exceptions.ResponseError as error:
        text = str(error)
        words = {word.lstrip("-") for word in text.split()}  # Redis 6.2 wraps a script's error in a sentence
        if NOT_LEADER in words:
            raise LeaderLost(text) from None
        if isinstance(error, exceptions.OutOfMemoryError) or words & _REFUSALS:
            raise BusRefused(f"Redis refuses writes: {text}") from error
        absences = (exceptions.ReadOnlyError, exceptions.ClusterDownError, exceptions.TryAgainError)
        if isinstance(error, absences) or words & _ABSENCES:
            raise BusUnavailable(f"Redis: {text}") from error
        raise BusBroken(f"Redis: {text}") from error

"""Waiting for something to become true, with an end and a reason: what tests use in place of sleeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01


def wait_until(condition: Callable[[], object], *, description: str, timeout_s: float = 20.0) -> None:
    """Return as soon as `condition()` is true; fail with `description` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {description}")
        time.sleep(POLL_S)


async def wait_until_async(
    condition: Callable[[], Awaitable[object]], *, description: str, timeout_s: float = 20.0
) -> None:
    """`wait_until` for a condition that is awaited; the event loop turns meanwhile."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {description}")
        await asyncio.sleep(POLL_S)

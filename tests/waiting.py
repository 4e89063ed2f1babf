"""Waiting for something to become true, with an end and a reason: what tests use in place of sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, description: str, timeout_s: float = 20.0) -> None:
    """Return as soon as `condition()` is true; fail with `description` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {description}")
        time.sleep(0.02)

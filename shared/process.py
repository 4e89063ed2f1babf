"""Life and death of one OS process: dying with the parent, signals, exit codes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to SIGKILL this process when its parent dies, by kill -9 too. Linux only; call it early."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_orphan(expected_parent: int) -> bool:
    """Whether the parent died before `die_with_parent` was called."""
    return os.getppid() != expected_parent


def exit_now(code: int) -> NoReturn:
    """End without taking the interpreter apart, which takes about a second once torch is loaded. For the very end of a
    `__main__`: all that should happen has."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def install_stop_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT sets `stop`; a second SIGINT exits at once with 130. A second SIGTERM is harmless."""
    loop = asyncio.get_running_loop()

    def on_term() -> None:
        stop.set()

    def on_interrupt() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, on_term)
    loop.add_signal_handler(signal.SIGINT, on_interrupt)

"""Life and death of one OS process: dying with the parent, signals, exit codes."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to SIGKILL this process when its parent dies, by kill -9 too. Linux only; call it early.

    Args:
        parent: its process id, where it is known: if it has died already, this process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def dying_with_parent() -> Callable[[], None]:
    """For `preexec_fn` of `subprocess.Popen`: the child dies with this process from its first moment on, whatever it
    runs. The kernel ties this to the *thread* that forks. Safe only while no other thread runs (PLW1509)."""
    parent = os.getpid()

    def in_child() -> None:
        die_with_parent()
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return in_child


def leave(exit_code: int) -> NoReturn:
    """End this process at once, with what it wrote flushed. For a process whose work is done and that holds much: the
    interpreter would free it object by object, which took 0.7 s with torch and a small model; the kernel does not."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)


def pause_garbage_collector() -> None:
    """Until `settle_memory`. Nearly all that a start makes stays: importing torch took 1.4 s instead of 1.6 s."""
    gc.disable()


def settle_memory() -> None:
    """For the end of a service's start. What the start has used and freed goes back to the machine (tens of MB where a
    tokenizer or a model was loaded). The garbage collector passes over everything there is now: modules and tables live
    as long as the service does, and looking through them again and again stops every stream for milliseconds."""
    gc.enable()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


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

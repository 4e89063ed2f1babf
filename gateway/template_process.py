"""A chat template in a process of its own (`template_child.py`), which is ended when it takes too long.

The process starts with the first rendering (0.2 s, then 21 MB) and serves all that follow; one that has died is
followed by another. A short chat takes 0.08 ms instead of 0.02 ms here. The process ends with this one: its input
closes.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway import template_child
from shared.config import child_environment
from shared.logs import get_log

MAX_CPU_S = 3
"""Of one rendering; real templates take well under 0.1 s for the largest body. The kernel counts, in whole seconds."""
PATIENCE_S = 60.0
"""Should the process stand still."""

_log = get_log("gateway.template")


class TemplateProcess:
    """Renders one template. Any thread may call; one at a time is served.

    Args:
        source: Jinja.
        variables: such as `bos_token`.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._max_cpu_s = MAX_CPU_S
        self._setting = {"source": source, "variables": dict(variables), "max_cpu_s": self._max_cpu_s}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def render(self, messages: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """What the process answers: `text`, or `refused` or `failed` with a reason."""
        with self._lock:
            process, data = self._process, template_child.frame({"messages": messages})
            if process is None:
                process, data = self._start(), template_child.frame(self._setting) + data
            try:
                return _exchange(process, data)
            except (OSError, EOFError):
                self._stop()
                is_long = process.returncode == -signal.SIGXCPU
                why = f"it computes for longer than {self._max_cpu_s} s" if is_long else "its process died"
                _log.warning("template.ended", why=why)
                return {"failed": why}

    def close(self) -> None:
        """End the process; the next rendering would start another."""
        if (process := self._process) is not None:
            process.kill()  # so that nobody waits for what it computes
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", template_child.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0, env=child_environment({}),
        )  # fmt: skip
        self._process, self._end = process, weakref.finalize(self, _end, process)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # which changes nothing where it has ended by itself
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _exchange(process: subprocess.Popen[bytes], data: bytes) -> dict[str, str]:
    """The answer to the frame `data`. Raises `OSError` or `EOFError` when the process ends or stands still."""
    _write(process, data)
    deadline = time.monotonic() + PATIENCE_S
    size = int.from_bytes(_read(process, 4, deadline), "little")
    answer: dict[str, str] = orjson.loads(_read(process, size, deadline))
    return answer


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Whole: the process reads a frame before it computes."""
    assert process.stdin is not None
    rest = memoryview(data)
    while rest:
        rest = rest[process.stdin.write(rest) :]


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
    assert process.stdout is not None
    poll, data = select.poll(), bytearray()
    poll.register(process.stdout, select.POLLIN)
    while len(data) < size:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = process.stdout.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)

"""The decision log of a running scheduler: a file that never holds the scheduler up.

Lines are made on the event loop and written by a thread of its own. Each term of leading begins a new file, since a
replay begins with an empty policy; the one before is kept beside it as `FILE.1`. A term's file ends early when it has
reached its size, when the disk refuses it, or when the thread cannot keep up: what was written is the beginning, whole,
and can be replayed. Nothing of it is needed for serving.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import encode_head, encode_step
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.logs import get_log

MAX_WAITING_LINES = 10_000
CLOSE_S = 2.0
"""The most that closing waits for a slow disk."""

_log = get_log("decisions")


@dataclass(frozen=True, slots=True)
class _Line:
    data: bytes
    is_first: bool = False


class DecisionLog:
    """Writes to `path`, at most `max_bytes` a term. The folder must be there."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._is_full = True
        self._lines: queue.Queue[_Line | None] = queue.Queue(MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()

    def begin(self, config: PolicyConfig) -> None:
        """A new term, with an empty policy."""
        head = encode_head(config)
        self._num_bytes, self._is_full = len(head), False
        self._put(_Line(head, is_first=True))

    def note(self, now: float, event: d.Event, decisions: Sequence[d.Decision]) -> None:
        """The policy was told `event` at `now` seconds and answered with `decisions`."""
        if self._is_full:
            return
        line = encode_step(now, event, decisions)
        self._num_bytes += len(line)
        if self._num_bytes > self._max_bytes:
            self._stop("it has reached its size")
        else:
            self._put(_Line(line))

    def close(self) -> None:
        """Write what waits, unless the disk takes too long."""
        self._is_full = True
        try:
            self._lines.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _put(self, line: _Line) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._stop("the disk does not keep up")

    def _stop(self, why: str) -> None:
        self._is_full = True
        _log.warning("log.stopped", path=str(self._path), why=why)

    # The thread.

    def _write_all(self) -> None:
        file: IO[bytes] | None = None
        while (line := self._lines.get()) is not None:
            try:
                if line.is_first:
                    _close(file)
                    file = self._open()
                if file is not None:
                    file.write(line.data)
                    if self._lines.empty():
                        file.flush()
            except OSError as error:
                _close(file)
                file = None
                _log.warning("log.stopped", path=str(self._path), why=error.strerror)
        _close(file)

    def _open(self) -> IO[bytes]:
        if self._path.exists():
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        return self._path.open("wb")


def _close(file: IO[bytes] | None) -> None:
    if file is not None:
        with suppress(OSError):
            file.close()

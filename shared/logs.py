"""Logs: one line an event, `time level service event key=value ...`, the request id always as `request_id`.

An event is named `noun.participle`: what it happened to, and what happened (`request.dispatched`, `worker.ready`).
Prompts, generated text, keys and paths of users' data are never logged.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

RECURRING_S = 10.0
"""How often a recurring warning is written."""

_ROOT = "quire"


def set_up(service: str, level: str) -> None:
    """Send this process' log lines to standard error, marked with `service`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {service} %(message)s"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # What no line of ours shows is not looked up for each (the caller, for which the stack is walked; thread, process).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


def get_log(name: str) -> Log:
    """The log of one module."""
    return Log(logging.getLogger(f"{_ROOT}.{name}"))


class Log:
    """Writes events with fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._recurrences: dict[str, tuple[float, int]] = {}

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def recurring(self, event: str, **fields: Any) -> None:
        """A warning that comes many times a second while something is away: written when it is new, then at most every
        `RECURRING_S`, with how many came meanwhile as `unwritten`."""
        written_at, unwritten = self._recurrences.get(event, (float("-inf"), 0))
        now = time.monotonic()
        if now - written_at < RECURRING_S:
            self._recurrences[event] = (written_at, unwritten + 1)
            return
        self._recurrences[event] = (now, 0)
        self.warning(event, **fields, **({"unwritten": unwritten} if unwritten else {}))

    def error(self, event: str, *, exc_info: bool = False, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields, exc_info)

    def _write(self, level: int, event: str, fields: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            shown = "".join(f" {name}={_show(value)}" for name, value in fields.items())
            self._logger.log(level, "%s%s", event, shown, exc_info=exc_info)


def _show(value: Any) -> str:
    """One line whatever the value: quoted when it has spaces or control characters."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text.isprintable() and " " not in text and text else repr(text)

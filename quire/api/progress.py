"""The progress bar of `use_tqdm`, on standard error; or whatever bar the caller makes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

_DESCRIPTION = "Processed prompts"
_PAUSE_S = 0.1
_WIDTH = 20


class Bar(Protocol):
    """What of tqdm is used."""

    def update(self, n: int) -> object:
        """`n` more are done."""
        ...

    def close(self) -> object:
        """Nothing follows."""
        ...


def open_bar(wanted: bool | Callable[..., Any], total: int) -> Bar:
    """The bar that `use_tqdm` asks for: ours, none, or the caller's own class in the way of tqdm's."""
    if callable(wanted):
        bar: Bar = wanted(total=total, desc=_DESCRIPTION)
        return bar
    return LineBar(total) if wanted and total else _NoBar()


class LineBar:
    """One line, written over and over."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._num_done = 0
        self._started = time.monotonic()
        self._written_at = float("-inf")
        self._write()

    def update(self, n: int) -> None:
        self._num_done += n
        if self._num_done >= self._total or time.monotonic() - self._written_at >= _PAUSE_S:
            self._write()

    def close(self) -> None:
        self._write()
        print(file=sys.stderr, flush=True)

    def _write(self) -> None:
        self._written_at = time.monotonic()
        passed = self._written_at - self._started
        share = self._num_done / self._total
        bar = "#" * int(share * _WIDTH)
        rate = self._num_done / passed if passed > 0 else 0.0
        line = f"{_DESCRIPTION}: {share:4.0%}|{bar:{_WIDTH}}| {self._num_done}/{self._total} [{passed:.1f} s"
        print(f"\r{line}, {rate:.2f} prompts/s]", end="", file=sys.stderr, flush=True)


class _NoBar:
    def update(self, n: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""

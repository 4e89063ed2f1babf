"""What the scheduler is told of a worker's prefix cache: what has come and gone since the last report.

Reports are hints, and one may be lost, or read by a leader that has just begun. So each report also repeats some names
that it has told before, in turns: whoever listens knows them all after a while.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shared.prefix import SHORT_BYTES, pack

MAX_TOLD = 4096
"""Names in one report, at most; the others follow with the next ones."""
NUM_REPEATED = 64
"""Names that each report repeats: half a KB twice a second tells of 16,384 blocks in two minutes."""


class PrefixJournal:
    """Names as `shared/prefix.py` shortens them."""

    def __init__(self) -> None:
        self._held: dict[bytes, None] = {}
        self._untold: deque[tuple[bytes, bool]] = deque()

    def note(self, changes: Iterable[tuple[bytes, bool]]) -> None:
        """Take over what has changed in the cache: (name, whether it came)."""
        for name, has_come in changes:
            short = name[:SHORT_BYTES]
            self._untold.append((short, has_come))
            if has_come:
                self._held[short] = None
            else:
                self._held.pop(short, None)

    def take(self) -> tuple[bytes, bytes]:
        """For the next report: names that are held now, and those that are not any more, packed."""
        told = [self._untold.popleft()[0] for _ in range(min(MAX_TOLD, len(self._untold)))]
        gone = [name for name in dict.fromkeys(told) if name not in self._held]
        here = [name for name in dict.fromkeys(told) if name in self._held]
        return pack([*here, *self._repeat()]), pack(gone)

    def _repeat(self) -> list[bytes]:
        """The names that were told longest ago; they go to the end of the line."""
        names = [name for _, name in zip(range(NUM_REPEATED), self._held, strict=False)]
        for name in names:
            del self._held[name]
            self._held[name] = None
        return names

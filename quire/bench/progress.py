"""Lines of progress, on standard error: what takes long says so."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """One line for the person who waits."""
    print(f"bench: {line}", file=sys.stderr, flush=True)

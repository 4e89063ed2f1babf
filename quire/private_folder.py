"""The folder of a private Redis that nobody named: it lasts as long as its launcher, even one that is killed.

A launcher holds a lock (`flock`) on a file in its folder; the kernel gives it back however the launcher ends. So a
folder whose lock can be had is nobody's, and the next launcher removes it. Folders without that file are never touched:
they are somebody else's, or just being made (the file is locked before it gets its name).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "quire-"
LOCK_NAME = "launcher.lock"


@contextmanager
def private_folder(say: Callable[[str], None]) -> Iterator[Path]:
    """A new folder, removed at the end, and what killed launchers left is removed now.

    Args:
        say: takes one line for the user.
    """
    for left in _sweep():
        say(f"removed {left}, which a killed launcher had left")
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, open(Path(name, "unnamed.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(lock.name).rename(Path(name, LOCK_NAME))
        yield Path(name)


def _sweep() -> list[Path]:
    """Remove this user's folders whose launchers have died; which ones."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            with open(folder / LOCK_NAME, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except OSError:  # no lock file, its launcher lives, or another one sweeps it just now
            continue
        removed.append(folder)
    return removed

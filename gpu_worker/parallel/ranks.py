"""The other ranks of a worker: processes that its first one starts, watches and ends with.

Design note. The first rank starts the others before it has a second thread, since a child is tied to the *thread* that
forks it: it dies with that, even by kill -9. Each loads its libraries and then waits on its standard input for one line
with its number and its card; so a model that cannot be split is refused once, by the first rank.

A thread for each child waits for its end. One that ends before it was told to takes this process with it at once: what
it holds of the model is gone, and a step in which the others wait for it would never be over. Whoever was served moves
to another worker as if the machine had died, and whoever started this one starts it again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from shared import process
from shared.errors import ConfigError
from shared.logs import get_log

END_S = 5.0
CONFIG_EXIT_CODE = 2

_log = get_log("ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank a process is. `meeting`: file descriptor for `Team`; `card`: CUDA device, None: the current one."""

    rank: int
    size: int
    meeting: int
    card: int | None = None

    def to_line(self) -> str:
        """For the standard input of a rank."""
        return json.dumps(asdict(self)) + "\n"


class Ranks:
    """Ranks 1 .. `size` − 1, started; see the module for when.

    Args:
        argv: the worker's settings.
        leave: ends this process with an exit code when a rank has died.

    Attributes:
        say_end: tells the ranks to end, once they listen.
    """

    def __init__(self, size: int, argv: Sequence[str], leave: Callable[[int], object] = process.leave) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"--tensor-parallel-size={size}: ranks need Linux; leave it out")
        self.size = size
        self.meeting = os.memfd_create("quire-ranks")  # no name, no port: nobody else finds it, and it stays nowhere
        self._leave = leave
        self.say_end: Callable[[], None] | None = None
        self._is_ending = False
        self._children = [_start(argv, self.meeting) for _ in range(1, size)]
        for rank, child in enumerate(self._children, start=1):
            threading.Thread(target=self._watch, args=(rank, child), name=f"rank-{rank}", daemon=True).start()

    def begin(self, cards: Sequence[int]) -> Seat:
        """Have the ranks take their places; the one of this process.

        Args:
            cards: a CUDA device for each rank; empty: there is nothing to choose.
        """
        seats = [
            Seat(rank=rank, size=self.size, meeting=self.meeting, card=cards[rank] if cards else None)
            for rank in range(self.size)
        ]
        for child, seat in zip(self._children, seats[1:], strict=True):
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # of one that has died, which its watcher knows
                child.stdin.write(seat.to_line())
                child.stdin.close()
        return seats[0]

    def end(self) -> None:
        """Have all ranks end, and wait for that some seconds; who is still there then dies with this process."""
        assert self.say_end is not None, "ranks that never began"
        self._is_ending = True
        try:
            self.say_end()
        except RuntimeError as error:
            _log.warning("ranks.lost", error=error)
            return
        for child in self._children:
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                _log.warning("ranks.left", why=f"not ended within {END_S:g} s")
                return

    def _watch(self, rank: int, child: subprocess.Popen[str]) -> None:
        code = child.wait()
        if not self._is_ending:
            _log.error("rank.died", rank=rank, pid=child.pid, exit_code=code)
            self._leave(CONFIG_EXIT_CODE if code == CONFIG_EXIT_CODE else 1)


def _start(argv: Sequence[str], meeting: int) -> subprocess.Popen[str]:
    safe = ("-P",) if sys.flags.safe_path else ()
    return subprocess.Popen(
        (sys.executable, *safe, "-m", "gpu_worker.parallel", *argv),
        stdin=subprocess.PIPE,
        text=True,
        pass_fds=(meeting,),
        preexec_fn=_before_exec(),  # noqa: PLW1509 - safe: this process has one thread, see the design note
    )


def _before_exec() -> Callable[[], None]:
    """The child dies with this process, and is not reached by signals to stop that its whole group gets."""
    die = process.dying_with_parent()

    def in_child() -> None:
        die()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    return in_child

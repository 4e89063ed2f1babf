"""Child processes: started, watched, restarted when they die, stopped in order.

Design note. Everything happens in one thread: `Supervisor.wait` sleeps in `select` on the wake-up descriptor that
Python writes to at each signal (SIGCHLD for a dead child, SIGINT, SIGTERM and SIGHUP for "stop"), so nothing polls
and no handler does work. Each child

* asks the kernel to be killed when this process dies, kill -9 included (`PR_SET_PDEATHSIG`, which is tied to the
  *thread* that forked: the reason to have one thread only);
* leads its own process group, so that a Ctrl-C in the terminal reaches this process alone, which then stops the
  children in order; what a dead child leaves of its group is killed;
* is started again when it dies, at once at first and then later and later, for ever once the cell has been ready.
  Before that, exit code 2 (a wrong setting) or the third death is a `StartFailed`. A supervisor that `gives_up` raises
  it later, too, for a child that dies again and again: then there is somebody who waits for nothing else.

A child that is *retired* is told to stop while all others go on. `wait` notes its end; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self

from shared.errors import QuireError
from shared.process import dying_with_parent

CONFIG_EXIT_CODE = 2
MAX_DEATHS_AT_START = 3
BACKOFF_FIRST_S = 0.1
BACKOFF_MAX_S = 5.0
STOP_MARGIN_S = 5.0
"""Over its own time to drain, before a child that was told to stop is killed."""
MAX_DEATHS_IN_ROW = 10
"""More than the deaths of workers that one request may cause."""
STEADY_AFTER_S = 600.0
"""A child that lived this long begins a new row of deaths; loading a model may take minutes."""
HEALTHY_AFTER_S = 10.0
"""A child that lived this long starts its back-off anew."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StartFailed(QuireError):
    """A child cannot start; it has told why itself. `exit_code` is the one to end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """How to run one child."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]


class Signals:
    """Signals as something to wait for. `num_stops` counts SIGINT, SIGTERM and SIGHUP since entering."""

    def __init__(self) -> None:
        self.num_stops = 0
        self._reader, self._writer = socket.socketpair()
        self._old: dict[int, Any] = {}
        self._old_fd = -1

    def __enter__(self) -> Self:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            self._old[number] = signal.signal(number, self._on_stop)
        self._old[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a signal arrives, or for `timeout_s`."""
        ready, _, _ = select.select([self._reader], [], [], timeout_s)
        if ready:
            with contextlib.suppress(BlockingIOError):
                while self._reader.recv(4096):
                    pass

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.num_stops += 1


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    num_deaths: int = 0
    deaths_in_row: int = 0
    backoff_s: float = BACKOFF_FIRST_S
    restart_at: float | None = None
    leaves_by: float | None = None


class Supervisor:
    """Keeps children running until they are stopped.

    Args:
        signals: what wakes `wait`; entered by the caller.
        say: takes one line for the user.
        on_change: called after each start, with everything running.
    """

    def __init__(self, signals: Signals, say: Callable[[str], None], on_change: Callable[[], None]) -> None:
        self._signals = signals
        self._say = say
        self._on_change = on_change
        self._children: dict[str, _Child] = {}
        self.is_settled = False
        """Set by the owner once all have been ready: from then on nothing but a stop ends the supervision."""
        self.gives_up = False
        """Set by the owner: nothing but that, and a child that keeps dying."""

    def start(self, spec: ChildSpec) -> None:
        """Run `spec` and keep it running."""
        child = _Child(spec)
        self._children[spec.name] = child
        self._launch(child)

    def retire(self, name: str, grace_s: float) -> None:
        """Tell a child to stop, for good: SIGTERM, `grace_s` to end, then SIGKILL. Returns at once."""
        child = self._children[name]
        child.restart_at, child.leaves_by = None, time.monotonic() + grace_s
        _send(child, signal.SIGTERM)

    def staying(self) -> list[str]:
        """Names of all children that are not retired, running or not."""
        return [name for name, child in self._children.items() if child.leaves_by is None]

    def names(self) -> list[str]:
        """Names of all children, also of those that are retired and have not ended yet."""
        return list(self._children)

    def pids(self) -> dict[str, int]:
        """Process id of each child that runs now, by name."""
        return {name: child.process.pid for name, child in self._children.items() if child.process is not None}

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until something happened, or for `timeout_s`; note deaths and start again what is due.

        Raises:
            StartFailed: a child cannot start, see the design note.
        """
        times = [at for child in self._children.values() for at in (child.restart_at, child.leaves_by)]
        due = [at for at in times if at is not None]
        waits = [max(0.0, at - time.monotonic()) for at in due] + ([] if timeout_s is None else [timeout_s])
        self._signals.wait(min(waits, default=None))
        for child in list(self._children.values()):
            if child.leaves_by is not None:
                self._note_leaving(child, child.leaves_by)
                continue
            self._note_death(child)
            if child.restart_at is not None and time.monotonic() >= child.restart_at:
                self._launch(child)

    def stop(self, order: Sequence[tuple[Sequence[str], float]]) -> None:
        """Stop the named groups one after another: SIGTERM, the group's seconds to end, then SIGKILL. A further stop
        signal from now on kills all at once. Children that are not named are killed last."""
        self.is_settled = True
        for child in self._children.values():
            child.restart_at = None
        stops_before = self._signals.num_stops
        for names, grace_s in order:
            group = [self._children.pop(name) for name in names if name in self._children]
            for child in group:
                _send(child, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while any(map(_is_running, group)) and self._signals.num_stops == stops_before:
                if time.monotonic() >= deadline:
                    running = ", ".join(child.spec.name for child in group if _is_running(child))
                    self._say(f"{running}: still at work after {grace_s:g} s, killed")
                    break
                self._signals.wait(max(0.0, deadline - time.monotonic()))
            _kill(group)
        _kill(list(self._children.values()))
        self._children.clear()

    def _launch(self, child: _Child) -> None:
        child.restart_at = None
        child.started_at = time.monotonic()
        try:
            child.process = subprocess.Popen(
                child.spec.argv,
                stdin=subprocess.DEVNULL,
                env=dict(child.spec.environment),
                process_group=0,
                preexec_fn=dying_with_parent(),  # noqa: PLW1509 - safe: this process has one thread, see the design note
            )
        except (OSError, subprocess.SubprocessError) as error:  # no memory, no process ids: another time there may be
            self._plan_restart(child, f"could not be run: {error}")
        else:
            self._on_change()

    def _note_leaving(self, child: _Child, leaves_by: float) -> None:
        name = child.spec.name
        if _is_running(child) and time.monotonic() < leaves_by:
            return
        if child.process is not None:
            how = "still at work, killed" if _is_running(child) else describe_exit(child.process.returncode)
            self._say(f"{name} (pid {child.process.pid}) was told to leave: {how}")
        _kill([child])
        del self._children[name]
        self._on_change()

    def _note_death(self, child: _Child) -> None:
        if child.process is None or child.process.poll() is None:
            return
        pid, code = child.process.pid, child.process.returncode
        _kill([child])
        if not self.is_settled and code == CONFIG_EXIT_CODE:
            raise StartFailed(f"{child.spec.name} refused to start; its message is above", CONFIG_EXIT_CODE)
        self._plan_restart(child, f"(pid {pid}) {describe_exit(code)}")

    def _plan_restart(self, child: _Child, reason: str) -> None:
        """One more death of `child`."""
        name = child.spec.name
        child.num_deaths += 1
        if not self.is_settled and child.num_deaths >= MAX_DEATHS_AT_START:
            raise StartFailed(f"{name} cannot start: {reason}; its messages are above", 1)
        lived_s = time.monotonic() - child.started_at
        child.deaths_in_row = 1 if lived_s >= STEADY_AFTER_S else child.deaths_in_row + 1
        if self.gives_up and child.deaths_in_row >= MAX_DEATHS_IN_ROW:
            raise StartFailed(f"{name} keeps dying: {reason}; its messages are above", 1)
        if lived_s >= HEALTHY_AFTER_S:
            child.backoff_s = BACKOFF_FIRST_S
        child.restart_at = time.monotonic() + child.backoff_s
        self._say(f"{name} {reason}; starting it again in {child.backoff_s:g} s")
        child.backoff_s = min(2 * child.backoff_s, BACKOFF_MAX_S)


def describe_exit(code: int) -> str:
    """A return code of `subprocess` in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _is_running(child: _Child) -> bool:
    return child.process is not None and child.process.poll() is None


def _send(child: _Child, number: signal.Signals) -> None:
    if child.process is not None and _is_running(child):
        child.process.send_signal(number)


def _kill(children: Sequence[_Child]) -> None:
    """Kill what is left of each child's process group, and reap the child."""
    for child in children:
        if child.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.process.wait()
            child.process = None

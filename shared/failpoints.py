"""Named places where a fault test may kill, stop, delay or cut a process; one dict look-up when not armed.

Armed by the setting `failpoints`, e.g. `worker.before_commit=kill@3;bus.commit.reply=drop@1`:

* `kill`: SIGKILL to this process · `stop`: SIGSTOP · `drop`: raise `BusUnavailable`, as a lost reply does ·
  `sleep:SECONDS`: block the thread, event loop included · `raise`: RuntimeError;
* `@n`: at the n-th pass only (from 1); without it at each pass;
* `?PATTERN` behind the name (`name?POISON=kill`): only when the detail that the place passes contains it;
* `#PATH` at the end: only by whoever creates the file PATH first, so one process of many, once.

The places, by the stages of the fault matrix:

| stage | name | where |
|---|---|---|
| S0 | `gateway.before_submit` | valid, nothing in Redis yet |
| S1 | `bus.submit.reply` | submit script has run, its reply is not seen |
| S2 | `scheduler.after_read` | wake-up read, nothing decided, not acked |
| S3 | `scheduler.after_dispatch` | RunRequest written, wake-up not acked |
| S3 | `worker.after_inbox` | RunRequest read, engine does not know it |
| S4 | `worker.in_prefill` | a step with prompt tokens is planned; detail: ids, `tok=a.b.c.d` a prompt |
| S5 | `worker.before_commit` | tokens computed, not committed |
| S6 | `bus.commit.reply` | commit script has run, its reply is not seen |
| S6 | `gateway.before_write` | chunk received, not written to the client |
| S7 | `worker.after_finish` | last token committed, inbox not acked |
| S8 | `worker.before_free` | end known, blocks not freed |
| S9 | `worker.after_preempt` | blocks dropped, not released to the queue |
| S10 | `gateway.before_end` | client gone, end script not called |
| S10 | `scheduler.before_ack` | decisions carried out, wake-ups not acked |
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from shared.errors import BusUnavailable, ConfigError, shorten

NAMES = frozenset(
    {
        "gateway.before_submit",
        "bus.submit.reply",
        "scheduler.after_read",
        "scheduler.after_dispatch",
        "worker.after_inbox",
        "worker.in_prefill",
        "worker.before_commit",
        "bus.commit.reply",
        "gateway.before_write",
        "worker.after_finish",
        "worker.before_free",
        "worker.after_preempt",
        "gateway.before_end",
        "scheduler.before_ack",
    }
)
ACTIONS = ("kill", "stop", "drop", "raise", "sleep")


@dataclass(slots=True)
class _Armed:
    action: str
    argument: str
    at_pass: int | None
    pattern: str
    latch: str
    passes: int = 0


_armed: dict[str, _Armed] = {}


def arm(specs: str) -> None:
    """Arm what `specs` says, replacing what was armed. Raises `ConfigError` for a bad spec."""
    _armed.clear()
    for part in filter(None, (p.strip() for p in specs.split(";"))):
        spec, _, latch = part.partition("#")
        name, _, rest = spec.rpartition("=")
        name, _, pattern = name.partition("?")
        action, _, count = rest.partition("@")
        action, _, argument = action.partition(":")
        if name not in NAMES or action not in ACTIONS or (count and not count.isdigit()):
            raise ConfigError(f"failpoints: {shorten(part)!r} is not NAME[?PATTERN]=ACTION[:ARG][@N][#PATH]; "
                              f"actions: {ACTIONS}")  # fmt: skip
        _armed[name] = _Armed(action, argument, int(count) if count else None, pattern, latch)


def is_armed(name: str) -> bool:
    """Whether passing `name` could do anything: for places whose detail costs something to make."""
    return name in _armed


def failpoint(name: str, detail: str = "") -> None:
    """Pass the place `name`; does nothing unless it is armed."""
    armed = _armed.get(name)
    if armed is not None and armed.pattern in detail:
        _act(name, armed)


def _act(name: str, armed: _Armed) -> None:
    armed.passes += 1
    if armed.at_pass is not None and armed.passes != armed.at_pass:
        return
    if armed.latch and not _take_latch(armed.latch):
        return
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif armed.action == "sleep":
        time.sleep(float(armed.argument or "1"))
    elif armed.action == "drop":
        raise BusUnavailable(f"failpoint {name}: the reply is lost")
    else:
        raise RuntimeError(f"failpoint {name}")


def _take_latch(path: str) -> bool:
    """Whether this process is the first to come here."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True

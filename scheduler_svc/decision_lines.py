"""What the policy heard and decided, as lines of JSON: the form of a decision log.

    {"log": "quire decisions", "version": 1, "policy": {...}}                     the settings; once, first
    {"t": 12.5, "event": "Reported", "is": {...}, "decisions": [["Dispatch", {...}], ...]}

`t` are seconds of the clock that the policy was given. A log begins with an empty policy, so that what it holds can be
fed to a fresh one. Numbers are written so that they are read as the same numbers.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import PolicyConfig
from shared.errors import QuireError, shorten

LOG = "quire decisions"
VERSION = 1
_EVENTS: dict[str, type[d.Event]] = {cls.__name__: cls for cls in typing.get_args(d.Event)}
_DECISIONS: dict[str, type[d.Decision]] = {cls.__name__: cls for cls in typing.get_args(d.Decision)}
_encoder = msgspec.json.Encoder()


class BadDecisionLog(QuireError):
    """A file that is no decision log, or none of this version; the text names the line."""


@dataclass(frozen=True, slots=True)
class Step:
    """One event and the decisions that followed at once."""

    now: float
    event: d.Event
    decisions: list[d.Decision]


def encode_head(config: PolicyConfig) -> bytes:
    """The first line."""
    return _encoder.encode({"log": LOG, "version": VERSION, "policy": config}) + b"\n"


def encode_step(now: float, event: d.Event, decisions: Sequence[d.Decision]) -> bytes:
    """The line of one event."""
    line = {
        "t": now,
        "event": type(event).__name__,
        "is": event,
        "decisions": [(type(decision).__name__, decision) for decision in decisions],
    }
    return _encoder.encode(line) + b"\n"


def decode_head(line: bytes) -> PolicyConfig:
    """The settings of a log. Raises `BadDecisionLog`."""
    try:
        head = msgspec.json.decode(line)
        if head["log"] != LOG or head["version"] != VERSION:
            raise BadDecisionLog(f"line 1: not a decision log of version {VERSION}: {shorten(head)}")
        return msgspec.convert(head["policy"], PolicyConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as error:
        raise BadDecisionLog(f"line 1: not a decision log: {shorten(error)}") from None


def decode_steps(lines: Iterable[bytes]) -> Iterator[Step]:
    """All lines behind the first. A last line that was cut off, as by a full disk or a kill, is left out. Raises
    `BadDecisionLog` for any other that is wrong."""
    for number, line in enumerate(lines, start=2):
        if line.endswith(b"\n"):
            yield _decode_step(number, line)


def _decode_step(number: int, line: bytes) -> Step:
    try:
        raw = msgspec.json.decode(line)
        event = msgspec.convert(raw["is"], _EVENTS[raw["event"]])
        decisions = [msgspec.convert(fields, _DECISIONS[name]) for name, fields in raw["decisions"]]
        return Step(float(raw["t"]), event, decisions)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError) as error:
        raise BadDecisionLog(f"line {number}: not an event with its decisions: {shorten(error)}") from None

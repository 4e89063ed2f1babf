"""What this incarnation of the worker holds: each request, what its log should hold, and how much of it is committed.

Only the event loop touches it. Its state says what is left to do, so that whoever does it (`outbox.py`) can be cut off
by a lost connection at any point and simply look again:

* entries beyond `num_logged` of a choice wait to be committed; all entries of the choice are kept, so that a log that
  turns out shorter (`gap`) is filled again from any length;
* a request with an `exit` is out of the engine and leaves when its entries are committed: it is given back to the
  queue, or ended with an error;
* suspects (requests that were being computed when a worker died) enter the engine one at a time, each after its name
  is written down.

A request is held until its end or its release is known to be in Redis, so beats and reports name it until then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.accounts import Accounts
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.view import EngineView
from gpu_worker.engine_thread import Round
from shared.bus import CommitAnswer, CommitItem, CommitOutcome
from shared.ids import RequestId
from shared.log import encode_entry
from shared.messages import HeldRequest


@dataclass(frozen=True, slots=True)
class Release:
    """Give the request back to the queue."""

    is_preempted: bool


@dataclass(frozen=True, slots=True)
class End:
    """End the request with an error."""

    reason: str
    error_kind: str
    message: str


@dataclass(slots=True)
class HeldChoice:
    """An open choice. `entries`: all of its encoded log entries from 0; `num_logged` of them are in the log."""

    choice: int
    prompt_len: int
    entries: list[bytes]
    num_logged: int
    finish: str = ""


@dataclass(slots=True, eq=False)
class Held:
    """A request of which this worker owns attempt `attempt`. `sequences` wait to be handed to the engine.

    `choices` are those whose end is not committed yet. `is_suspect` until a token of it is. `wants_cost`: its client
    will ask what it cost.
    """

    request_id: RequestId
    attempt: int
    rank: int = 0
    choices: dict[int, HeldChoice] = field(default_factory=dict)
    sequences: tuple[Sequence, ...] = ()
    is_suspect: bool = False
    exit: Release | End | None = None
    wants_cost: bool = False

    @property
    def is_committed(self) -> bool:
        """Whether all that is known of it is in the log."""
        return all(c.num_logged == len(c.entries) for c in self.choices.values())

    def describe(self) -> HeldRequest:
        """How a report shows it while none of its sequences runs: what it still waits for."""
        waiting = [c for c in self.choices.values() if not c.finish and self.exit is None]
        return HeldRequest(
            request_id=self.request_id, attempt=self.attempt, num_blocks=0, num_running=0, num_waiting=len(waiting),
            num_tokens=sum(c.prompt_len + len(c.entries) for c in waiting),
        )  # fmt: skip


class Unlogged(NamedTuple):
    """One item of a commit, and what it came from."""

    held: Held
    choice: HeldChoice
    item: CommitItem


class Ledger:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[RequestId, Held] = {}
        self.suspect: Held | None = None
        self.round_number = 0
        self.accounts = Accounts()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._held.values()))

    def get(self, request_id: RequestId, attempt: int | None = None) -> Held | None:
        """The request, if it is held (at this attempt)."""
        held = self._held.get(request_id)
        return held if held is not None and attempt in (None, held.attempt) else None

    def is_held(self, held: Held) -> bool:
        """Whether this very object still is."""
        return self._held.get(held.request_id) is held

    def hold(self, held: Held) -> None:
        """Take a request in."""
        self._held[held.request_id] = held
        self.accounts.open(held.request_id, held.attempt, is_exact=held.wants_cost)

    def forget(self, held: Held) -> None:
        """Hold it no longer; nothing happens when it, or a later attempt, has taken its place."""
        if self.is_held(held):
            del self._held[held.request_id]
            self.accounts.leave(held.request_id, held.attempt)

    def take(self, round_: Round) -> None:
        """Note what the engine has done."""
        self.round_number = round_.number
        self.accounts.add(round_.work)
        for new in round_.entries:
            held = self.get(new.request_id, new.attempt)
            choice = held.choices.get(new.choice) if held is not None else None
            if choice is not None:
                choice.entries += map(encode_entry, new.entries)
                choice.finish = new.finish
                if new.finish:
                    self.accounts.close_soon(new.request_id, new.attempt)
        for failure in round_.failures:
            self._leave(failure.request_id, failure.attempt, End(failure.reason, failure.error_kind, failure.message))
        for command in round_.withdrawn:
            self._leave(command.request_id, command.attempt, Release(is_preempted=command.is_preemption))

    def unlogged(self) -> list[Unlogged]:
        """What is to be committed now."""
        return [
            Unlogged(held, choice, _to_item(held, choice))
            for held in self._held.values()
            for choice in held.choices.values()
            if choice.num_logged < len(choice.entries)
        ]

    def settle(self, unlogged: Unlogged, outcome: CommitOutcome) -> None:
        """Note that a commit of `unlogged` was answered ok or gap; forgets a request whose last choice has ended."""
        held, choice, item = unlogged.held, unlogged.choice, unlogged.item
        if outcome.answer is CommitAnswer.GAP:
            choice.num_logged = outcome.length
            return
        choice.num_logged = item.start + len(item.entries)
        held.is_suspect = False
        if item.finish:
            self.close_choice(held, choice)

    def close_choice(self, held: Held, choice: HeldChoice) -> None:
        """The end of this choice is in Redis; the request is forgotten with its last one."""
        held.choices.pop(choice.choice, None)
        if not held.choices:
            self.forget(held)

    def departing(self) -> list[Held]:
        """Requests with an exit that nothing holds up."""
        return [held for held in self if held.exit is not None and held.is_committed]

    def next_suspect(self) -> Held | None:
        """The suspect that should enter the engine next, by rank."""
        waiting = [held for held in self if held.is_suspect and held.sequences and held.exit is None]
        return min(waiting, key=lambda held: held.rank, default=None)

    @property
    def is_suspect_cleared(self) -> bool:
        """Whether the suspect that was let in last, if any, is none any more: it has a token or has left."""
        return self.suspect is None or not self.suspect.is_suspect or not self.is_held(self.suspect)

    def describe(self, view: EngineView) -> tuple[HeldRequest, ...]:
        """All that is held, for a report; the engine knows better of what runs."""
        described = []
        for held in self._held.values():
            shown = view.running.get(held.request_id)
            described.append(shown if shown is not None and shown.attempt == held.attempt else held.describe())
        return tuple(described)

    def _leave(self, request_id: RequestId, attempt: int, way: Release | End) -> None:
        held = self.get(request_id, attempt)
        if held is not None and held.exit is None:
            held.exit = way
            self.accounts.close_soon(request_id, attempt)


def _to_item(held: Held, choice: HeldChoice) -> CommitItem:
    entries = tuple(choice.entries[choice.num_logged :])
    return CommitItem(held.request_id, held.attempt, choice.choice, choice.num_logged, entries, choice.finish)

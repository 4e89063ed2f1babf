"""The thread that owns the engine, and the two queues between it and the event loop.

In go commands, applied between steps in the order they were submitted. Out come rounds, posted one after another: what
a turn (commands, then perhaps a step) gave, and a view of the engine. The thread sleeps while there is nothing to do
and while it is `MAX_STEPS_AHEAD` steps ahead of the commit in flight; it never spins.

While there is nothing to stop it, a step ends with the next one started, so its round is made and posted, and commands
are applied, beside compute. A sequence that came meanwhile is worth the pause that planning afterwards makes: it runs
in the very next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from gpu_worker.engine.engine import Engine, NewEntries, StepOutput
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.step_work import StepWork
from gpu_worker.engine.view import EngineView
from shared.errors import InvalidRequest
from shared.ids import EntryId, RequestId

MAX_STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Add:
    """Take these sequences, all of one request and attempt; refused as a whole when one can never fit."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget a request, or one choice of it."""

    request_id: RequestId
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take a request out, to be given back to the queue; void when nothing of it is left to compute. A preemption
    names how many evictions it knows of, and is void when there were more. With `keeps` the engine keeps the request,
    which waits in its order; nothing is withdrawn then."""

    request_id: RequestId
    attempt: int
    num_evictions: int | None = None
    keeps: bool = False

    @property
    def is_preemption(self) -> bool:
        return self.num_evictions is not None


@dataclass(frozen=True, slots=True)
class Applied:
    """All commands up to this inbox entry have been submitted before."""

    inbox_id: EntryId


Command = Add | Drop | Withdraw | Applied


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that the engine cannot serve: `reason` "rejected" or "failed", with a text for the client."""

    request_id: RequestId
    attempt: int
    reason: str
    error_kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one turn gave. `number` counts the rounds with entries; `withdrawn` are the commands that had an effect."""

    number: int
    view: EngineView
    inbox_id: EntryId
    entries: tuple[NewEntries, ...] = ()
    work: tuple[StepWork, ...] = ()
    failures: tuple[Failure, ...] = ()
    withdrawn: tuple[Withdraw, ...] = ()
    prefix_changes: tuple[tuple[bytes, bool], ...] = ()


class EngineThread:
    """Runs an engine until it is stopped.

    Args:
        post: called in the thread with each round; hands it to the event loop.
        on_broken: called in the thread, at most once, with the error that ended it.
        prepare: called first thing in the thread (the current CUDA device belongs to a thread).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        post: Callable[[Round], None],
        on_broken: Callable[[Exception], None],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._post = post
        self._on_broken = on_broken
        self._prepare = prepare
        self._due = threading.Condition()
        self._commands: list[Command] = []
        self._is_stopping = False
        self._num_posted = 0
        self._num_settled = 0
        self._inbox_id = EntryId("0-0")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, *commands: Command) -> None:
        """Have these applied before the next step, in this order."""
        with self._due:
            self._commands += commands
            self._due.notify()

    def settle(self, number: int) -> None:
        """All rounds up to `number` are committed."""
        with self._due:
            self._num_settled = max(self._num_settled, number)
            self._due.notify()

    def stop(self) -> None:
        """End after the current step and wait for that (blocks the caller)."""
        with self._due:
            self._is_stopping = True
            self._due.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._prepare is not None:
                self._prepare()
            while (commands := self._wait()) is not None:
                self._turn(commands)
        except Exception as error:
            self._on_broken(error)

    def _wait(self) -> list[Command] | None:
        """The commands to apply, perhaps none, once there is something to do; None when it is time to end."""
        with self._due:
            self._due.wait_for(lambda: self._is_stopping or self._commands or self._may_step())
            commands, self._commands = self._commands, []
            return None if self._is_stopping else commands

    def _may_step(self) -> bool:
        return self._engine.has_work and self._num_posted - self._num_settled <= MAX_STEPS_AHEAD

    def _turn(self, commands: list[Command]) -> None:
        failures: list[Failure] = []
        withdrawn: list[Withdraw] = []
        for command in commands:
            self._apply(command, failures, withdrawn)
        output = self._engine.step(self._goes_on) if self._may_step() else StepOutput()
        self._num_posted += bool(output.entries)
        failures += [_model_failure(request_id, attempt) for request_id, attempt in output.failed]
        self._post(
            Round(
                number=self._num_posted,
                view=self._engine.view(),
                inbox_id=self._inbox_id,
                entries=output.entries,
                work=output.work,
                failures=tuple(failures),
                withdrawn=tuple(withdrawn),
                prefix_changes=tuple(self._engine.take_prefix_changes()),
            )
        )

    def _goes_on(self) -> bool:
        """Whether another step may begin before this one's round is posted."""
        with self._due:
            has_arrivals = any(isinstance(command, Add) for command in self._commands)
            is_behind = self._num_posted + 1 - self._num_settled > MAX_STEPS_AHEAD
            return not (self._is_stopping or has_arrivals or is_behind)

    def _apply(self, command: Command, failures: list[Failure], withdrawn: list[Withdraw]) -> None:
        match command:
            case Add(sequences):
                failures += self._add(sequences)
            case Drop(request_id, choice):
                self._engine.drop(request_id, choice)
            case Withdraw():
                if self._withdraw(command):
                    withdrawn.append(command)
            case Applied(inbox_id):
                self._inbox_id = inbox_id

    def _withdraw(self, command: Withdraw) -> bool:
        if not command.is_preemption:
            return self._engine.drop(command.request_id)
        if command.num_evictions != self._engine.num_evictions:
            return False
        return self._engine.preempt(command.request_id, keeps=command.keeps) and not command.keeps

    def _add(self, sequences: tuple[Sequence, ...]) -> list[Failure]:
        """Add all or none."""
        try:
            for sequence in sequences:
                self._engine.add(sequence)
        except InvalidRequest as error:
            first = sequences[0]
            self._engine.drop(first.request_id)
            return [Failure(first.request_id, first.attempt, "rejected", error.code or "", error.message)]
        return []


def _model_failure(request_id: RequestId, attempt: int) -> Failure:
    """The client is told nothing of the cause, which the engine has logged: it may hold what is nobody's business."""
    return Failure(request_id, attempt, "failed", "internal_error", "the model could not compute this request")

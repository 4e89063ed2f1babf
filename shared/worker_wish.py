"""How many workers there should be: what `--autoscale` allows, what the leader would like, and what follows for whoever
starts and stops workers.

Only whom the leader names is stopped, since only it knows who holds what. What does not run anyway needs no name. So
two that carry out the same wish at the same time stop the same worker, and a wish that was read late stops nobody new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError, shorten
from shared.ids import WorkerId

FLAG = "--autoscale"
MAX_WORKERS = 1000
"""Of `--autoscale`: ten times of what one cell is made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """No fewer and no more workers than these."""

    low: int
    high: int

    def clamp(self, num_workers: int) -> int:
        """`num_workers`, or the limit that it is beyond."""
        return min(self.high, max(self.low, num_workers))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWish:
    """The leader would like `num_workers`. Where there are more, those `leaving` should go, in this order: they hold
    least."""

    num_workers: int
    leaving: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWorker:
    """A worker that this process may stop. `worker_id`: what the process that runs in it is called now, None before it
    has said hello. One that was told to leave already is not counted here any more."""

    name: str
    worker_id: WorkerId | None
    is_running: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """What to do next: so many to start, or the names to stop."""

    num_to_start: int = 0
    to_stop: tuple[str, ...] = ()


def next_steps(own: Sequence[OwnWorker], wish: WorkerWish, limits: WorkerLimits) -> Steps:
    """What brings `own` nearer to `wish`; nothing while nobody is named who could go."""
    wanted = limits.clamp(wish.num_workers)
    if len(own) <= wanted:
        return Steps(num_to_start=wanted - len(own))
    names = {worker.worker_id: worker.name for worker in own if worker.worker_id is not None and worker.is_running}
    candidates = [worker.name for worker in own if not worker.is_running]
    candidates += [names[worker_id] for worker_id in wish.leaving if worker_id in names]
    return Steps(to_stop=tuple(candidates[: len(own) - wanted]))


def parse_autoscale(text: str) -> WorkerLimits | None:
    """What `--autoscale` says; None for an empty text: off. Raises `ConfigError`."""
    if not text:
        return None
    parts = text.split(":")
    numbers = [
        int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) <= len(str(MAX_WORKERS))
    ]
    if len(parts) != 2 or len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1] <= MAX_WORKERS:
        raise ConfigError(f"{FLAG}={shorten(text)}: must be MIN:MAX with 1 <= MIN <= MAX <= {MAX_WORKERS}, as 1:8")
    return WorkerLimits(low=numbers[0], high=numbers[1])

"""The gateway's view of the cell: is the bus there, does a leader lead, which workers live and work.

Everyone raises counters in the bus; the view polls them and times "has not moved" with its own monotonic clock. Timers
start again when the bus comes back, since nobody could raise a counter in between; and while this process itself
does not run they stand still, since the whole machine may pause. *Ready* means that tokens can be
produced: bus reachable, a leader, and a living worker that makes steps whenever it has work. *Serving* means that work
is accepted: a living worker is enough, a slow step is no reason to refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from shared.bus import Bus, LeaderPulse, WorkerPulse
from shared.clock import Clock
from shared.errors import BusError
from shared.ids import WorkerId
from shared.logs import get_log
from shared.messages import WorkerHello

POLL_S = 0.5
MOST_GAP_S = 1.5 * POLL_S
"""Of the time between two polls so much counts; more passes only while this process does not run."""

_log = get_log("gateway.health")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Leases in seconds."""

    worker_lease_s: float
    leader_lease_s: float


class HealthView:
    """Call `poll` every `POLL_S`; everything else answers from what it saw. `is_bus_up`: the last poll was answered."""

    def __init__(self, bus: Bus, clock: Clock, settings: HealthSettings) -> None:
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self.is_bus_up = False
        self._is_bus_lost = False
        self._leader = LeaderPulse()
        self._workers: list[WorkerPulse] = []
        self._beats = _Stillness(clock)
        self._steps = _Stillness(clock)
        self.is_draining = False

    async def poll(self) -> None:
        """Look at the counters once."""
        try:
            leader, workers = await asyncio.gather(self._bus.read_leader(), self._bus.read_workers())
        except BusError as error:
            if self.is_bus_up:
                _log.warning("bus.lost", error=error)
                self._is_bus_lost = True
            self.is_bus_up = False
            return
        if not self.is_bus_up:
            if self._is_bus_lost:
                _log.info("bus.found")
            self._is_bus_lost = False
            self._beats, self._steps = _Stillness(self._clock), _Stillness(self._clock)
            self.is_bus_up = True
        self._leader = leader
        self._workers = workers
        self._note_counters()

    def live_workers(self) -> list[WorkerHello]:
        """Workers whose lease counter moves."""
        return [pulse.hello for pulse in self._live_pulses()]

    def serving(self) -> list[WorkerPulse]:
        """Workers that can be given work now: those that live, none while the bus is away."""
        return self._live_pulses() if self.is_bus_up else []

    def why_not_ready(self, is_wanted: Callable[[WorkerHello], bool] = lambda _: True) -> list[str]:
        """Reasons why workers that are wanted can produce no tokens; empty: ready."""
        if self.is_draining:
            return ["draining"]
        if not self.is_bus_up:
            return ["bus unreachable"]
        reasons = []
        if not self._has_leader():
            reasons.append("no scheduler leads")
        live = [worker for worker in self.live_workers() if is_wanted(worker)]
        if not live:
            reasons.append("no live worker")
        elif all(self._is_stuck(worker.worker_id) for worker in live):
            reasons.append("no worker makes steps")
        return reasons

    def _note_counters(self) -> None:
        self._beats.look()
        self._steps.look()
        self._beats.note("leader", (self._leader.token, self._leader.beat))
        for pulse in self._workers:
            self._beats.note(pulse.hello.worker_id, pulse.beat)
            self._steps.note(pulse.hello.worker_id, (pulse.num_steps, pulse.has_work) if pulse.has_work else object())
        known: set[Hashable] = {"leader", *(pulse.hello.worker_id for pulse in self._workers)}
        self._beats.keep(known)
        self._steps.keep(known)

    def _live_pulses(self) -> list[WorkerPulse]:
        lease = self._settings.worker_lease_s
        return [pulse for pulse in self._workers if self._beats.still_s(pulse.hello.worker_id) < lease]

    def _has_leader(self) -> bool:
        return bool(self._leader.token) and self._beats.still_s("leader") < self._settings.leader_lease_s

    def _is_stuck(self, worker_id: WorkerId) -> bool:
        """It has work and has made no step for a lease; an idle worker never is."""
        return self._steps.still_s(worker_id) >= self._settings.worker_lease_s


class _Stillness:
    """For how long each counter has not changed, while somebody looked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_at = clock.now()
        self._watched_s = 0.0
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def look(self) -> None:
        """Counters are about to be noted."""
        self._watched_s, self._looked_at = self._now_s(), self._clock.now()

    def note(self, name: Hashable, value: object) -> None:
        seen = self._seen.get(name)
        if seen is None or seen[0] != value:
            self._seen[name] = (value, self._watched_s)

    def keep(self, names: set[Hashable]) -> None:
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}

    def still_s(self, name: Hashable) -> float:
        return self._now_s() - self._seen[name][1]

    def _now_s(self) -> float:
        return self._watched_s + min(self._clock.now() - self._looked_at, MOST_GAP_S)

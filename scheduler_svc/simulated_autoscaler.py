"""Starts and drains simulated workers as the policy wants them."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc import decisions as d
from scheduler_svc.agenda import Agenda
from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.simulated_cell import SimulatedCell
from scheduler_svc.simulated_fleet import SimulatedFleet
from scheduler_svc.simulation_trace import SimulatedWorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """`start_s` is what a new worker takes from the wish to its first report; all are as `spec`."""

    config: AutoscaleConfig
    spec: SimulatedWorkerSpec
    start_s: float


class SimulatedAutoscaler:
    """Carries out what is wanted. A worker that is not needed drains first: it finishes what it holds."""

    def __init__(self, autoscaling: Autoscaling, cell: SimulatedCell, agenda: Agenda, fleet: SimulatedFleet) -> None:
        self.num_starting = 0
        self._autoscaling = autoscaling
        self._cell = cell
        self._agenda = agenda
        self._fleet = fleet
        self._num_started = 0

    def look(self) -> None:
        """Let those leave who have drained; all workers have been synced."""
        for worker in [w for w in self._cell.workers.values() if w.is_draining]:
            self._fleet.leave(worker)

    def carry_out(self, wanted: d.WantWorkers) -> None:
        """Start who is missing, drain who is named."""
        num_there = sum(w.is_alive and not w.is_draining for w in self._cell.workers.values()) + self.num_starting
        for _ in range(wanted.num_workers - num_there):
            self.num_starting += 1
            self._agenda.after(self._autoscaling.start_s, self._start)
        for worker_id in wanted.leaving[: max(0, num_there - wanted.num_workers)]:
            worker = self._cell.workers.get(worker_id)
            if worker is not None and worker.is_alive and not worker.is_draining:
                self._fleet.drain(worker)

    def _start(self) -> None:
        self.num_starting -= 1
        self._num_started += 1
        self._fleet.start(_FIRST_INDEX + self._num_started, self._autoscaling.spec)


_FIRST_INDEX = 1_000_000
"""Workers that are started later are numbered from here on, so that no two have one number."""

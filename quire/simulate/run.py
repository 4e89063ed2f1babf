"""Running a simulation out: to the last request's end, with progress, and its decision log where one is wanted."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

from quire.simulate.settings import SimulateConfig
from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import encode_head, encode_step
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.simulation_trace import SimulatedRequest
from scheduler_svc.simulator import WATCH_S, Observer, Simulation
from shared.errors import QuireError, shorten

PROGRESS_S = 1.0
STUCK_S = 3600.0
"""Simulated seconds without an end after which a run is given up."""


def simulate(settings: SimulateConfig, requests: list[SimulatedRequest]) -> Simulation:
    """Run until every request has ended.

    Raises:
        QuireError: none ends for an hour of the simulation, or the decision log cannot be written.
    """
    policy = settings.policy()
    spec = settings.fleet.spec(has_prefixes=bool(settings.traffic.shared_prefixes))
    path = settings.scheduling.decision_log_path()
    autoscaling = settings.fleet.autoscaling(policy.autoscale, spec)
    try:
        with ExitStack() as stack:
            observer = None if path is None else log_to(path, policy, stack)
            cell = Simulation(
                requests,
                [spec] * settings.fleet.workers,
                config=policy,
                cost=settings.fleet.cost(),
                on_decisions=observer,
                autoscaling=autoscaling,
            )
            _run_out(cell, requests)
    except OSError as error:
        raise QuireError(f"--decision-log={shorten(path)}: {error.strerror}") from None
    return cell


def log_to(path: Path, policy: PolicyConfig, stack: ExitStack) -> Observer:
    """What writes a simulation's decision log to `path`; the file is closed with `stack`."""
    file = stack.enter_context(path.open("wb"))
    file.write(encode_head(policy))

    def note(cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        file.write(encode_step(cell.now, event, decisions))

    return note


def _run_out(cell: Simulation, requests: list[SimulatedRequest]) -> None:
    shown, until_s = time.monotonic(), 0.0
    num_ended, ended_s = 0, requests[0].arrival_s
    while len(cell.result.ended) < len(requests):
        until_s += WATCH_S
        cell.run(until_s)
        if len(cell.result.ended) > num_ended or until_s < requests[-1].arrival_s:
            num_ended, ended_s = len(cell.result.ended), until_s
        if until_s - ended_s > STUCK_S:
            raise QuireError(f"no request has ended for {STUCK_S:,.0f} s of the simulation; {num_ended:,} had before")
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            line = f"{until_s:,.0f} s simulated, {num_ended:,} of {len(requests):,} requests ended"
            print(f"simulate: {line}", file=sys.stderr, flush=True)

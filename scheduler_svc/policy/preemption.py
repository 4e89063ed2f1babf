"""Who must give way: before a worker's blocks run out, and to somebody of a better class.

The forecast goes to the worker's horizon, as many steps as it makes in two report intervals: a decision taken now is
applied about one interval later, on a report about one interval old. The last in the standing order (class, then
arrival) goes first (it has lost least and waited least); never the first, so that each worker always finishes
something; never one that has been preempted often enough, and nobody of a better class in its stead. When nobody is
left to choose, the worker's own eviction decides, by the same order.

One that would stay with the worker (`keeping.py`) goes only when the worker would not let it in again at once: until
then the others have a free block each, and nothing is lost by waiting, since the worker itself evicts the same one.
"""

from __future__ import annotations

from scheduler_svc.policy import forecast, keeping
from scheduler_svc.policy.state import Request, Worker
from shared.messages import HeldRequest


def choose_victims(worker: Worker, max_preemptions: int) -> list[Request]:
    """Requests to preempt now so that the others' blocks last; the last in standing first, usually none."""
    if worker.report is None:
        return []
    if forecast.fits_again(worker):
        return []  # as nearly always, but where blocks are scarce
    free, last, most = worker.report.free_blocks, worker.horizon, 0
    staying: list[Request] = []
    for request in worker.assigned.values():
        held = request.held
        if held is None:
            continue
        if request.is_preempting:
            free += forecast.num_own_blocks(held)
        else:
            staying.append(request)
            most += max(0, forecast.blocks_in(worker, held, last) - held.num_blocks)
    victims: list[Request] = []
    if most <= free:
        return victims  # enough even if nobody ends
    staying.sort(key=lambda request: request.standing)
    while _runs_out(worker, free, staying):
        victim = _last(staying[1:], max_preemptions)
        if victim is None or _comes_back(worker, victim, free, staying):
            break
        staying.remove(victim)
        free += forecast.num_own_blocks(_held(victim))
        victims.append(victim)
    return victims


def _last(candidates: list[Request], max_preemptions: int) -> Request | None:
    for request in reversed(candidates):
        if request.level < candidates[-1].level:
            return None
        if request.preemptions < max_preemptions and _held(request).num_blocks > 0:
            return request
    return None


def _comes_back(worker: Worker, victim: Request, free: int, staying: list[Request]) -> bool:
    """Whether `victim` would stay and be let in again at once, since a block is left for each that runs."""
    num_running = sum(_held(request).num_running for request in staying if request is not victim)
    return free >= num_running and keeping.is_kept(worker, victim)


def _runs_out(worker: Worker, free: int, staying: list[Request]) -> bool:
    """Whether at some step within the horizon the growth of `staying` is more than `free` and natural ends give."""
    return any(
        sum(forecast.growth(worker, _held(request), request, steps) for request in staying) > free
        for steps in range(1, worker.horizon + 1)
    )


def _held(request: Request) -> HeldRequest:
    assert request.held is not None
    return request.held

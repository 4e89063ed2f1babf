"""Who must give way before a worker's blocks run out.

The forecast goes as many steps ahead as the worker makes in two report intervals: a decision taken now is applied about
one interval later, on a report about one interval old. The youngest goes first (it has lost least and waited least);
never the oldest, so that each worker always finishes something; never one that has been preempted often enough. When
nobody is left to choose, the worker's own eviction decides, by the same rank.
"""

from __future__ import annotations

from scheduler_svc.policy import forecast
from scheduler_svc.policy.state import Request, Worker

MIN_HORIZON_STEPS = 4
MAX_HORIZON_STEPS = 32


def horizon(worker: Worker) -> int:
    """Steps to look ahead."""
    return min(MAX_HORIZON_STEPS, max(MIN_HORIZON_STEPS, 2 * worker.steps_per_report))


def choose_victims(worker: Worker, max_preemptions: int) -> list[Request]:
    """Requests to preempt now so that the others' blocks last; the youngest first, usually none."""
    if worker.report is None:
        return []
    leaving = {request_id for request_id in worker.held if worker.assigned[request_id].is_preempting}
    free = worker.report.free_blocks + sum(worker.held[request_id].num_blocks for request_id in leaving)
    staying = sorted((worker.assigned[i] for i in worker.held.keys() - leaving), key=lambda request: request.rank)
    victims: list[Request] = []
    while _runs_out(worker, free, staying):
        victim = _youngest(worker, staying[1:], max_preemptions)
        if victim is None:
            break
        staying.remove(victim)
        free += worker.held[victim.request_id].num_blocks
        victims.append(victim)
    return victims


def _youngest(worker: Worker, candidates: list[Request], max_preemptions: int) -> Request | None:
    for request in reversed(candidates):
        if request.preemptions < max_preemptions and worker.held[request.request_id].num_blocks > 0:
            return request
    return None


def _runs_out(worker: Worker, free: int, staying: list[Request]) -> bool:
    """Whether at some step within the horizon the growth of `staying` is more than `free` and natural ends give."""
    last = horizon(worker)
    held = [(worker.held[request.request_id], request) for request in staying]
    if sum(max(0, forecast.blocks_in(worker, h, last) - h.num_blocks) for h, _ in held) <= free:
        return False  # enough even if nobody ends, as nearly always
    return any(sum(forecast.growth(worker, h, r, steps) for h, r in held) > free for steps in range(1, last + 1))

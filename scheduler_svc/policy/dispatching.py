"""From the queue to workers: who is sent where, who gives way to whom, who may pass whom.

In the order of the line, each request gets the first of

1. a worker with slots and blocks for it;
2. a worker where somebody of a lower class gives way: the `Preempt` lies in the same inbox before the `RunRequest`, but
   for those that stay with the worker: behind it, else they would be let in again before the newcomer is there;
3. a place ahead of a slot.

The first one for which there is none holds the line, and all lower classes with it. While there are slots, so that it
is only too large, smaller ones of its class may pass for `passing_s`; then the line stands until it fits.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc import decisions as d
from scheduler_svc.policy import keeping, placement, yielding
from scheduler_svc.policy.fleet import Fleet
from scheduler_svc.policy.queue import Queue
from scheduler_svc.policy.state import Request, Worker

Decisions = list[d.Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRules:
    """`passing_s`: how long smaller requests may pass one that does not fit. `delay_factor`: the line waits this many
    times the latest prompt's latency before more is admitted beside what runs."""

    max_preemptions: int
    passing_s: float
    delay_factor: float


def place_queued(queue: Queue, fleet: Fleet, fingerprint: str, rules: DispatchRules, now: float) -> Decisions:
    """Dispatch from the front of a model's lane until there is no room."""
    found: Decisions = []
    first = queue.first(fingerprint)
    if first is None or _is_delayed(first, fleet, rules, now):
        return found
    while (request := queue.first(fingerprint)) is not None:
        if not fleet.can_ever_hold(request):
            queue.park(request)
            continue
        step = _place(queue, fleet, request, rules, now)
        if not step:
            queue.block(request)
            return found + _pass(queue, fleet, request, rules, now)
        found += step
    return found


def preempt(victim: Request, worker: Worker) -> d.Preempt:
    """Have `victim` give way on `worker`: it stays there, or is given back, whichever costs less."""
    is_staying = keeping.is_kept(worker, victim)
    if is_staying:
        victim.keep()
    return _tell(victim, worker, is_staying=is_staying)


def revoke(waiting: Request, worker: Worker) -> d.Preempt:
    """Tell `worker` to give back one that waits in it."""
    return _tell(waiting, worker, is_staying=False)


def _tell(victim: Request, worker: Worker, *, is_staying: bool) -> d.Preempt:
    assert worker.report is not None
    victim.is_preempting, victim.is_staying = True, is_staying
    worker.touch(victim)
    return d.Preempt(
        request_id=victim.request_id,
        worker_id=worker.worker_id,
        attempt=victim.attempt,
        report_seq=worker.report.seq,
        keeps=is_staying,
    )


def _is_delayed(first: Request, fleet: Fleet, rules: DispatchRules, now: float) -> bool:
    if rules.delay_factor == 0 or not fleet.news.levels:
        return False
    return now - first.queued_at <= rules.delay_factor * fleet.prompt_latency_s


def _place(queue: Queue, fleet: Fleet, request: Request, rules: DispatchRules, now: float) -> Decisions:
    if fleet.is_closed(request.level):
        return []
    worker = placement.choose_open(fleet, request)
    if worker is not None:
        return [_dispatch(queue, request, worker, now)]
    way = yielding.choose(fleet, request, rules.max_preemptions)
    if way is not None:
        worker, victims = way
        told = [preempt(victim, worker) for victim in victims]
        leaving, staying = [x for x in told if not x.keeps], [x for x in told if x.keeps]
        return [*leaving, _dispatch(queue, request, worker, now), *staying]
    worker = placement.choose_ahead(fleet, request)
    return [] if worker is None else [_dispatch(queue, request, worker, now)]


def _pass(queue: Queue, fleet: Fleet, blocked: Request, rules: DispatchRules, now: float) -> Decisions:
    """Let smaller ones of its class pass `blocked`, or have it hold the line."""
    if next(fleet.open(), None) is None:
        return []
    if blocked.blocked_from is None:
        blocked.blocked_from = now
    line = queue.line(blocked)
    found: Decisions = []
    if now - blocked.blocked_from >= rules.passing_s:
        line.hold(blocked)
        return found
    while (request := line.smallest()) is not None and request is not blocked:
        worker = placement.choose_open(fleet, request)
        if worker is None:
            break
        found.append(_dispatch(queue, request, worker, now))
    return found


def _dispatch(queue: Queue, request: Request, worker: Worker, now: float) -> d.Decision:
    queue.charge(request, max(request.charged, request.num_served))
    queue.remove(request)
    request.attempt += 1
    request.sent_at, request.blocked_from = now, None
    worker.assign(request)
    return d.Dispatch(
        request_id=request.request_id, worker_id=worker.worker_id, rank=request.rank, priority=request.level
    )

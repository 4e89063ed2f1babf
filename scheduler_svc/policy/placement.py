"""Which worker gets a request: one with a free sequence slot, then most free blocks, then fewest sequences; but rather
one that holds a prefix of its prompt, unless load says otherwise:

    score = tokens of the prompt that it holds − tokens_per_sequence × sequences on it

One request per worker is sent ahead of its slots, and a worker may evict; should another worker be free first, such a
request is taken back, so that it never waits behind one worker's long runs while others idle; one whose blocks lie in
host memory not before that is worth it (`keeping.py`).

Nobody looks at all workers: the fleet has them in order, and the first few tell.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import islice

from scheduler_svc.policy import admission
from scheduler_svc.policy.fleet import Fleet
from scheduler_svc.policy.state import Request, Worker

MAX_LOOKED_AT = 16
"""Workers looked at, of those that could ever hold the request. Those behind have fewer free blocks, so they would be
better only for a request of many choices, or by a shorter horizon."""


def choose_open(fleet: Fleet, request: Request) -> Worker | None:
    """The best worker that has slots and blocks for all of `request` now, None without one. All choices go to one."""
    able = _able(fleet.open(), request)
    emptiest = next((worker for worker in able if admission.has_slots(worker, request)), None)
    return emptiest if not request.prefixes else _best_holder(fleet, request, emptiest)


def choose_ahead(fleet: Fleet, request: Request) -> Worker | None:
    """The best worker that has blocks for all of `request`, though not a slot for each of its sequences."""
    return next(_able(fleet.open(), request), None) or next(_able(fleet.full(), request), None)


def choose_revoked(worker: Worker, waiting: list[Request], fleet: Fleet, max_preemptions: int) -> Request | None:
    """The first of those `waiting` inside `worker` that another one would run at once, None if there is none.

    It was sent ahead of a slot, or evicted, and another worker has become free first.
    """
    idle = [other for other in islice(fleet.open(), MAX_LOOKED_AT) if other is not worker and not _has_waiting(other)]
    for request in sorted(waiting, key=lambda request: request.standing):
        if request.preemptions < max_preemptions and any(admission.can_take(other, request) for other in idle):
            return request
    return None


def _best_holder(fleet: Fleet, request: Request, emptiest: Worker | None) -> Worker | None:
    """Of those workers that could run `request` at once and hold a prefix of its first prompt, and the `emptiest`, the
    one with the best score."""
    weight = fleet.tokens_per_sequence
    best, best_score = emptiest, -math.inf if emptiest is None else _score(emptiest, 0, weight)
    holders = fleet.news.prefixes.holders(request.prefixes[0])
    for worker_id in heapq.nlargest(MAX_LOOKED_AT, holders, key=lambda i: holders[i]):
        worker = fleet.workers[worker_id]
        score = _score(worker, holders[worker_id], weight) if worker.is_accepting else -math.inf
        if score > best_score and admission.can_take(worker, request) and admission.has_slots(worker, request):
            best, best_score = worker, score
    return best


def _score(worker: Worker, num_blocks: int, tokens_per_sequence: float) -> float:
    """How good it is, in tokens, to run a request on `worker`, which holds so many of its first blocks."""
    return num_blocks * worker.hello.block_size - tokens_per_sequence * admission.load(worker).num_seqs


def _able(workers: Iterator[Worker], request: Request) -> Iterator[Worker]:
    could_ever = (worker for worker in workers if admission.can_ever_hold(worker, request))
    return (worker for worker in islice(could_ever, MAX_LOOKED_AT) if admission.can_take(worker, request))


def passed_over(worker: Worker) -> list[Request]:
    """Those that have waited for two steps or more, for want of a slot or of blocks, of which a worker leaves one for
    each that runs (a prompt that waits for its share of a step's tokens will have it soon)."""
    assert worker.report is not None
    report = worker.report
    waiting = [request for request in worker.assigned.values() if request.waits_from is not None]
    if not waiting:
        return waiting
    num_running = worker.num_running
    has_slot = num_running < worker.hello.max_num_seqs
    return [
        request
        for request in waiting
        if request.waits_from is not None
        and report.num_steps - request.waits_from >= 2
        and not request.is_preempting
        and not (has_slot and _num_wanted(worker, request) + num_running <= report.free_blocks)
    ]


def _num_wanted(worker: Worker, waiting: Request) -> int:
    return 0 if waiting.held is None else worker.blocks_for(waiting.held.num_tokens)


def _has_waiting(worker: Worker) -> bool:
    """Whether somebody assigned to `worker` does not run there yet."""
    return any(request.held is None or request.held.num_waiting > 0 for request in worker.assigned.values())

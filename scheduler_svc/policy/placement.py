"""Which worker gets a request: one with a free sequence slot, then most free blocks, then fewest sequences.

One request per worker is sent ahead of its slots, and a worker may evict; should another worker be free first, such a
request is taken back, so that it never waits behind one worker's long runs while others idle.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.policy import admission
from scheduler_svc.policy.state import Request, Worker


def choose(workers: Iterable[Worker], request: Request) -> Worker | None:
    """The best of `workers` that can take `request` now, None if none can. All choices go to one worker."""
    able = [worker for worker in workers if admission.can_take(worker, request)]
    return min(able, key=lambda worker: _preference(worker, request), default=None)


def choose_revoked(worker: Worker, others: Iterable[Worker], max_preemptions: int) -> Request | None:
    """The oldest request that waits inside `worker` though one of `others` would run it at once, None if there is none.

    It was sent ahead of a slot, or evicted, and another worker has become free first.
    """
    free = [other for other in others if other is not worker and admission.has_slot(other)]
    for request in sorted(_waiting(worker), key=lambda request: request.rank) if free else ():
        if request.preemptions < max_preemptions and any(admission.can_take(other, request) for other in free):
            return request
    return None


def _waiting(worker: Worker) -> list[Request]:
    """Those that the worker has passed over in at least two steps."""
    assert worker.report is not None
    num_steps = worker.report.num_steps
    return [
        request
        for request in worker.assigned.values()
        if request.waits_from is not None and num_steps - request.waits_from >= 2 and not request.is_preempting
    ]


def _preference(worker: Worker, request: Request) -> tuple[bool, int, int, str]:
    load = admission.load(worker)
    has_slots = load.num_seqs + len(request.open_choices) <= worker.hello.max_num_seqs
    return not has_slots, -load.free_blocks, load.num_seqs, worker.worker_id

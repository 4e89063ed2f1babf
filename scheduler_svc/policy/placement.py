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
    waiting = [r for r in _passed_over(worker) if r.preemptions < max_preemptions]
    if not waiting:
        return None
    idle = [other for other in others if admission.has_slot(other) and not _has_waiting(other)]
    for request in sorted(waiting, key=lambda request: request.rank):
        if any(admission.can_take(other, request) for other in idle):
            return request
    return None


def _passed_over(worker: Worker) -> list[Request]:
    """Those that have waited for two steps or more, for want of a slot or of blocks (a prompt that waits for its share
    of a step's tokens will have it soon)."""
    assert worker.report is not None
    report = worker.report
    has_slot = sum(held.num_running for held in worker.held.values()) < worker.hello.max_num_seqs
    return [
        request
        for request_id, request in worker.assigned.items()
        if request.waits_from is not None
        and report.num_steps - request.waits_from >= 2
        and not request.is_preempting
        and not (has_slot and worker.blocks_for(worker.held[request_id].num_tokens) <= report.free_blocks)
    ]


def _has_waiting(worker: Worker) -> bool:
    """Whether somebody assigned to `worker` does not run there yet."""
    held = worker.held
    return any(i not in held or held[i].num_waiting > 0 for i in worker.assigned)


def _preference(worker: Worker, request: Request) -> tuple[bool, int, int, str]:
    load = admission.load(worker)
    has_slots = load.num_seqs + len(request.open_choices) <= worker.hello.max_num_seqs
    return not has_slots, -load.free_blocks, load.num_seqs, worker.worker_id

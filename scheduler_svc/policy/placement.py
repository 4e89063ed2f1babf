"""Which worker gets a request: one with a free sequence slot, then most free blocks, then fewest sequences."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.policy import admission
from scheduler_svc.policy.state import Request, Worker


def choose(workers: Iterable[Worker], request: Request) -> Worker | None:
    """The best of `workers` that can take `request` now, None if none can. All choices go to one worker."""
    able = [worker for worker in workers if admission.can_take(worker, request)]
    return min(able, key=lambda worker: _preference(worker, request), default=None)


def _preference(worker: Worker, request: Request) -> tuple[bool, int, int, str]:
    load = admission.load(worker)
    has_slot = load.num_seqs + len(request.open_choices) <= worker.hello.max_num_seqs
    return not has_slot, -load.free_blocks, load.num_seqs, worker.worker_id

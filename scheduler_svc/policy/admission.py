"""How many blocks a request is counted with, and what a worker has left for more.

    demand = min(the worker's blocks, sum over open choices of blocks_for(min(known + headroom, most)))

`known` is prompt plus logged tokens, `most` prompt plus max_tokens. The headroom lets everybody grow past the point
where preemption looks (`preemption.py`), so that what is admitted now is not taken back at once. The minimum is there
since a worker runs the choices of an over-large request in portions.
"""

from __future__ import annotations

from scheduler_svc.policy import forecast
from scheduler_svc.policy.preemption import horizon
from scheduler_svc.policy.state import Load, Request, Worker
from shared.capacity import fits
from shared.messages import HeldRequest

GROWTH_TOKENS = 16
"""Tokens that each sequence may grow beyond the preemption horizon; a block's worth at the default block size."""

LOOK_AHEAD_STEPS = 2
"""Ends so near count as free already: the freed slot must not wait for a report and a dispatch."""


def can_ever_hold(worker: Worker, request: Request) -> bool:
    """Whether each single choice fits into an empty `worker`."""
    return fits(request.largest, block_size=worker.hello.block_size, num_blocks=worker.hello.num_blocks)


def headroom(worker: Worker) -> int:
    """Tokens of growth that are kept for each sequence."""
    return horizon(worker) + GROWTH_TOKENS


def demand(worker: Worker, request: Request) -> int:
    """Blocks that `request` is counted with on `worker` as long as a report does not list it."""
    room = headroom(worker)
    wanted = sum(worker.blocks_for(min(c.num_tokens + room, c.max_tokens)) for c in request.open_choices)
    return min(worker.hello.num_blocks, wanted)


def held_demand(worker: Worker, held: HeldRequest, request: Request) -> int:
    """The same for a request that the last report lists, from the lengths in the report."""
    num_seqs = held.num_running + held.num_waiting
    if num_seqs == 0:
        return held.num_blocks
    each = -(-held.num_tokens // num_seqs) + headroom(worker)
    wanted = num_seqs * worker.blocks_for(min(each, request.largest))
    return min(worker.hello.num_blocks, wanted)


def load(worker: Worker) -> Load:
    """What `worker` has left: reported free blocks less what everything assigned to it still will take."""
    if worker.load is None:
        worker.load = _compute_load(worker)
    return worker.load


def _compute_load(worker: Worker) -> Load:
    assert worker.report is not None
    free = max(0, min(worker.report.free_blocks, worker.hello.num_blocks))
    num_seqs = 0
    for request in worker.assigned.values():
        held = worker.held.get(request.request_id)
        if held is None:
            free -= demand(worker, request)
            num_seqs += len(request.open_choices)
        elif (change := forecast.growth(worker, held, request, LOOK_AHEAD_STEPS)) < 0:
            free -= change
        else:
            free -= max(0, held_demand(worker, held, request) - held.num_blocks)
            num_seqs += held.num_running + held.num_waiting
    return Load(free, num_seqs)


def has_slot(worker: Worker) -> bool:
    """Whether one more sequence would run at once, if it has blocks."""
    return worker.is_accepting and load(worker).num_seqs < worker.hello.max_num_seqs


def can_take(worker: Worker, request: Request) -> bool:
    """Whether `worker` should get `request` now.

    One request may be sent ahead of a free sequence slot, none ahead of free blocks.
    """
    if not worker.is_accepting or not can_ever_hold(worker, request):
        return False
    now = load(worker)
    return now.num_seqs <= worker.hello.max_num_seqs and demand(worker, request) <= now.free_blocks

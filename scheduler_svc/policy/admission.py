"""How many blocks a request is counted with, and what a worker has left for more.

    demand = min(the worker's blocks, sum over open choices of blocks_for(min(known + headroom, most))) − shared

`known` is prompt plus logged tokens, `most` prompt plus max_tokens. The headroom lets everybody grow past the point
where preemption looks (`preemption.py`), so that what is admitted now is not taken back at once. The minimum is there
since a worker runs the choices of an over-large request in portions. `shared` blocks of prompts are in use on that
worker by others that bring the same prefix (`sharing.py`); and the choices of one prompt have it once between them.
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.policy import forecast
from scheduler_svc.policy.preemption import horizon
from scheduler_svc.policy.state import Load, Request, Worker
from shared.capacity import blocks_for, fits
from shared.ids import RequestId
from shared.messages import HeldRequest

GROWTH_TOKENS = 16
"""Tokens that each sequence may grow beyond the preemption horizon; a block's worth at the default block size."""

_NOTHING = (0, 0)
LOOK_AHEAD_STEPS = 2
"""Ends so near count as free already: the freed slot must not wait for a report and a dispatch."""


def can_ever_hold(worker: Worker, request: Request) -> bool:
    """Whether each single choice fits into an empty `worker`."""
    hello = worker.hello
    return fits(
        request.largest, block_size=hello.block_size, num_blocks=hello.num_blocks, num_resident=hello.num_resident
    )


def headroom(worker: Worker) -> int:
    """Tokens of growth that are kept for each sequence."""
    return horizon(worker) + GROWTH_TOKENS if worker.headroom is None else worker.headroom


def demand(worker: Worker, request: Request) -> int:
    """Blocks that `request` is counted with on `worker` as long as a report does not list it."""
    room = headroom(worker)
    least = worker.hello.reserved_tokens
    lengths = (max(least, min(c.num_tokens + room, c.max_tokens)) for c in request.open_choices)
    wanted = sum(blocks_for(length, worker.hello.block_size, worker.hello.num_resident) for length in lengths)
    if request.summary.n > 1:
        wanted -= _num_shared_by_siblings(worker, request)
    is_assigned = request.worker_id == worker.worker_id
    num_shared = request.num_shared if is_assigned else worker.num_shared(request)
    return max(0, min(worker.hello.num_blocks, wanted) - num_shared)


def _num_shared_by_siblings(worker: Worker, request: Request) -> int:
    """Blocks that open choices find since another one of their prompt has them."""
    prompts = Counter(choice.prompt for choice in request.open_choices)
    return sum((count - 1) * worker.prompt_blocks(request, prompt) for prompt, count in prompts.items())


def held_demand(worker: Worker, held: HeldRequest, request: Request, room: int) -> int:
    """The same for a request that the last report lists, from the lengths in the report; `room` is the headroom."""
    num_seqs = held.num_running + held.num_waiting
    if num_seqs == 0:
        return forecast.num_own_blocks(held)
    hello = worker.hello
    each = max(hello.reserved_tokens, min(-(-held.num_tokens // num_seqs) + room, request.largest))
    wanted = num_seqs * worker.blocks_for(each) - held.num_shared_blocks
    if held.num_waiting and request.summary.n > 1 and len(request.summary.prompt_lens) == 1:
        wanted -= (held.num_waiting - (held.num_running == 0)) * worker.prompt_blocks(request, 0)
    return min(hello.num_blocks, wanted)


def claim(worker: Worker, request: Request, room: int) -> tuple[int, int]:
    """(blocks, sequences) that an assigned request still will take beyond what it holds; no sequences and the blocks
    that it gives back, as a negative number, if it ends within the look-ahead. `room` is the headroom."""
    held = request.held
    if held is None:
        return demand(worker, request), len(request.open_choices)
    own = held.num_blocks - held.num_shared_blocks
    if forecast.steps_left(held, request) < LOOK_AHEAD_STEPS and forecast.is_prefilled(worker, held):
        return -own, 0
    more = held_demand(worker, held, request, room) - own
    return more if more > 0 else 0, held.num_running + held.num_waiting


def load(worker: Worker) -> Load:
    """What `worker` has left: reported free blocks less what everything assigned to it still will take."""
    if worker.stale is None:
        _count_all(worker)
    elif worker.stale:
        _count_again(worker, worker.stale)
    return worker.load


def _count_all(worker: Worker) -> None:
    assert worker.report is not None
    free, num_seqs, room = worker.report.free_blocks, 0, headroom(worker)
    claims: dict[RequestId, tuple[int, int]] = {}
    for request_id, request in worker.assigned.items():
        blocks, seqs = claims[request_id] = claim(worker, request, room)
        free -= blocks
        num_seqs += seqs
    worker.load, worker.claims, worker.stale = Load(free, num_seqs), claims, set()


def _count_again(worker: Worker, stale: set[RequestId]) -> None:
    (free, num_seqs), room = worker.load, headroom(worker)
    for request_id in stale:
        was, now = worker.claims.pop(request_id, _NOTHING), _NOTHING
        if (request := worker.assigned.get(request_id)) is not None:
            now = worker.claims[request_id] = claim(worker, request, room)
        free, num_seqs = free + was[0] - now[0], num_seqs + now[1] - was[1]
    worker.load = Load(free, num_seqs)
    stale.clear()


def has_slots(worker: Worker, request: Request) -> bool:
    """Whether all sequences of `request` (or as many as the worker can run at once) would have a slot."""
    needed = min(len(request.open_choices), worker.hello.max_num_seqs)
    return load(worker).num_seqs + needed <= worker.hello.max_num_seqs


def can_take(worker: Worker, request: Request) -> bool:
    """Whether `worker` should get `request` now.

    One request may be sent ahead of a free sequence slot, none ahead of free blocks.
    """
    if not worker.is_accepting or not can_ever_hold(worker, request):
        return False
    now = load(worker)
    return now.num_seqs <= worker.hello.max_num_seqs and demand(worker, request) <= now.free_blocks

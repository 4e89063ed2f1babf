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
from scheduler_svc.policy.state import LOOK_AHEAD_STEPS, NO_CLAIM, Claim, Load, Request, Worker
from shared.capacity import blocks_for
from shared.messages import HeldRequest

GROWTH_TOKENS = 16
"""Tokens that each sequence may grow beyond the preemption horizon; a block's worth at the default block size."""


def can_ever_hold(worker: Worker, request: Request) -> bool:
    """Whether each single choice fits into an empty `worker`."""
    return request.largest <= worker.longest


def headroom(worker: Worker) -> int:
    """Tokens of growth that are kept for each sequence."""
    return worker.horizon + GROWTH_TOKENS if worker.headroom is None else worker.headroom


def demand(worker: Worker, request: Request) -> int:
    """Blocks that `request` is counted with on `worker` as long as a report does not list it."""
    hello, room, wanted = worker.hello, headroom(worker), 0
    for choice in request.open_choices:
        length = max(hello.reserved_tokens, min(choice.num_tokens + room, choice.max_tokens))
        wanted += blocks_for(length, hello.block_size, worker.num_resident)
    if request.summary.n > 1:
        wanted -= _num_shared_by_siblings(worker, request)
    is_assigned = request.worker_id == worker.worker_id
    num_shared = request.num_shared if is_assigned else worker.num_shared(request)
    return max(0, min(hello.num_blocks, wanted) - num_shared)


def _num_shared_by_siblings(worker: Worker, request: Request) -> int:
    """Blocks that open choices find since another one of their prompt has them."""
    prompts = Counter(choice.prompt for choice in request.open_choices)
    return sum((count - 1) * worker.prompt_blocks(request, prompt) for prompt, count in prompts.items())


def claim(worker: Worker, request: Request, room: int) -> Claim:
    """What an assigned request is counted with, by the lengths in the report: no sequences and the blocks that it gives
    back, as a negative number, if it ends within the look-ahead. `room` is the headroom."""
    held, hello = request.held, worker.hello
    if held is None:
        return demand(worker, request), request.num_open
    num_seqs = held.num_running + held.num_waiting
    if num_seqs == 0:
        return NO_CLAIM
    each = -(-held.num_tokens // num_seqs)
    if each + LOOK_AHEAD_STEPS > request.largest and _ends_soon(worker, request, held):
        return -forecast.num_own_blocks(held), 0
    each = max(hello.reserved_tokens, min(each + room, request.largest))
    most = num_seqs * blocks_for(each, hello.block_size, hello.window)
    if held.num_waiting and request.summary.n > 1 and len(request.summary.prompt_lens) == 1:
        most -= (held.num_waiting - (held.num_running == 0)) * worker.prompt_blocks(request, 0)
    return max(0, min(most, hello.num_blocks + held.num_shared_blocks) - held.num_blocks), num_seqs


def _ends_soon(worker: Worker, request: Request, held: HeldRequest) -> bool:
    return forecast.steps_left(held, request) < LOOK_AHEAD_STEPS and forecast.is_prefilled(worker, held)


def load(worker: Worker) -> Load:
    """What `worker` has left: reported free blocks less what everything assigned to it still will take."""
    if worker.stale:
        (free, num_seqs), room = worker.load, headroom(worker)
        for request in worker.stale:
            was, now = request.claimed, claim(worker, request, room)
            free, num_seqs = free + was[0] - now[0], num_seqs + now[1] - was[1]
            request.claimed = now
        worker.load = Load(free, num_seqs)
        worker.stale.clear()
    return worker.load


def has_slots(worker: Worker, request: Request) -> bool:
    """Whether all sequences of `request` (or as many as the worker can run at once) would have a slot."""
    needed = min(request.num_open, worker.hello.max_num_seqs)
    return load(worker).num_seqs + needed <= worker.hello.max_num_seqs


def can_take(worker: Worker, request: Request) -> bool:
    """Whether `worker` should get `request` now.

    One request may be sent ahead of a free sequence slot, none ahead of free blocks.
    """
    if not worker.is_accepting or not can_ever_hold(worker, request):
        return False
    now = load(worker)
    return now.num_seqs <= worker.hello.max_num_seqs and demand(worker, request) <= now.free_blocks

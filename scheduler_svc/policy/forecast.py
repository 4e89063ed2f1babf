"""How a held request grows: each of its running sequences by one token a step, until its last possible token.

A report gives sums over a request's sequences, so they are taken to be equally long. That is exact for one sequence
and for `n` samples of one prompt, which grow in step.
"""

from __future__ import annotations

from scheduler_svc.policy.state import Request, Worker
from shared.messages import HeldRequest

NEVER = 2**31


def steps_left(held: HeldRequest, request: Request) -> int:
    """Steps after which the request has ended at the latest; `NEVER` if some of its sequences are not running."""
    if held.num_running == 0 or held.num_waiting > 0:
        return NEVER
    return max(0, request.largest - held.num_tokens // held.num_running)


def num_own_blocks(held: HeldRequest) -> int:
    """Blocks that are free when it leaves, as far as is known: it did not find them there."""
    return held.num_blocks - held.num_shared_blocks


def is_prefilled(worker: Worker, held: HeldRequest) -> bool:
    """Whether its blocks cover all known tokens, so that each step from now on gives a token."""
    return held.num_blocks >= blocks_in(worker, held, 0)


def blocks_in(worker: Worker, held: HeldRequest, steps: int) -> int:
    """Blocks of its running sequences `steps` steps on, were they not to end."""
    num_running = held.num_running
    if num_running == 0:
        return 0
    each = -(-held.num_tokens // (num_running + held.num_waiting)) + steps
    return num_running * worker.blocks_for(each)


def fits_again(worker: Worker) -> bool:
    """Whether all that `worker` holds at its horizon would fit into the free blocks alone, so that nothing runs out
    before; by sums, for which each sequence is a block and a token longer."""
    assert worker.report is not None
    size = worker.hello.block_size
    most = worker.num_held_tokens + worker.num_held_running * (worker.horizon + size + 1)
    return most <= worker.report.free_blocks * size


def growth(worker: Worker, held: HeldRequest, request: Request, steps: int) -> int:
    """Blocks that the request takes in the next `steps` steps; negative when it ends and gives back those that it did
    not find there."""
    left = steps_left(held, request)
    if left < steps and is_prefilled(worker, held):
        return -num_own_blocks(held)
    return max(0, blocks_in(worker, held, min(steps, left)) - held.num_blocks)

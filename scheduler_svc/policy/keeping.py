"""Who gives way and stays with its worker: its blocks go to host memory there, and it waits in its order.

The worker copies what only the victim uses, twice; anywhere else all of it is computed again. By the formula that
workers go by when they evict (`shared/preemption.py`), with the rates that this worker reports. All that the request
holds is taken to be computed.

One that is kept is let in again by the worker itself, as soon as there are blocks for it and one more for each sequence
that runs: before that there is no use in keeping it (`preemption.py`), and its claim on blocks and a slot stays counted
meanwhile (`admission.py`), so nobody of worse standing is placed on what it needs. It has lost what lies in host memory
when it is taken to another worker, so that happens only once it has waited as long as computing all of it takes: at
most twice what either would have cost.
"""

from __future__ import annotations

from scheduler_svc.policy import forecast
from scheduler_svc.policy.state import Request, Worker
from shared.preemption import is_swapped


def is_kept(worker: Worker, victim: Request) -> bool:
    """Whether `victim`, which gives way now, stays with `worker`."""
    held, report = victim.held, worker.report
    if held is None or report is None or report.is_draining:
        return False
    size = worker.hello.block_size
    return is_swapped(
        worker.hello.preemption_mode,
        num_blocks=forecast.num_own_blocks(held),
        num_tokens=max(0, min(held.num_tokens, held.num_blocks * size) - held.num_shared_blocks * size),
        free_swap_blocks=report.free_swap_blocks - _num_promised(worker),
        block_copy_s=report.block_copy_s,
        token_s=report.token_s,
    )


def may_move(worker: Worker, waiting: Request, now: float) -> bool:
    """Whether `waiting`, which `worker` holds and does not run, may be computed elsewhere by now."""
    held = waiting.held
    if held is None or held.num_swapped_blocks == 0 or worker.report is None or waiting.waits_since is None:
        return True
    return now - waiting.waits_since >= held.num_tokens * worker.report.token_s


def _num_promised(worker: Worker) -> int:
    """Blocks of host memory for those that have been told to go there and have not gone yet."""
    told = (request for request in worker.assigned.values() if request.is_preempting and request.is_staying)
    return sum(forecast.num_own_blocks(request.held) for request in told if request.held is not None)

"""What the engine holds, as others see it: a snapshot, and each request in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.swap import SwapSpace
from shared.ids import RequestId
from shared.messages import HeldRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A snapshot for reports. Counters rise for the life of the engine; the prompt of a sequence counts once, with its
    first token. `running` describes those of the `num_held` requests of which a sequence runs or has host blocks; the
    others hold nothing and do not change, so whoever handed them in can describe them, and a view need not look at a
    long queue. Of `num_preemptions`, `num_swap_preemptions` sequences had blocks copied to host memory."""

    num_blocks: int
    block_size: int
    free_blocks: int
    most_blocks_used: int
    num_running: int
    most_running: int
    num_waiting: int
    num_steps: int
    num_evictions: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_padded_rows: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_live_tokens: int
    num_held: int
    num_swap_preemptions: int
    free_swap_blocks: int
    num_swapped_out: int
    num_swapped_in: int
    block_copy_s: float
    token_s: float
    running: dict[RequestId, HeldRequest] = field(default_factory=dict)


def describe(sequences: list[Sequence], swap: SwapSpace, pool: BlockPool) -> HeldRequest:
    """The sequences of one request, as a report tells of them."""
    num_running = sum(s.status is SequenceStatus.RUNNING for s in sequences)
    return HeldRequest(
        request_id=sequences[0].request_id,
        attempt=sequences[0].attempt,
        num_blocks=sum(s.num_owned_blocks for s in sequences),
        num_tokens=sum(s.num_known for s in sequences),
        num_running=num_running,
        num_waiting=len(sequences) - num_running,
        num_shared_blocks=sum(pool.num_shared(s.found_block_ids) for s in sequences),
        num_swapped_blocks=sum(map(swap.num_blocks_of, sequences)),
    )

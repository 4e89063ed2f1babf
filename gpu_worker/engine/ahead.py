"""What is assumed of a step while it computes, so that the next one can be planned and filled in meanwhile.

Design note. While step t computes, step t + 1 is made ready as if

* each chunk of t were computed, and each sampling one had gained a token (which one does not matter to a plan);
* nobody ended but by its length (`will_end`), which is certain.

What can prove wrong: a stop token ends a sequence. Its chunk is taken out of the plan then (`without_ended`). Blocks
that growth and admissions took stay with the sequences that have them: a plan made anew needs the same ones.

Nobody is evicted and nobody is alone in such a plan. Where one of these comes in, the step after t is planned when t
is over. So tokens, evictions and order are those of an engine that does one thing after the other; only a sequence
that waits for what a stop token frees is admitted a step later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.stopping import max_known

_UNKNOWN_TOKEN = 0


@contextmanager
def assume_computed(plan: BatchPlan) -> Iterator[None]:
    """Within the block, sequences are as if `plan` were computed; each drawn token is unknown."""
    chunks = [chunk for chunk in living(plan) if not chunk.is_padding]
    for chunk in chunks:
        chunk.sequence.num_computed += chunk.length
        if chunk.is_sampling:
            chunk.sequence.token_ids.append(_UNKNOWN_TOKEN)
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.sequence.num_computed -= chunk.length
            if chunk.is_sampling:
                chunk.sequence.token_ids.pop()


def living(plan: BatchPlan) -> list[PlannedChunk]:
    """The chunks that still are what their sequences need: none has ended, been evicted or been set back (by the end of
    one that was to compute its prefix) since it was planned."""
    return [chunk for chunk in plan.chunks if is_living(chunk)]


def is_living(chunk: PlannedChunk) -> bool:
    """Whether its sequence runs and is where the chunk begins, or pads a batch that goes on."""
    if chunk.is_padding:
        return bool(chunk.sequence.block_ids)
    return chunk.sequence.status is SequenceStatus.RUNNING and chunk.start == chunk.sequence.num_computed


def will_end(plan: BatchPlan, max_model_len: int) -> set[Sequence]:
    """Sequences that come to their largest length with `plan`."""
    sampling = (chunk.sequence for chunk in plan.chunks if chunk.is_sampling and not chunk.is_padding)
    return {s for s in sampling if s.num_known + 1 >= max_known(s, max_model_len)}


def without_ended(plan: BatchPlan) -> BatchPlan:
    """`plan` itself when all of its sequences live, else what is left of it."""
    chunks = living(plan)
    return plan if len(chunks) == len(plan.chunks) else BatchPlan(tuple(chunks))

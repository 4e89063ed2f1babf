"""What one step computes: chunks of sequences."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Compute tokens [start, start + length) of `sequence`; `is_sampling`: they end at its last known token, so the
    step draws its next one. `draft`: tokens that may follow; they are computed behind the known ones, and the step
    draws behind each of them, too. The sequence's `block_ids` already cover start + num_rows tokens. `is_padding`: its
    sequence has ended, and what it gives is thrown away (`static_batch.py`)."""

    sequence: Sequence
    start: int
    length: int
    is_sampling: bool
    draft: tuple[int, ...] = ()
    is_padding: bool = False

    @property
    def num_rows(self) -> int:
        """Tokens to compute."""
        return self.length + len(self.draft)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The chunks of one step, in order; at most one a sequence, at most `max_num_batched_tokens` tokens in all."""

    chunks: tuple[PlannedChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_rows for chunk in self.chunks)


def cut(sequence: Sequence, budget: int) -> PlannedChunk:
    """The next chunk of `sequence`, at most `budget` tokens."""
    length = min(sequence.num_uncomputed, budget)
    return PlannedChunk(sequence, sequence.num_computed, length, is_sampling=length == sequence.num_uncomputed)

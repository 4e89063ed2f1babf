"""A batch as servers without continuous batching have it, to compare with.

All that fit are admitted when nothing runs, and nobody until the last of them has ended. Whoever ends earlier leaves a
row behind, *padding*, which keeps its blocks and is computed in every step, for nothing; but perhaps not in the step
after its end, which may have been planned before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpu_worker.engine.chunks import PlannedChunk, cut
from gpu_worker.engine.sequence import Sequence


class StaticBatch:
    """The rows of a batch whose sequences have ended."""

    def __init__(self) -> None:
        self.padding: list[Sequence] = []

    def pad(self, sequence: Sequence, block_size: int) -> None:
        """A sequence has ended: its last computed token is computed again from now on (its last known one may have no
        block)."""
        del sequence.token_ids[len(sequence.block_ids) * block_size :]
        sequence.num_computed = min(sequence.num_computed, sequence.num_known - 1)
        self.padding.append(sequence)

    def rows(self) -> Iterator[PlannedChunk]:
        """The padding of a step."""
        return (replace(cut(sequence, 1), is_padding=True) for sequence in self.padding)

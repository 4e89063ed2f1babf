"""What one step computes: a pure plan over sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpu_worker.engine.sequence import Sequence
from shared.log import Logprobs


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Compute tokens [start, start + length) of `sequence`; `is_sampling`: they end at its last known token, so the
    step draws its next one. Its `block_ids` already cover start + length tokens."""

    sequence: Sequence
    start: int
    length: int
    is_sampling: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The chunks of one step, in order; at most one a sequence, at most `max_num_batched_tokens` tokens in all."""

    chunks: tuple[PlannedChunk, ...]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """The token that a sampling chunk gave; `logprobs` when its request asked for them."""

    token_id: int
    logprobs: Logprobs | None = None


class ModelRunner(Protocol):
    """What the engine needs of a model: `gpu_worker/model/runner.py` on torch, a scripted one in engine tests."""

    @property
    def num_blocks(self) -> int:
        """KV blocks there are; ids 0 .. num_blocks − 1."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    def run(self, plan: BatchPlan) -> list[DrawnToken]:
        """Write KV for all tokens of the plan, and draw one token for each sampling chunk, in plan order.

        The token drawn for a chunk that ends at output position p depends only on the sequence's known tokens, its
        sampling parameters, choice and p: never on what else is in the plan or how the prompt was cut.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the batch (ended or evicted): free its sampling row."""
        ...

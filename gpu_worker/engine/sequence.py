"""One sequence: one choice of one request while the engine holds it.

There is no prefill or decode state. A sequence has *known* tokens (`token_ids`: prompt, then output) and *computed*
ones (the first `num_computed`, whose KV is in its blocks). A step computes a chunk of those in between; when a chunk
reaches the end of the known tokens, the step draws one more.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from shared.ids import RequestId
from shared.messages import SamplingParams

if TYPE_CHECKING:
    from gpu_worker.engine.drafter import DraftState


class SequenceStatus(Enum):
    """Waiting: no blocks. Running: has blocks, in every plan until it ends. Ended: to be freed."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Sequence:
    """Mutable state of one choice. Only the engine thread touches it.

    Args:
        token_ids: prompt and the output logged so far (a re-dispatched sequence goes on behind it); copied.
        num_prompt_tokens: how many of them are the client's prompt; output positions are counted from there.
        rank: standing order; the highest rank is evicted first.
        is_alone: suspected of killing workers: plans hold nothing else until it has gained a token.
    """

    __slots__ = (
        "attempt",
        "block_ids",
        "choice",
        "draft_state",
        "is_alone",
        "num_computed",
        "num_prompt_tokens",
        "rank",
        "request_id",
        "sampling",
        "sampling_row",
        "status",
        "token_ids",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        attempt: int,
        choice: int,
        rank: int,
        token_ids: list[int],
        num_prompt_tokens: int,
        sampling: SamplingParams,
        is_alone: bool = False,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.choice = choice
        self.rank = rank
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.is_alone = is_alone
        self.status = SequenceStatus.WAITING
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.sampling_row: int | None = None
        self.draft_state: DraftState | None = None

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens drawn so far, by earlier attempts too."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change its logits."""
        sampling = self.sampling
        return (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is missing; at least 1 while the sequence is open."""
        return len(self.token_ids) - self.num_computed

"""One sequence: one choice of one request while the engine holds it.

There is no prefill or decode state. A sequence has *known* tokens (`token_ids`: prompt, then output) and *computed*
ones (the first `num_computed`, whose KV is in its blocks). A step computes a chunk of those in between; when a chunk
reaches the end of the known tokens, the step draws one more.
"""

from __future__ import annotations

from collections.abc import Hashable
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
        priority, rank: standing order; the highest is evicted first.
        is_pooled: wants an embedding: it draws no token, and ends when its last one is computed.
        is_alone: suspected of killing workers: plans hold nothing else until it has gained a token.
        cache_scope: whose prefixes it may find and be found by; see `prefix_cache.py`, which owns the attributes
            `prefix_names` to `num_awaited`: names of its full blocks; how many of them are entered; how many are
            computed for certain; how many it found when it was admitted; how many tokens of its prompt those were at
            first, None before; whom it waits for, until that one has computed `num_awaited` tokens.

        adapter: what it runs with, equal to another's if that is the same; None: the model as it is.

    The first `num_freed_blocks` of `block_ids` are its own no more (`kv_window.py`).
    """

    __slots__ = (
        "adapter",
        "attempt",
        "block_ids",
        "cache_scope",
        "choice",
        "draft_state",
        "is_alone",
        "is_pooled",
        "num_awaited",
        "num_cached",
        "num_computed",
        "num_entered",
        "num_found_blocks",
        "num_freed_blocks",
        "num_prompt_tokens",
        "num_settled",
        "prefix_names",
        "priority",
        "rank",
        "request_id",
        "sampling",
        "sampling_row",
        "status",
        "token_ids",
        "writer",
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
        is_pooled: bool = False,
        is_alone: bool = False,
        priority: int = 0,
        cache_scope: tuple[str, ...] = (),
        adapter: Hashable | None = None,
    ) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.choice = choice
        self.rank = rank
        self.priority = priority
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.is_pooled = is_pooled
        self.is_alone = is_alone
        self.status = SequenceStatus.WAITING
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.num_freed_blocks = 0
        self.sampling_row: int | None = None
        self.draft_state: DraftState | None = None
        self.cache_scope = cache_scope
        self.adapter = adapter
        self.prefix_names: list[bytes] = []
        self.num_entered = 0
        self.num_settled = 0
        self.num_found_blocks = 0
        self.num_cached: int | None = None
        self.writer: Sequence | None = None
        self.num_awaited = 0

    @property
    def owned_block_ids(self) -> list[int]:
        """Its blocks, without those that it has given back early."""
        return self.block_ids[self.num_freed_blocks :] if self.num_freed_blocks else self.block_ids

    @property
    def found_block_ids(self) -> list[int]:
        """Those of its blocks that were there before it was admitted; the first ones."""
        return self.block_ids[self.num_freed_blocks : self.num_found_blocks]

    @property
    def num_owned_blocks(self) -> int:
        """How many these are."""
        return len(self.block_ids) - self.num_freed_blocks

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


def order_of(sequence: Sequence) -> tuple[int, int, str, int]:
    """The standing order: the lowest runs first and is evicted last."""
    return sequence.priority, sequence.rank, sequence.request_id, sequence.choice

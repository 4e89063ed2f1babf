"""A model without a model: tokens are a hash, and the KV cache is simulated slot by slot.

What it draws depends on the known tokens, seed, choice and output position only, as `ModelRunner` promises. It raises
`CorruptCache` when a plan would make a real model read or write wrong memory: a block used by two sequences at once, a
chunk that its blocks don't cover, or a position whose slot does not hold that sequence's own token.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from gpu_worker.engine.batch_plan import BatchPlan, DrawnToken, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from shared.log import Logprobs
from shared.messages import SamplingParams

VOCAB_SIZE = 97
PERIOD = 5
MAX_GATED_S = 20


DrawNext = Callable[[list[int], int, int, SamplingParams], DrawnToken]


class CorruptCache(BaseException):
    """A plan that breaks the cache; no `Exception`, since the engine survives those."""


class ScriptedRunner:
    """See the module.

    Args:
        poison: a token id that makes each step computing it raise, as a prompt that breaks the model would.
        draw: gives the token that follows; `draw_next` or `draw_repeating`.
        is_gated: each step waits for a permit, see `permit`.
    """

    fingerprint = "scripted"
    max_model_len = 256
    dtype = "float32"
    device = "cpu"
    key_cost = 0.0

    def __init__(
        self, num_blocks: int = 64, block_size: int = 16, *, poison: int | None = None, is_gated: bool = False,
        draw: DrawNext | None = None,
    ) -> None:  # fmt: skip
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.poison = poison
        self.draw = draw or draw_next
        self.is_broken = False
        self._gate = threading.Semaphore(0) if is_gated else None
        self._is_open = False
        self.plans: list[BatchPlan] = []
        self.prepared: list[BatchPlan] = []
        self.num_finished = 0
        self._started: list[tuple[PlannedChunk, list[int]]] | None = None
        self._slots: dict[int, tuple[Sequence, int, int]] = {}
        self._with_row: set[Sequence] = set()

    def prepare(self, plan: BatchPlan) -> None:
        if self._started is None:
            raise CorruptCache("plans are prepared while a step computes")
        self._check_ownership(plan)
        for chunk in plan.chunks:
            self._check_cover(chunk)
        self.prepared.append(plan)

    def start(self, plan: BatchPlan) -> None:
        if self._started is not None:
            raise CorruptCache("a step was started before the one before it was finished")
        self._check_ownership(plan)
        self.plans.append(plan)
        for chunk in plan.chunks:
            self._check_cover(chunk)
        self._started = [(chunk, list(chunk.sequence.block_ids)) for chunk in plan.chunks]

    def finish(self) -> list[DrawnToken]:
        """All is computed here, with the blocks that there were at the start."""
        if self._gate is not None and not self._is_open and not self._gate.acquire(timeout=MAX_GATED_S):
            raise CorruptCache("nobody gave a permit for this step")
        if self._started is None:
            raise CorruptCache("nothing was started")
        started, self._started = self._started, None
        self.num_finished += 1
        for chunk, block_ids in started:
            self._write(chunk, block_ids)
        sampling = [chunk for chunk, _ in started if chunk.is_sampling]
        self._with_row.update(chunk.sequence for chunk in sampling)
        return [token for chunk in sampling for token in self._draw(chunk)]

    def _draw(self, chunk: PlannedChunk) -> list[DrawnToken]:
        """The next token, and those behind each token of the draft."""
        s, draft = chunk.sequence, list(chunk.draft)
        return [
            self.draw(s.token_ids + draft[:i], s.num_output + i, s.choice, s.sampling) for i in range(len(draft) + 1)
        ]

    def forget(self, sequence: Sequence) -> None:
        self._with_row.discard(sequence)

    def permit(self, num_steps: int) -> None:
        """Let that many steps of a gated runner go."""
        assert self._gate is not None
        self._gate.release(num_steps)

    def open(self) -> None:
        """Let all steps go that will ever be."""
        if self._gate is not None:
            self._is_open = True
            self._gate.release()

    @property
    def is_computing(self) -> bool:
        """Whether a step was started and not finished."""
        return self._started is not None

    @property
    def num_rows(self) -> int:
        """Sequences for which a token was drawn and that were not forgotten since."""
        return len(self._with_row)

    def _check_ownership(self, plan: BatchPlan) -> None:
        owned = [block for chunk in plan.chunks for block in chunk.sequence.block_ids]
        if len(set(owned)) != len(owned) or not all(0 <= block < self.num_blocks for block in owned):
            raise CorruptCache(f"blocks owned twice or out of range: {owned}")
        if len({id(chunk.sequence) for chunk in plan.chunks}) != len(plan.chunks):
            raise CorruptCache("a sequence is in the plan twice")

    def _check_cover(self, chunk: PlannedChunk) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.length
        if chunk.length < 1 or end > len(sequence.token_ids):
            raise CorruptCache(f"chunk [{chunk.start}, {end}) goes beyond the known tokens")
        if chunk.start + chunk.num_rows > len(sequence.block_ids) * self.block_size:
            raise CorruptCache(f"chunk [{chunk.start}, {end}) and {len(chunk.draft)} drafted tokens are not covered")
        if chunk.start != sequence.num_computed:
            raise CorruptCache(f"a chunk begins at {chunk.start}, where {sequence.num_computed} tokens are computed")
        if chunk.is_sampling != (end == len(sequence.token_ids)) or (chunk.draft and not chunk.is_sampling):
            raise CorruptCache("a chunk samples at the end of the known tokens, and only there")

    def _write(self, chunk: PlannedChunk, block_ids: list[int]) -> None:
        sequence, end = chunk.sequence, chunk.start + chunk.length
        if self.is_broken or self.poison in sequence.token_ids[chunk.start : end]:
            raise RuntimeError("the model cannot compute this")
        for position, token_id in enumerate([*sequence.token_ids[:end], *chunk.draft]):
            slot = block_ids[position // self.block_size] * self.block_size + position % self.block_size
            content = (sequence, position, token_id)
            if position >= chunk.start:
                self._slots[slot] = content
            elif self._slots.get(slot) != content:
                raise CorruptCache(f"position {position} reads slot {slot}, which does not hold its token")


def draw_next(known: list[int], num_output: int, choice: int, sampling: SamplingParams) -> DrawnToken:
    """A token that depends on all arguments; stop tokens are banned for the first `min_tokens`."""
    is_banned = num_output < sampling.min_tokens
    text = f"{known}|{sampling.seed}|{choice}|{num_output}"
    for salt in range(10_000):
        token_id = _hash(f"{text}|{salt}") % VOCAB_SIZE
        if not (is_banned and token_id in sampling.stop_token_ids):
            break
    logprobs = None if sampling.num_logprobs is None else Logprobs(-0.5, ((token_id, -0.5),) * sampling.num_logprobs)
    return DrawnToken(token_id, logprobs)


def draw_repeating(known: list[int], num_output: int, choice: int, sampling: SamplingParams) -> DrawnToken:
    """As `draw_next`, but four of five tokens are the one `PERIOD` tokens before."""
    token = draw_next(known, num_output, choice, sampling)
    if len(known) < PERIOD or _hash(f"{known}|{sampling.seed}|{choice}|{num_output}") % 5 == 0:
        return token
    is_banned = num_output < sampling.min_tokens and known[-PERIOD] in sampling.stop_token_ids
    return token if is_banned else DrawnToken(known[-PERIOD], token.logprobs)


def solo_output(
    prompt: list[int], choice: int, sampling: SamplingParams, max_model_len: int, draw: DrawNext = draw_next
) -> tuple[list[int], str]:
    """Output tokens and finish reason of a sequence that nothing ever disturbs."""
    known = list(prompt)
    while True:
        num_output = len(known) - len(prompt)
        known.append(draw(known, num_output, choice, sampling).token_id)
        num_output += 1
        if num_output > sampling.min_tokens and known[-1] in sampling.stop_token_ids:
            return known[len(prompt) :], "stop"
        if num_output >= sampling.max_tokens or len(known) >= max_model_len:
            return known[len(prompt) :], "length"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])

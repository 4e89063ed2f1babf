"""A model without a model: tokens are a hash, and the KV cache is simulated slot by slot.

What it draws depends on the known tokens, seed, choice and output position only, as `ModelRunner` promises. It raises
`CorruptCache` when a plan would make a real model read or write wrong memory: a block that two sequences write at once,
a chunk that its blocks don't cover, or a position whose slot does not hold the sequence's token behind the tokens, and
in the cache scope, that the sequence has before it. With a window it reads the positions that a row of the chunk sees.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from gpu_worker.engine.batch_plan import DrawnToken
from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.swap import BlockCopy
from gpu_worker.lora.modules import AdapterSource
from shared.log import Logprobs
from shared.messages import SamplingParams

VOCAB_SIZE = 97
PERIOD = 5
MAX_GATED_S = 20


_Content = tuple[object, int]
DrawNext = Callable[[list[int], int, int, SamplingParams], DrawnToken]


class CorruptCache(BaseException):
    """A plan that breaks the cache; no `Exception`, since the engine survives those."""


class ScriptedRunner:
    """See the module.

    Args:
        poison: a token id that makes each step computing it raise, as a prompt that breaks the model would.
        draw: gives the token that follows; `draw_next` or `draw_repeating`.
        is_gated: each step waits for a permit, see `permit`.
        window: tokens that a row sees; 0: all before it.
    """

    fingerprint = "scripted"
    quantization = "none"
    max_model_len = 256
    dtype = "float32"
    device = "cpu"
    key_cost = 0.0
    host_memory: ScriptedHostMemory | None = None
    adapter_source: AdapterSource | None = None

    def __init__(
        self, num_blocks: int = 64, block_size: int = 16, *, poison: int | None = None, is_gated: bool = False,
        draw: DrawNext | None = None, window: int = 0,
    ) -> None:  # fmt: skip
        self.window = window
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.poison = poison
        self.draw = draw or draw_next
        self.is_broken = False
        self._gate = threading.Semaphore(0) if is_gated else None
        self._is_open = False
        self._num_gated = self._num_permits = 0
        self.plans: list[BatchPlan] = []
        self.prepared: list[BatchPlan] = []
        self.num_finished = 0
        self._started: list[tuple[PlannedChunk, list[int]]] | None = None
        self._slots: dict[int, _Content] = {}
        self.num_computed = 0
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
        self._num_gated += 1
        if self._gate is not None and not self._is_open and not self._gate.acquire(timeout=MAX_GATED_S):
            raise CorruptCache("nobody gave a permit for this step")
        if self._started is None:
            raise CorruptCache("nothing was started")
        started, self._started = self._started, None
        self.num_finished += 1
        for chunk, block_ids in started:
            self._write(chunk, block_ids)
        for chunk, block_ids in started:
            self._read(chunk, block_ids)
        sampling = [chunk for chunk, _ in started if chunk.is_sampling]
        self._with_row.update(chunk.sequence for chunk in sampling)
        return [token for chunk in sampling for token in self._draw(chunk)]

    def copy_block(self, copy: BlockCopy, host: dict[int, dict[int, _Content]]) -> None:
        """Make one copy; while a step computes, it must not be into a block of which that step has a use."""
        used = {block for _, block_ids in self._started or () for block in block_ids}
        if copy.is_back and copy.block in used:
            raise CorruptCache(f"block {copy.block} is filled while a step uses it")
        if copy.is_back and copy.host_block not in host:
            raise CorruptCache(f"nothing was ever copied to host block {copy.host_block}")
        slots = range(copy.block * self.block_size, (copy.block + 1) * self.block_size)
        if not copy.is_back:
            host[copy.host_block] = {i: self._slots[slot] for i, slot in enumerate(slots) if slot in self._slots}
            return
        for i, slot in enumerate(slots):
            self._slots.pop(slot, None)
            if i in host[copy.host_block]:
                self._slots[slot] = host[copy.host_block][i]

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
        self._num_permits += num_steps
        self._gate.release(num_steps)

    def permit_waiting(self) -> None:
        """Let the step go that waits for a permit, if one does; none goes later because of it."""
        if self._num_permits < self._num_gated:
            self.permit(1)

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
        if not all(0 <= block < self.num_blocks for chunk in plan.chunks for block in chunk.sequence.block_ids):
            raise CorruptCache("blocks out of range")
        size = self.block_size
        written = [
            b for c in plan.chunks for b in c.sequence.block_ids[c.start // size : -(-(c.start + c.num_rows) // size)]
        ]
        if len(set(written)) != len(written):
            raise CorruptCache(f"blocks written twice: {written}")
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
        self.num_computed += chunk.num_rows
        for slot, content in self._contents(chunk, block_ids)[chunk.start :]:
            self._slots[slot] = content

    def _read(self, chunk: PlannedChunk, block_ids: list[int]) -> None:
        first = max(0, chunk.start - self.window + 1) if self.window else 0
        for position, (slot, content) in enumerate(self._contents(chunk, block_ids)):
            if position >= first and self._slots.get(slot) != content:
                raise CorruptCache(f"position {position} reads slot {slot}, which does not hold its token")

    def _contents(self, chunk: PlannedChunk, block_ids: list[int]) -> list[tuple[int, _Content]]:
        """The slot of each token up to the chunk's end, and what it should hold."""
        known = (*chunk.sequence.token_ids[: chunk.start + chunk.length], *chunk.draft)
        content: _Content = (chunk.sequence.cache_scope, 0)
        found = []
        for position, token_id in enumerate(known):
            slot = block_ids[position // self.block_size] * self.block_size + position % self.block_size
            content = (token_id, hash(content))
            found.append((slot, content))
        return found


class ScriptedHostMemory:
    """Host memory beside a scripted model. `copies`: all that were made, each with whether a step computed."""

    def __init__(self, runner: ScriptedRunner, num_blocks: int, block_copy_s: float = 0.0) -> None:
        self.num_blocks = num_blocks
        self.block_copy_s = block_copy_s
        self.is_broken = False
        self.copies: list[tuple[BlockCopy, bool]] = []
        self._runner = runner
        self._host: dict[int, dict[int, _Content]] = {}

    def copy(self, copies: list[BlockCopy]) -> None:
        if self.is_broken:
            raise RuntimeError("no copy")
        for copy in copies:
            if not 0 <= copy.host_block < self.num_blocks:
                raise CorruptCache(f"there is no host block {copy.host_block}")
            self._runner.copy_block(copy, self._host)
            self.copies.append((copy, self._runner.is_computing))


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

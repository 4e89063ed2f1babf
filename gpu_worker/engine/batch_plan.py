"""What one step computes, and the planner that decides it: pure bookkeeping over sequences and blocks."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.drafter import Drafter
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.step_cost import StepCost
from shared.log import Logprobs


@dataclass(frozen=True, slots=True)
class PlannedChunk:
    """Compute tokens [start, start + length) of `sequence`; `is_sampling`: they end at its last known token, so the
    step draws its next one. `draft`: tokens that may follow; they are computed behind the known ones, and the step
    draws behind each of them, too. The sequence's `block_ids` already cover start + num_rows tokens."""

    sequence: Sequence
    start: int
    length: int
    is_sampling: bool
    draft: tuple[int, ...] = ()

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


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token that a sampling chunk gave; `logprobs` when its request asked for them."""

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

    @property
    def key_cost(self) -> float:
        """What one key that a query sees costs, where a token costs 1 beside its keys."""
        ...

    def prepare(self, plan: BatchPlan) -> None:
        """Make a plan ready that is probably started next, while a step computes. Of chunks that hold one token the
        token is not known yet: what the sequence has in its place counts for nothing. Such a plan has no drafts."""
        ...

    def start(self, plan: BatchPlan) -> None:
        """Begin a step: write KV for all tokens of the plan, and draw one token for each sampling chunk; where a chunk
        has a draft, one behind its last known token and one behind each token of the draft. Returns soon; one step at a
        time.

        The token drawn at output position p depends only on the tokens before it, the sequence's sampling parameters,
        choice and p: never on what else is in the plan, how the prompt was cut, or which tokens are a draft.
        """
        ...

    def finish(self) -> list[DrawnToken]:
        """Wait for the step that was started: the drawn tokens, in plan order. Those of sequences that have left
        meanwhile mean nothing."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence has left the batch (ended or evicted): free its sampling row, if it has one."""
        ...


MIN_PROMPT_UNITS = 16.0
"""Prompts move on by this much in each step, however long the sequences that decode take by themselves."""


class BatchPlanner:
    """Decides who runs and what each step computes; owns the queues of sequences and their blocks.

    * Order is (rank, choice) everywhere. All that decode come first, one token each, then prompts (or what an evicted
      sequence must compute again) cut to what is left of `max_num_batched_tokens`, and, where some decode, to what fits
      into `max_step_s`: nobody's stream stalls for the length of a prompt.
    * A sequence is admitted with blocks for all of its known tokens, so only a drawn token can need another one. When
      none is free then, the last running sequence, perhaps the asking one, is *evicted*: it gives its blocks back,
      waits in its place and computes its tokens again later. The first one thus always moves on.
    * Nobody overtakes in the waiting queue. An admission leaves a free block for each sequence that runs already:
      else the newcomer would be the next one evicted, again and again.
    * A sequence that `is_alone` is planned alone, whatever it takes to make room; the others pause.

    A plan looks at the front of the waiting queue only: its cost does not grow with the queue or with the pool.

    Args:
        forget: called with each sequence that stops running, to free what the model keeps for it.
        cost: what steps have cost so far.
        drafter: gives sequences that decode a draft; None: there is no speculation.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_step_s: float,
        cost: StepCost,
        forget: Callable[[Sequence], None],
        drafter: Drafter | None = None,
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_evictions = 0
        self._alone: set[Sequence] = set()
        self._pool = pool
        self._forget = forget
        self._drafter = drafter
        self._budget = max_num_batched_tokens
        self._max_step_s = max_step_s
        self._cost = cost
        # Not more runners than tokens in a step: every plan then serves all that decode and the first prompt.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        if sequence.is_alone:
            self._alone.add(sequence)
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good; its blocks are free for the next plan."""
        if sequence.status is SequenceStatus.RUNNING:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        self._alone.discard(sequence)
        sequence.status = SequenceStatus.ENDED

    def unite(self, sequence: Sequence) -> None:
        """Let a sequence be planned with others again."""
        sequence.is_alone = False
        self._alone.discard(sequence)

    def evict(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks; it waits in its place to compute its tokens again."""
        self._vacate(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self.num_evictions += 1
        self.add(sequence)

    def settle(self, sequence: Sequence) -> None:
        """A step with a draft of this running sequence is over: take back the blocks that no known token needs."""
        needed = self._pool.blocks_for(sequence.num_known)
        if len(sequence.block_ids) > needed:
            self._pool.free(sequence.block_ids[needed:])
            sequence.block_ids = sequence.block_ids[:needed]

    def plan(self) -> BatchPlan:
        """The next step; empty only when there is no sequence. Evicts and admits."""
        # The first of those that run, else the first that waits.
        alone = min(self._alone, key=lambda s: (s.status is SequenceStatus.WAITING, _order(s)), default=None)
        if alone is not None:
            self._make_room(alone)
            return BatchPlan((_cut(alone, self._budget),))
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.RUNNING:
                self._grow(sequence)
        return BatchPlan(tuple(self._fill(self.running)))

    def plan_ahead(self, ending: Set[Sequence]) -> BatchPlan | None:
        """The next step as far as it can be told while another computes (see `ahead.py`). None when that step's end
        must be known: someone is alone, a sequence would have to be evicted, or `ending` makes room for one that
        waits. Admits.

        Args:
            ending: running sequences that end with the step that computes.
        """
        if self._alone or (ending and self.waiting):
            return None
        staying = [s for s in self.running if s not in ending] if ending else self.running
        missing = [self._missing(s) for s in staying]
        if sum(missing) > self._pool.num_free:
            return None
        for sequence, count in zip(staying, missing, strict=True):
            if count:
                sequence.block_ids += self._pool.allocate(count)
        return BatchPlan(tuple(self._fill(staying))) if staying or self.waiting else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, statuses and order are as this class promises."""
        self._pool.check_integrity(s.block_ids for s in self.running)
        for queue, status in ((self.running, SequenceStatus.RUNNING), (self.waiting, SequenceStatus.WAITING)):
            assert all(s.status is status for s in queue)
            assert queue == sorted(queue, key=_order)
        assert all(len(s.block_ids) * self._pool.block_size >= s.num_computed for s in self.running)
        assert not any(s.block_ids or s.num_computed for s in self.waiting)
        assert self._alone == {s for s in chain(self.running, self.waiting) if s.is_alone}

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence the block that its last token needs, or evict it."""
        missing = self._missing(sequence)
        while missing > self._pool.num_free:
            victim = self.running[-1]
            self.evict(victim)
            if victim is sequence:
                return
        sequence.block_ids += self._pool.allocate(missing)

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that the known tokens of a running sequence lack."""
        return self._pool.blocks_for(sequence.num_known) - len(sequence.block_ids)

    def _fill(self, running: list[Sequence]) -> Iterator[PlannedChunk]:
        """Chunks of `running` and of who is admitted, until the token budget or the step's time is used up."""
        budget = self._budget
        decoding = [_cut(s, 1) for s in running if s.num_uncomputed == 1]
        budget -= len(decoding)
        if self._drafter is not None and decoding:
            decoding = self._drafter.extend(decoding, budget, may_allocate=not self.waiting)
            budget -= sum(len(chunk.draft) for chunk in decoding)
        yield from decoding
        units = self._prompt_units(decoding)
        prompts = [s for s in running if s.num_uncomputed > 1]
        for sequence in chain(prompts, self._admissions()) if budget else ():
            most = min(budget, max(1, self._cost.longest(sequence.num_computed, units)))
            chunk = _cut(sequence, most)
            yield chunk
            budget -= chunk.length
            units -= self._cost.units(chunk.start, chunk.length)
            if budget == 0 or units < 1.0:
                return

    def _prompt_units(self, decoding: list[PlannedChunk]) -> float:
        """How much of prompts a step beside `decoding` may compute."""
        if not decoding or self._max_step_s == math.inf:
            return math.inf
        spent = sum(self._cost.units(chunk.start, chunk.num_rows) for chunk in decoding)
        return max(MIN_PROMPT_UNITS, self._cost.units_within(self._max_step_s) - spent)

    def _admissions(self) -> Iterator[Sequence]:
        """Admit waiting sequences, each only when it is asked for."""
        while self.waiting and len(self.running) < self._max_running:
            wanted = self._pool.blocks_for(self.waiting[0].num_known) + len(self.running)
            if wanted > self._pool.num_free:
                return
            yield self._admit(self.waiting[0])

    def _make_room(self, sequence: Sequence) -> None:
        """See that `sequence` runs, whoever must give way."""
        if sequence.status is SequenceStatus.RUNNING:
            return
        needed = self._pool.blocks_for(sequence.num_known)
        while len(self.running) >= self._max_running or needed > self._pool.num_free:
            self.evict(self.running[-1])
        self._admit(sequence)

    def _admit(self, sequence: Sequence) -> Sequence:
        self.waiting.remove(sequence)
        sequence.block_ids = self._pool.allocate(self._pool.blocks_for(sequence.num_known))
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=_order)
        return sequence

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pool.free(sequence.block_ids)
        sequence.block_ids = []
        self._forget(sequence)


def _order(sequence: Sequence) -> tuple[int, str, int]:
    return sequence.rank, sequence.request_id, sequence.choice


def _cut(sequence: Sequence, budget: int) -> PlannedChunk:
    """The next chunk of `sequence`, at most `budget` tokens."""
    length = min(sequence.num_uncomputed, budget)
    return PlannedChunk(sequence, sequence.num_computed, length, is_sampling=length == sequence.num_uncomputed)

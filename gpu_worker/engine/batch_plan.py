"""What one step computes, and the planner that decides it: pure bookkeeping over sequences and blocks."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from gpu_worker.engine.adapter_limit import AdapterLimit
from gpu_worker.engine.chunks import BatchPlan, PlannedChunk, cut
from gpu_worker.engine.drafter import Drafter
from gpu_worker.engine.kv_window import KvWindow
from gpu_worker.engine.prefix_cache import NO_HIT, PrefixCache, PrefixHit
from gpu_worker.engine.sequence import Sequence, SequenceStatus, order_of
from gpu_worker.engine.static_batch import StaticBatch
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.swap import SwapSpace
from shared.log import Logprobs
from shared.preemption import MAX_PLANS_ASIDE


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """A token that a sampling chunk gave; `logprobs` when its request asked for them, `embedding` when it did for that,
    and then the token means nothing."""

    token_id: int
    logprobs: Logprobs | None = None
    embedding: bytes = b""


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
    def window(self) -> int:
        """Tokens that a query sees at most in any layer, itself among them; 0: all up to it."""
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

    * Order is (priority, rank, choice) everywhere. All that decode come first, one token each, then prompts (or what
      an evicted sequence must compute again) cut to what is left of `max_num_batched_tokens`, and, where some decode,
      to what fits into `max_step_s`: nobody's stream stalls for the length of a prompt. Where there is no
      chunking, the first prompt for which a step has no room waits for the next one.
    * A sequence is admitted with blocks for all of its known tokens, found (`prefix_cache.py`) or its own, so only a
      drawn token can need another one; with a window only with those of its next chunk (`kv_window.py`). When none is
      free then, the last running sequence, perhaps the asking one, is *evicted*: it gives its blocks back, waits in its
      place and has its tokens copied back (`swap.py`) or computes them again later. The first one thus always moves on.
      With `reserved_tokens` each gets blocks of its own for as many at once.
    * Who is *set aside* for others does the same, but does not take its place again at once: it waits until one that
      runs has left, nobody runs, or `MAX_PLANS_ASIDE` plans were made.
    * Nobody overtakes in the waiting queue, but for one that waits for its adapter alone (`adapter_limit.py`). An
      admission leaves a free block for each sequence that runs already: else the newcomer would be the next one
      evicted, again and again.
    * A sequence that `is_alone` is planned alone, whatever it takes to make room; the others pause.

    A plan looks at the front of the waiting queue only: its cost does not grow with the queue or with the pool.

    Args:
        forget: called with each sequence that stops running, to free what the model keeps for it.
        cost: what steps have cost so far.
        static: the batch, where nobody joins one that runs; None: whoever fits joins at any step.
        drafter: gives sequences that decode a draft; None: there is no speculation.
        swap: where blocks of those who give way are kept.
        window: what a sequence needs of its blocks.
        max_adapters: most different ones that run at once (`adapter_limit.py`).
    """

    def __init__(
        self,
        cache: PrefixCache,
        swap: SwapSpace,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_chunking: bool,
        reserved_tokens: int,
        static: StaticBatch | None = None,
        max_step_s: float,
        cost: StepCost,
        forget: Callable[[Sequence], None],
        drafter: Drafter | None = None,
        window: KvWindow,
        max_adapters: int = 0,
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.num_evictions = 0
        self.most_running = 0
        self._alone: set[Sequence] = set()
        self._aside: dict[Sequence, int] = {}
        self._num_plans = 0
        self._swap = swap
        self._cache = cache
        self._pool = cache.pool
        self._forget = forget
        self._window = window
        self._adapters = AdapterLimit(max_adapters)
        self._drafter = drafter
        self._budget = max_num_batched_tokens
        self._is_chunking = is_chunking
        self._reserved_tokens = reserved_tokens
        self._static = static
        self._max_step_s = max_step_s
        self._cost = cost
        # Not more runners than tokens in a step: every plan then serves all that decode and the first prompt.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        if sequence.is_alone:
            self._alone.add(sequence)
        insort(self.waiting, sequence, key=order_of)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good; its blocks are free for the next plan."""
        if sequence.status is SequenceStatus.RUNNING and self._static is not None:
            self.running.remove(sequence)
            self._static.pad(sequence, self._pool.block_size)
        elif sequence.status is SequenceStatus.RUNNING:
            self._vacate(sequence)
            self._aside.clear()
        else:
            self.waiting.remove(sequence)
            self._swap.forget(sequence)
            self._aside.pop(sequence, None)
        self._alone.discard(sequence)
        sequence.status = SequenceStatus.ENDED
        self._end_batch()

    def unite(self, sequence: Sequence) -> None:
        """Let a sequence be planned with others again."""
        sequence.is_alone = False
        self._alone.discard(sequence)

    def evict(self, sequence: Sequence, *, is_intact: bool = True) -> None:
        """Take a running sequence's blocks; it waits in its place to have its tokens again.

        Args:
            is_intact: whether its blocks hold what they should; else it computes all of them again.
        """
        self.num_evictions += 1
        if is_intact:
            self._swap.put_away(sequence)
        self._give_way(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """As `evict`, for others: it does not count as an eviction, and the sequence does not return at once."""
        self._swap.put_away(sequence, is_told=True)
        self._give_way(sequence)
        self._aside[sequence] = self._num_plans + MAX_PLANS_ASIDE

    def release(self, sequence: Sequence) -> None:
        """Tokens of this running sequence were computed: give back the blocks that none of its next queries sees."""
        first = self._window.first_block(sequence.num_computed)
        fallen = sequence.block_ids[sequence.num_freed_blocks : first]
        if fallen:
            self._pool.free(fallen[::-1])
            sequence.num_freed_blocks = first

    def settle(self, sequence: Sequence) -> None:
        """A step with a draft of this running sequence is over: take back the blocks that no known token needs."""
        needed = self._needed(sequence, sequence.num_computed)
        if len(sequence.block_ids) > needed:
            self._pool.free(sequence.block_ids[needed:])
            sequence.block_ids = sequence.block_ids[:needed]

    def plan(self) -> BatchPlan:
        """The next step; empty only when there is no sequence. Evicts and admits."""
        self._num_plans += 1
        # The first of those that run, else the first that waits.
        alone = min(self._alone, key=lambda s: (s.status is SequenceStatus.WAITING, order_of(s)), default=None)
        if alone is not None:
            self._make_room(alone)
            return BatchPlan((cut(alone, self._budget),))
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.RUNNING:
                self._grow(sequence)
        if self._static is not None and not self.running:
            while self.waiting and self._admit_first() is not None:
                pass
        return BatchPlan(tuple(self._fill(self.running)))

    def plan_ahead(self, ending: Set[Sequence]) -> BatchPlan | None:
        """The next step as far as it can be told while another computes (see `ahead.py`). None when that step's end
        must be known: someone is alone, a sequence would have to be evicted, or `ending` makes room for one that
        waits. Admits.

        Args:
            ending: running sequences that end with the step that computes.
        """
        self._num_plans += 1
        if self._alone or (ending and self.waiting and self._static is None):
            return None
        staying = [s for s in self.running if s not in ending] if ending else self.running
        if self._static is not None and not staying:
            return None
        missing = [self._missing(s) for s in staying]
        if sum(missing) > self._pool.num_free:
            return None
        for sequence, count in zip(staying, missing, strict=True):
            if count:
                sequence.block_ids += self._pool.allocate(count)
        return BatchPlan(tuple(self._fill(staying))) if staying or self.waiting else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, statuses and order are as this class promises."""
        padding = [] if self._static is None else self._static.padding
        assert self.running or not padding
        self._pool.check_integrity([s.owned_block_ids for s in chain(self.running, padding)])
        self._cache.check_integrity()
        for queue, status in ((self.running, SequenceStatus.RUNNING), (self.waiting, SequenceStatus.WAITING)):
            assert all(s.status is status for s in queue)
            assert queue == sorted(queue, key=order_of)
        assert all(len(s.block_ids) * self._pool.block_size >= s.num_computed for s in self.running)
        assert all(s.num_freed_blocks <= self._window.first_block(s.num_computed) for s in self.running)
        assert not any(s.block_ids or s.num_freed_blocks or s.num_computed or s.writer for s in self.waiting)
        self._swap.check_integrity(self.waiting)
        self._adapters.check(self.running)
        assert self._aside.keys() <= set(self.waiting)
        assert self._alone == {s for s in chain(self.running, self.waiting) if s.is_alone}

    def _give_way(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        sequence.num_computed = 0
        sequence.status = SequenceStatus.WAITING
        self.add(sequence)
        self._end_batch()

    def _grow(self, sequence: Sequence) -> None:
        """Give a running sequence the blocks that its last token, or next chunk, needs, or evict it."""
        missing = self._missing(sequence)
        while missing > self._pool.num_free:
            victim = self.running[-1]
            self.evict(victim)
            if victim is sequence:
                return
        sequence.block_ids += self._pool.allocate(missing)

    def _missing(self, sequence: Sequence) -> int:
        """Blocks that the known tokens of a running sequence lack."""
        return max(0, self._needed(sequence, sequence.num_computed) - len(sequence.block_ids))

    def _needed(self, sequence: Sequence, num_computed: int) -> int:
        """Blocks, from the first one on, for its known tokens, or for as many as each sequence gets; with a window for
        as many as a step may compute."""
        num_covered = self._window.num_covered(sequence.num_known, num_computed)
        return self._pool.blocks_for(max(num_covered, self._reserved_tokens))

    def _find(self, sequence: Sequence) -> PrefixHit:
        """What of a sequence's prefix is known; nothing where each has memory of its own."""
        return NO_HIT if self._reserved_tokens else self._cache.find(sequence)

    def _fill(self, running: list[Sequence]) -> Iterator[PlannedChunk]:
        """Chunks of `running` and of who is admitted, until the token budget or the step's time is used up."""
        budget, planned = self._budget, dict[Sequence, int]()
        decoding = [cut(s, 1) for s in running if s.num_uncomputed == 1 and _is_ready(s, planned)]
        padding = [] if self._static is None else list(self._static.rows())
        budget -= len(decoding) + len(padding)
        if self._drafter is not None and decoding:
            decoding = self._drafter.extend(decoding, budget, may_allocate=not self.waiting)
            budget -= sum(len(chunk.draft) for chunk in decoding)
        yield from decoding
        yield from padding
        units = self._prompt_units(decoding)
        prompts = [s for s in running if s.num_uncomputed > 1 or not _is_ready(s, planned)]
        for sequence in self._in_order(prompts) if budget else ():
            if not _is_ready(sequence, planned):
                continue
            if not self._is_chunking and sequence.num_uncomputed > budget:
                return
            most = min(budget, max(1, self._cost.longest(sequence.num_computed, units)))
            chunk = cut(sequence, most)
            yield chunk
            planned[sequence] = chunk.start + chunk.length
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

    def _in_order(self, prompts: list[Sequence]) -> Iterator[Sequence]:
        """Running `prompts` and, each at its place, those that wait and can be admitted, which happens only when it is
        asked for the next one."""
        rest = deque(prompts)
        while rest or self.waiting:
            is_next_waiting = self.waiting and (not rest or order_of(self.waiting[0]) < order_of(rest[0]))
            admitted = self._admit_first() if is_next_waiting and self._static is None else None
            if admitted is not None:
                yield admitted
            elif rest:
                yield rest.popleft()
            else:
                return

    def _admit_first(self) -> Sequence | None:
        """Admit the first that waits, if there is room; if that lacks room for its adapter alone, perhaps another."""
        if len(self.running) >= self._max_running or self._is_aside(self.waiting[0]):
            return None
        first = self._adapters.first(self.waiting, self.running)
        if first is None or self._is_aside(first) or self._cache.is_being_computed(first, self.running):
            return None
        hit = self._find(first)
        left = 0 if self._reserved_tokens else len(self.running)
        if self._wanted(first, hit) + left > self._pool.num_free:
            return None
        return self._admit(first, hit)

    def _is_aside(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence still leaves its place to others."""
        return bool(self.running) and self._num_plans < self._aside.get(sequence, 0)

    def _wanted(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Free blocks that admitting a sequence takes, those of its hit that nobody owns among them."""
        return self._lacks(sequence, hit) + len(hit.block_ids) - self._pool.num_owned(hit.block_ids)

    def _lacks(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Blocks of its own that a sequence gets beside those of its hit."""
        return self._needed(sequence, hit.num_blocks * self._pool.block_size) - hit.num_blocks

    def _make_room(self, sequence: Sequence) -> None:
        """See that `sequence` runs and has its blocks, whoever must give way."""
        if sequence.status is SequenceStatus.RUNNING:
            missing = self._missing(sequence)
            while missing > self._pool.num_free:
                self.evict(self.running[-1] if self.running[-1] is not sequence else self.running[-2])
            sequence.block_ids += self._pool.allocate(missing)
            return
        while True:
            hit = self._find(sequence)
            is_joining = len(self.running) < self._max_running and self._adapters.has_room(sequence, self.running)
            if is_joining and self._wanted(sequence, hit) <= self._pool.num_free:
                break
            self.evict(self.running[-1])
        self._admit(sequence, hit)

    def _admit(self, sequence: Sequence, hit: PrefixHit) -> Sequence:
        self.waiting.remove(sequence)
        self._pool.share(hit.block_ids)
        missing = self._lacks(sequence, hit)
        sequence.num_freed_blocks = hit.num_skipped
        sequence.block_ids = [*[0] * hit.num_skipped, *hit.block_ids, *self._pool.allocate(missing)]
        self._cache.enter(sequence, hit)
        self._swap.bring_back(sequence)
        self._aside.pop(sequence, None)
        sequence.status = SequenceStatus.RUNNING
        insort(self.running, sequence, key=order_of)
        self.most_running = max(self.most_running, len(self.running))
        return sequence

    def _end_batch(self) -> None:
        """If nobody of a static batch is left, its padding goes, too."""
        if self._static is not None and not self.running:
            for sequence in self._static.padding:
                self._clear(sequence)
            self._static.padding.clear()

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._clear(sequence)

    def _clear(self, sequence: Sequence) -> None:
        self._cache.leave(sequence, self.running)
        self._pool.free(sequence.owned_block_ids)
        sequence.block_ids, sequence.num_freed_blocks = [], 0
        self._forget(sequence)


def _is_ready(sequence: Sequence, planned: Mapping[Sequence, int]) -> bool:
    """Whether all blocks that a sequence found are computed, or are in the step that computes `planned` tokens of each
    sequence."""
    writer = sequence.writer
    return writer is None or max(writer.num_computed, planned.get(writer, 0)) >= sequence.num_awaited

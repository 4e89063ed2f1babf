"""Speculation by prompt lookup: which sequences of a step get a draft, how long, and what became of it.

Design note. A *draft* is a guess at the tokens that follow a sequence's last one, taken from its own text. The step
computes the last token and the draft in one chunk and draws behind each of them, as it would have drawn one step after
another: logits of a row depend on the tokens before it only, and random numbers on (seed, choice, position). So drawn
tokens that equal the draft are right, and so is the first that differs; those after it are thrown away. Speculation
changes when tokens come and never which, as far as the model keeps its promise (`ModelRunner`).

* KV written for tokens that were thrown away lies behind `num_computed`. Nothing reads there before the next chunk of
  the sequence has written over it.
* A draft takes free blocks only, while nobody waits for some, and what of them its sequence does not need is given back
  after the step. It never evicts, and never ends up in a sequence's known tokens.
* All drafts of a step take at most half of the tokens and of the time that the decoding sequences leave; prompts have
  the rest.
* A draft is as long as it pays (`Acceptance`), by what a token costs in the step beside those that are computed anyway.
* Guesses are made when tokens are known, for every sequence and whether they pay or not: what is drawn tells how good
  they were.
* Penalties look at the tokens drawn before: sequences with some have no guesses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpu_worker.engine.acceptance import Acceptance
from gpu_worker.engine.ngram_index import NgramIndex
from gpu_worker.engine.stopping import max_known

if TYPE_CHECKING:
    from gpu_worker.engine.block_pool import BlockPool
    from gpu_worker.engine.chunks import PlannedChunk
    from gpu_worker.engine.sequence import Sequence
    from gpu_worker.engine.step_cost import StepCost
    from shared.speculation import SpeculationConfig


class DraftState:
    """What is remembered of one sequence. `guess`: tokens that may follow its last known one."""

    __slots__ = ("acceptance", "guess", "index")

    def __init__(self, config: SpeculationConfig) -> None:
        self.index = NgramIndex(config.lookup_max, config.lookup_min)
        self.acceptance = Acceptance()
        self.guess: tuple[int, ...] = ()


class Drafter:
    """Drafts for one engine.

    Args:
        max_step_s: how long a step with running streams may take.
    """

    def __init__(
        self, config: SpeculationConfig, *, cost: StepCost, pool: BlockPool, max_model_len: int, max_step_s: float
    ) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self._config = config
        self._cost = cost
        self._pool = pool
        self._max_model_len = max_model_len
        self._max_step_s = max_step_s

    def extend(self, chunks: list[PlannedChunk], num_tokens: int, *, may_allocate: bool) -> list[PlannedChunk]:
        """`chunks`, those that are worth it with a draft; their sequences get the blocks for it.

        Args:
            chunks: of a token each, all that decode in the step.
            num_tokens: most tokens that the step has left for drafts and prompts.
            may_allocate: whether free blocks may be taken.
        """
        step_units = sum(self._cost.units(chunk.start, 1) for chunk in chunks)
        left, left_units = num_tokens // 2, (self._cost.units_within(self._max_step_s) - step_units) / 2
        price = self._price(step_units, len(chunks))
        extended = []
        for chunk in chunks:
            units = self._cost.units(chunk.start, 1)
            draft = self._draft(chunk.sequence, price * units, int(min(left, max(0.0, left_units / units))))
            draft = self._fit(chunk.sequence, draft, may_allocate=may_allocate)
            left -= len(draft)
            left_units -= len(draft) * units
            extended.append(replace(chunk, draft=draft) if draft else chunk)
        return extended

    def note(self, chunk: PlannedChunk, drawn: list[int]) -> None:
        """The tokens that hold were drawn behind the last known one of a chunk's sequence, before any stop rule."""
        if chunk.draft:
            self.num_drafts += 1
            self.num_draft_tokens += len(chunk.draft)
            self.num_accepted_tokens += len(drawn) - 1
        state = chunk.sequence.draft_state
        if state is not None:
            num_right = count_equal(state.guess, drawn)
            state.acceptance.note(num_right, is_wrong_then=num_right < min(len(state.guess), len(drawn)))

    def guess(self, sequence: Sequence) -> None:
        """`sequence` knows new tokens: guess those that follow."""
        if sequence.has_penalties:
            return
        state = sequence.draft_state
        if state is None:
            state = sequence.draft_state = DraftState(self._config)
        state.guess = state.index.continuation(sequence.token_ids, self._config.num_tokens)

    def _price(self, step_units: float, num_streams: int) -> float:
        """What a unit more costs in a step of `step_units`, where what the step costs for each of its streams is 1;
        nothing while no step has been measured."""
        step_s = self._cost.step_s(step_units)
        return self._cost.unit_s * num_streams / step_s if step_s > 0.0 else 0.0

    def _draft(self, sequence: Sequence, price: float, most: int) -> tuple[int, ...]:
        """The worthwhile part of the guess."""
        state = sequence.draft_state
        if state is None:
            return ()
        # The last token that a sequence may come to is drawn and never computed.
        most = min(most, len(state.guess), max_known(sequence, self._max_model_len) - sequence.num_known - 1)
        return state.guess[: state.acceptance.worthwhile(price, most)]

    def _fit(self, sequence: Sequence, draft: tuple[int, ...], *, may_allocate: bool) -> tuple[int, ...]:
        """As much of `draft` as there are blocks for, which the sequence then has."""
        missing = self._pool.blocks_for(sequence.num_known + len(draft)) - len(sequence.block_ids)
        missing = min(missing, self._pool.num_free if may_allocate else 0)
        if missing > 0:
            sequence.block_ids += self._pool.allocate(missing)
        return draft[: len(sequence.block_ids) * self._pool.block_size - sequence.num_known]


def count_equal(expected: tuple[int, ...], actual: list[int]) -> int:
    """Length of the longest common beginning."""
    count = 0
    for left, right in zip(expected, actual, strict=False):
        if left != right:
            break
        count += 1
    return count

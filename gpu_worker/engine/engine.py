"""The engine: sequences in, tokens out, one model step at a time.

`step()` is plan → start → finish → keep. The engine is synchronous and belongs to one thread; between steps that thread
adds, drops and preempts. It knows nothing of logs or Redis: what it draws is kept here at once (it is deterministic, so
a lost process draws the very same again) and handed out for the service to commit.

Design note. Where the caller lets it, a step ends by starting the next one, so that the model hardly ever waits:

    the model      | step t                    | step t + 1
    this thread    | hand out t − 1 · plan t + 1 · wait | keep t, start | hand out t · plan t + 2 · wait

What is planned while t computes stands on assumptions (`ahead.py`); where they do not carry, the next step is planned
and started after t, as it always is for a caller that does not go on. Between two calls a step may thus be *in flight*.
Whoever is dropped then has its blocks back at once: steps are serial, so a block is not written by its next owner
before the step is over, and what the step computed for one that left is thrown away.

When the model raises in a step of several requests, nobody knows whose fault it is: each of them is evicted and then
steps alone until it has gained a token, so that only the culprit fails. A request that raises alone fails, with all
of its choices. When `MAX_FAILURES_IN_A_ROW` lone steps raise with no good one between, the model itself is broken (a
lost device): `EngineBroken` leaves `step`, the process should die and its requests go elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.engine.ahead import assume_computed, living, will_end, without_ended
from gpu_worker.engine.batch_plan import BatchPlan, BatchPlanner, DrawnToken, ModelRunner, PlannedChunk
from gpu_worker.engine.block_pool import BlockPool
from gpu_worker.engine.drafter import Drafter, count_equal
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.stopping import finish_reason, max_known
from shared.clock import Clock
from shared.errors import InvalidRequest, QuireError
from shared.ids import RequestId
from shared.log import FinishEntry, LogEntry, TokenEntry
from shared.logs import get_log
from shared.messages import HeldRequest
from shared.speculation import SpeculationConfig

MAX_FAILURES_IN_A_ROW = 8

_log = get_log("engine")


class EngineBroken(QuireError):
    """The model fails whatever it is given; this process is of no more use."""


class NewEntries(NamedTuple):
    """What one choice gained in a step: a token entry, more of them when a draft was right, and a finish entry behind
    them when it ended (`finish`)."""

    request_id: RequestId
    attempt: int
    choice: int
    entries: tuple[LogEntry, ...]
    finish: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`failed`: (request, attempt) that the model cannot compute; the engine holds them no longer."""

    entries: tuple[NewEntries, ...] = ()
    failed: tuple[tuple[RequestId, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """A snapshot for reports. Counters rise for the life of the engine; the prompt of a sequence counts once, with its
    first token. `running` describes those of the `num_held` requests of which a sequence runs; the others hold no block
    and do not change, so whoever handed them in can describe them, and a view need not look at a long queue."""

    num_blocks: int
    free_blocks: int
    num_running: int
    num_waiting: int
    num_steps: int
    num_evictions: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_held: int
    running: dict[RequestId, HeldRequest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Started:
    """A step that was started, when (seconds of the clock), and why that failed if it did."""

    plan: BatchPlan
    at: float
    error: Exception | None = None


_Gain = tuple[Sequence, list[DrawnToken], str]
"""A sequence, the tokens it gained, and why it ended with the last of them ("": it goes on)."""


class Engine:
    """Continuous batching over one model's paged KV cache.

    Args:
        max_model_len: most tokens a sequence may come to, prompt and output.
        max_num_seqs: most sequences in one step.
        max_num_batched_tokens: most tokens in one step.
        max_step_s: a step in which some decode takes no more of prompts than fits into this time.
        clock: times steps, for `max_step_s`; None: nothing is known of their time.
        speculation: how drafts are made; None: there are none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_step_s: float = math.inf,
        clock: Clock | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> None:
        self._clock = clock
        self._in_flight: _Started | None = None
        self._runner = runner
        self._max_model_len = max_model_len
        self._pool = BlockPool(runner.num_blocks, runner.block_size)
        self._cost = StepCost(runner.key_cost)
        self._drafter = None
        if speculation is not None:
            self._drafter = Drafter(
                speculation, cost=self._cost, pool=self._pool, max_model_len=max_model_len, max_step_s=max_step_s
            )
        self._planner = BatchPlanner(
            self._pool,
            max_step_s=max_step_s,
            cost=self._cost,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            forget=runner.forget,
            drafter=self._drafter,
        )
        self._held: dict[RequestId, list[Sequence]] = {}
        self._num_steps = 0
        self._num_preempted = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_failures_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or one is in flight."""
        return bool(self._held) or self._in_flight is not None

    @property
    def num_evictions(self) -> int:
        """Sequences evicted so far because something had to give way in here."""
        return self._planner.num_evictions

    def add(self, sequence: Sequence) -> None:
        """Take a sequence in; it runs when its turn comes and blocks are free.

        Raises:
            InvalidRequest: it has no token left to draw, or could not be finished with the whole cache to itself.
        """
        limit = max_known(sequence, self._max_model_len)
        if sequence.num_known >= limit:
            raise InvalidRequest(
                f"{sequence.num_known} tokens leave none to generate: the limit is {limit}",
                code="context_length_exceeded",
            )
        if self._pool.blocks_for(limit - 1) > self._pool.num_blocks:
            raise InvalidRequest(
                f"{limit} tokens of prompt and output do not fit the KV cache of "
                f"{self._pool.num_blocks * self._pool.block_size} tokens",
                code="context_length_exceeded",
            )
        self._held.setdefault(sequence.request_id, []).append(sequence)
        self._planner.add(sequence)

    def drop(self, request_id: RequestId, choice: int | None = None) -> bool:
        """Forget a request, or one choice of it; its blocks are free for the next plan. Whether it was held."""
        dropped = [s for s in self._held.get(request_id, ()) if choice in (None, s.choice)]
        for sequence in dropped:
            self._remove(sequence)
        return bool(dropped)

    def preempt(self, request_id: RequestId) -> bool:
        """As `drop`, counted: the scheduler wants the request elsewhere or later. Whether it was held."""
        self._num_preempted += len(self._held.get(request_id, ()))
        return self.drop(request_id)

    def clear(self) -> None:
        """Forget everything; waits for the step in flight."""
        if self._in_flight is not None:
            self._in_flight = None
            try:
                self._runner.finish()
            except Exception as error:
                _log.warning("step.discarded", error=type(error).__name__)
        for request_id in list(self._held):
            self.drop(request_id)

    def step(self, goes_on: Callable[[], bool] | None = None) -> StepOutput:
        """Compute one batch; call it while there `has_work`.

        Args:
            goes_on: asked when the batch is computed: may the next one be started right away, as it was planned
                meanwhile? None: it is planned by the next call.

        Raises:
            EngineBroken: see the module.
        """
        step = self._in_flight or self._start(self._planner.plan())
        ahead = None if goes_on is None or step.error is not None else self._prepare(step.plan)
        self._in_flight = None
        self._num_steps += 1
        try:
            drawn = self._finish(step)
        except Exception as error:
            return self._survive(step.plan, error)
        gains = self._keep(step.plan, drawn)
        if goes_on is not None and ahead is not None and goes_on() and (rest := without_ended(ahead)).chunks:
            self._in_flight = self._start(rest)
        return StepOutput(tuple(map(_to_entries, gains)))

    def view(self) -> EngineView:
        """What the engine holds now, O(running sequences)."""
        running = dict.fromkeys(sequence.request_id for sequence in self._planner.running)
        drafter = self._drafter
        return EngineView(
            num_blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            num_running=len(self._planner.running),
            num_waiting=len(self._planner.waiting),
            num_steps=self._num_steps,
            num_evictions=self.num_evictions,
            num_preemptions=self.num_evictions + self._num_preempted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_drafts=drafter.num_drafts if drafter is not None else 0,
            num_draft_tokens=drafter.num_draft_tokens if drafter is not None else 0,
            num_accepted_tokens=drafter.num_accepted_tokens if drafter is not None else 0,
            num_held=len(self._held),
            running={request_id: _describe(self._held[request_id]) for request_id in running},
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, queues and requests agree."""
        self._planner.check_integrity()
        held = [s for sequences in self._held.values() for s in sequences]
        assert len(held) == len(self._planner.running) + len(self._planner.waiting)
        assert all(s.status is not SequenceStatus.ENDED for s in held)

    def _start(self, plan: BatchPlan) -> _Started:
        """Start a step; if that fails, finishing it does."""
        started_at = 0.0 if self._clock is None else self._clock.now()
        try:
            self._runner.start(plan)
        except Exception as error:
            return _Started(plan, started_at, error)
        return _Started(plan, started_at)

    def _finish(self, step: _Started) -> list[DrawnToken]:
        """What the step drew; learns what it cost."""
        if step.error is not None:
            raise step.error
        drawn = self._runner.finish()
        if self._clock is not None:
            units = sum(self._cost.units(chunk.start, chunk.num_rows) for chunk in step.plan.chunks)
            self._cost.observe(units, self._clock.now() - step.at)
        return drawn

    def _prepare(self, plan: BatchPlan) -> BatchPlan | None:
        """Make the step behind `plan`, which computes, ready; None when it must be planned afterwards, as all are that
        may have drafts: what to try depends on the tokens that are being drawn."""
        if self._drafter is not None:
            return None
        ending = will_end(plan, self._max_model_len)
        with assume_computed(plan):
            ahead = self._planner.plan_ahead(ending)
            if ahead is not None and ahead.chunks:
                self._runner.prepare(ahead)
        return ahead

    def _keep(self, plan: BatchPlan, drawn: list[DrawnToken]) -> list[_Gain]:
        """Count the plan's tokens as computed and append what was drawn and holds."""
        self._num_failures_in_a_row = 0
        rest, gains = iter(drawn), []
        for chunk in plan.chunks:
            tokens = [next(rest) for _ in range(1 + len(chunk.draft))] if chunk.is_sampling else []
            if chunk.sequence.status is SequenceStatus.ENDED:
                self._runner.forget(chunk.sequence)  # it may have been given a row again when its token was drawn
                continue
            chunk.sequence.num_computed += chunk.length
            if tokens:
                gains.append(self._append(chunk.sequence, self._verify(chunk, tokens)))
        assert next(rest, None) is None, "more tokens drawn than the plan asks for"
        return gains

    def _verify(self, chunk: PlannedChunk, tokens: list[DrawnToken]) -> list[DrawnToken]:
        """The tokens drawn for `chunk` that hold: those that equal its draft, and one more."""
        if self._drafter is None:
            return tokens
        token_ids = [token.token_id for token in tokens]
        num_right = count_equal(chunk.draft, token_ids)
        self._drafter.note(chunk, token_ids[: num_right + 1])
        return tokens[: num_right + 1]

    def _append(self, sequence: Sequence, tokens: list[DrawnToken]) -> _Gain:
        """Let `sequence` gain `tokens`, at most until it ends; all but the last were computed in the step."""
        if sequence.num_output == 0:
            self._num_prompt_tokens += sequence.num_prompt_tokens
        if sequence.is_alone:
            self._unite(sequence.request_id)
        finish, num_gained = "", 0
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            num_gained += 1
            finish = finish_reason(sequence, self._max_model_len)
            if finish:
                break
        sequence.num_computed += num_gained - 1
        self._num_generation_tokens += num_gained
        if finish:
            self._remove(sequence)
        elif self._drafter is not None:
            self._planner.settle(sequence)
            self._drafter.guess(sequence)
        return sequence, tokens[:num_gained], finish

    def _unite(self, request_id: RequestId) -> None:
        """The request has gained a token: it may step with others again."""
        for sequence in self._held[request_id]:
            self._planner.unite(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._planner.remove(sequence)
        siblings = self._held[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._held[sequence.request_id]

    def _survive(self, plan: BatchPlan, error: Exception) -> StepOutput:
        """The model raised: fail the step's only request, or find out which of several it was."""
        requests = {chunk.sequence.request_id: chunk.sequence.attempt for chunk in plan.chunks}
        suspects = [chunk.sequence for chunk in living(plan)]
        _log.error("step.failed", request_ids=",".join(requests), error=type(error).__name__, exc_info=True)
        if len(requests) > 1:
            self._isolate(suspects)
            return StepOutput()
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise EngineBroken(f"{MAX_FAILURES_IN_A_ROW} requests in a row failed in the model") from error
        failed = {sequence.request_id: sequence.attempt for sequence in suspects}
        for request_id in failed:
            self.drop(request_id)
        return StepOutput(failed=tuple(failed.items()))

    def _isolate(self, suspects: Iterable[Sequence]) -> None:
        for sequence in suspects:
            sequence.is_alone = True
            self._planner.evict(sequence)


def _to_entries(gain: _Gain) -> NewEntries:
    sequence, tokens, finish = gain
    entries: tuple[LogEntry, ...] = tuple(TokenEntry(sequence.choice, t.token_id, t.logprobs) for t in tokens)
    if finish:
        entries += (FinishEntry(sequence.choice, finish),)
    return NewEntries(sequence.request_id, sequence.attempt, sequence.choice, entries, finish)


def _describe(sequences: list[Sequence]) -> HeldRequest:
    num_running = sum(s.status is SequenceStatus.RUNNING for s in sequences)
    return HeldRequest(
        request_id=sequences[0].request_id,
        attempt=sequences[0].attempt,
        num_blocks=sum(len(s.block_ids) for s in sequences),
        num_tokens=sum(s.num_known for s in sequences),
        num_running=num_running,
        num_waiting=len(sequences) - num_running,
    )

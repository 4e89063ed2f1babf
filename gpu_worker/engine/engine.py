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
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpu_worker.engine.ahead import assume_computed, is_living, will_end, without_ended
from gpu_worker.engine.batch_plan import BatchPlanner, DrawnToken, ModelRunner
from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.drafter import Drafter, count_equal
from gpu_worker.engine.kv_window import KvWindow
from gpu_worker.engine.prefix_cache import PrefixCache
from gpu_worker.engine.sequence import Sequence, SequenceStatus
from gpu_worker.engine.static_batch import StaticBatch
from gpu_worker.engine.step_cost import StepCost
from gpu_worker.engine.step_work import StepWork, share_out
from gpu_worker.engine.stopping import finish_reason, max_known
from gpu_worker.engine.swap import HostMemory, SwapSpace
from gpu_worker.engine.view import EngineView, describe
from shared.capacity import blocks_for, resident_tokens
from shared.clock import Clock
from shared.errors import InvalidRequest, QuireError
from shared.ids import RequestId
from shared.log import FinishEntry, LogEntry, TokenEntry
from shared.logs import get_log
from shared.speculation import SpeculationConfig

MAX_FAILURES_IN_A_ROW = 8

_log = get_log("engine")


class EngineBroken(QuireError):
    """The model fails whatever it is given; this process is of no more use."""


class NewEntries(NamedTuple):
    """What one choice gained in a step: a token entry, more of them when a draft was right, and a finish entry behind
    them when it ended (`finish`); an embedding is a finish entry alone."""

    request_id: RequestId
    attempt: int
    choice: int
    entries: tuple[LogEntry, ...]
    finish: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """`failed`: (request, attempt) that the model cannot compute; the engine holds them no longer. `work`: whose the
    step's time was, of those that have left meanwhile, too; empty without a clock."""

    entries: tuple[NewEntries, ...] = ()
    failed: tuple[tuple[RequestId, int], ...] = ()
    work: tuple[StepWork, ...] = ()


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
        is_chunking: prompts are cut to what a step has left; else a step takes whole ones, for which it must have room.
        max_step_s: a step in which some decode takes no more of prompts than fits into this time.
        clock: times steps, for `max_step_s`; None: nothing is known of their time.
        speculation: how drafts are made; None: there are none.
        prefix_key: of the names of prefixes.
        has_prefix_cache: requests find prefixes that others have computed.
        is_static: nobody is admitted while a batch runs, and who has ended stays in it as padding (`static_batch.py`).
        reserved_tokens: a sequence is admitted with blocks of its own for so many tokens, whatever it needs.
        window: most tokens that a query sees, itself among them: blocks before them are freed; 0: it sees all. Neither
            with `reserved_tokens` nor with `is_static`.
        host_memory: where blocks of those who give way may be kept; None: they compute again. Neither for a static
            batch, reserved memory nor a window.
        preemption_mode: of `shared/preemption.py`.
        max_adapters: most different adapters in one step; 0: no sequence has one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        is_chunking: bool = True,
        max_step_s: float = math.inf,
        clock: Clock | None = None,
        speculation: SpeculationConfig | None = None,
        prefix_key: bytes = b"",
        has_prefix_cache: bool = False,
        reserved_tokens: int = 0,
        is_static: bool = False,
        window: int = 0,
        host_memory: HostMemory | None = None,
        preemption_mode: str = "auto",
        max_adapters: int = 0,
    ) -> None:
        assert host_memory is None or not (is_static or reserved_tokens or window), "not where blocks are kept or freed"
        self._runner, self._clock, self._max_model_len = runner, clock, max_model_len
        self._in_flight: _Started | None = None
        kept = KvWindow(window, max_num_batched_tokens, runner.block_size)
        sizes = (runner.num_blocks, runner.block_size)
        self._cache = PrefixCache(*sizes, prefix_key, is_shared=has_prefix_cache, window=kept)
        self._pool = self._cache.pool
        self._num_resident = resident_tokens(window, max_num_batched_tokens)
        self._cost = StepCost(runner.key_cost, window)
        self._drafter = None if speculation is None else Drafter(
            speculation, cost=self._cost, pool=self._pool, max_model_len=max_model_len, max_step_s=max_step_s
        )  # fmt: skip
        self._swap = SwapSpace(host_memory, preemption_mode, self._cost, self._pool)
        self._planner = BatchPlanner(
            self._cache,
            self._swap,
            max_step_s=max_step_s if is_chunking else math.inf,
            is_chunking=is_chunking,
            reserved_tokens=reserved_tokens,
            static=StaticBatch() if is_static else None,
            cost=self._cost,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            forget=runner.forget,
            drafter=self._drafter, window=kept, max_adapters=max_adapters,
        )  # fmt: skip
        self._held: dict[RequestId, list[Sequence]] = {}
        self._has_anyone_left = False
        self._num_steps = self._num_preempted = self._num_failures_in_a_row = 0
        self._num_prompt_tokens = self._num_generation_tokens = self._num_padded_rows = 0

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
        if blocks_for(limit - 1, self._pool.block_size, self._num_resident) > self._pool.num_blocks:
            raise InvalidRequest(
                f"{limit} tokens of prompt and output do not fit the KV cache of "
                f"{self._pool.num_blocks * self._pool.block_size} tokens",
                code="context_length_exceeded",
            )
        self._held.setdefault(sequence.request_id, []).append(sequence)
        self._planner.add(sequence)

    def drop(self, request_id: RequestId, choice: int | None = None) -> bool:
        """Forget a request, or one choice of it; its blocks are free for the next plan. Whether it was held."""
        self._has_anyone_left = True
        dropped = [s for s in self._held.get(request_id, ()) if choice in (None, s.choice)]
        for sequence in dropped:
            self._remove(sequence)
        return bool(dropped)

    def preempt(self, request_id: RequestId, *, keeps: bool = False) -> bool:
        """As `drop`, counted: the scheduler wants the request elsewhere or later. With `keeps`, later: its sequences
        wait in here, those that run are set aside (`BatchPlanner`). Whether it was held."""
        held = self._held.get(request_id, [])
        if not keeps:
            self._num_preempted += len(held)
            return self.drop(request_id)
        self._has_anyone_left = True
        for sequence in [s for s in held if s.status is SequenceStatus.RUNNING]:
            self._num_preempted += 1
            self._planner.set_aside(sequence)
        return bool(held)

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
        except EngineBroken:
            raise
        except Exception as error:
            work = share_out(step.plan, self._cost, self._seconds_since(step))
            return replace(self._survive(step.plan, error), work=work)
        seconds = self._learn(step)
        gains = self._keep(step.plan, drawn)
        if goes_on is not None and ahead is not None and goes_on() and (rest := without_ended(ahead)).chunks:
            self._in_flight = self._start(rest)
        return StepOutput(tuple(map(_to_entries, gains)), work=share_out(step.plan, self._cost, seconds))

    def view(self) -> EngineView:
        """What the engine holds now, O(running sequences)."""
        running = dict.fromkeys(sequence.request_id for sequence in self._planner.running)
        running.update(dict.fromkeys(self._swap.request_ids))
        num_empty = sum(max(0, len(s.block_ids) * self._pool.block_size - s.num_known) for s in self._planner.running)
        drafter = self._drafter
        return EngineView(
            num_blocks=self._pool.num_blocks,
            block_size=self._pool.block_size,
            free_blocks=self._pool.num_free,
            most_blocks_used=self._pool.most_owned,
            num_running=len(self._planner.running),
            most_running=self._planner.most_running,
            num_waiting=len(self._planner.waiting),
            num_steps=self._num_steps,
            num_evictions=self.num_evictions,
            num_preemptions=self.num_evictions + self._num_preempted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_padded_rows=self._num_padded_rows,
            num_drafts=drafter.num_drafts if drafter is not None else 0,
            num_draft_tokens=drafter.num_draft_tokens if drafter is not None else 0,
            num_accepted_tokens=drafter.num_accepted_tokens if drafter is not None else 0,
            num_prefix_queries=self._cache.num_queried_tokens,
            num_prefix_hits=self._cache.num_hit_tokens,
            num_live_tokens=(self._pool.num_blocks - self._pool.num_free) * self._pool.block_size - num_empty,
            num_held=len(self._held),
            num_swap_preemptions=self._swap.num_sequences,
            free_swap_blocks=self._swap.num_free,
            num_swapped_out=self._swap.num_copied_out,
            num_swapped_in=self._swap.num_copied_back,
            block_copy_s=self._swap.block_copy_s,
            token_s=self._cost.unit_s,
            running={request_id: describe(self._held[request_id], self._swap, self._pool) for request_id in running},
        )

    def take_prefix_changes(self) -> list[tuple[bytes, bool]]:
        """Names of prefixes that can be found (True) or not any more, since the last call."""
        return self._cache.take_changes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, queues and requests agree."""
        self._planner.check_integrity()
        held = [s for sequences in self._held.values() for s in sequences]
        assert len(held) == len(self._planner.running) + len(self._planner.waiting)
        assert all(s.status is not SequenceStatus.ENDED for s in held)

    def _start(self, plan: BatchPlan) -> _Started:
        """Start a step, behind all copies that were noted; if it fails, finishing it does."""
        self._copy()
        self._has_anyone_left = False
        started_at = 0.0 if self._clock is None else self._clock.now()
        try:
            self._runner.start(plan)
        except Exception as error:
            return _Started(plan, started_at, error)
        return _Started(plan, started_at)

    def _copy(self, *, is_computing: bool = False) -> None:
        """Make the copies that were noted, of those that may be made meanwhile while a step `is_computing`."""
        try:
            self._swap.copy(is_computing=is_computing, may_bring_back=not self._has_anyone_left)
        except Exception as error:
            raise EngineBroken(f"blocks can't be copied from or to host memory ({type(error).__name__})") from error

    def _finish(self, step: _Started) -> list[DrawnToken]:
        """What the step drew."""
        if step.error is not None:
            raise step.error
        return self._runner.finish()

    def _learn(self, step: _Started) -> float:
        """Learn what a step cost that is over now; its seconds."""
        seconds = self._seconds_since(step)
        if self._clock is not None:
            units = sum(self._cost.units(chunk.start, chunk.num_rows) for chunk in step.plan.chunks)
            self._cost.observe(units, seconds)
        return seconds

    def _seconds_since(self, step: _Started) -> float:
        """Since the start of a step; 0 without a clock."""
        return 0.0 if self._clock is None else self._clock.now() - step.at

    def _prepare(self, plan: BatchPlan) -> BatchPlan | None:
        """Make the step behind `plan`, which computes, ready; None when it must be planned afterwards. So are all that
        may have drafts: what to try depends on the tokens that are being drawn. And one behind a step whose sequences
        were set aside meanwhile: back again, they would seem to be those that it computes."""
        has_set_aside = any(chunk.sequence.status is SequenceStatus.WAITING for chunk in plan.chunks)
        ahead = None if has_set_aside or self._drafter is not None else self._plan_ahead(plan)
        self._copy(is_computing=True)
        return ahead

    def _plan_ahead(self, plan: BatchPlan) -> BatchPlan | None:
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
            self._num_padded_rows += chunk.is_padding
            if chunk.is_padding or not is_living(chunk):
                self._runner.forget(chunk.sequence)  # it may have been given a row again when its token was drawn
                continue
            chunk.sequence.num_computed += chunk.length
            self._cache.note_computed(chunk.sequence)
            if tokens:
                gains.append(self._append(chunk.sequence, self._verify(chunk, tokens)))
            if chunk.sequence.status is SequenceStatus.RUNNING:
                self._planner.release(chunk.sequence)
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
        if sequence.is_pooled:
            self._remove(sequence)
            return sequence, tokens[:1], "stop"
        finish, num_gained = "", 0
        for token in tokens:
            sequence.token_ids.append(token.token_id)
            num_gained += 1
            finish = finish_reason(sequence, self._max_model_len)
            if finish:
                break
        sequence.num_computed += num_gained - 1
        self._cache.note_computed(sequence)
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
        suspects = [c.sequence for c in plan.chunks if c.sequence.status is SequenceStatus.RUNNING]
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
            self._planner.evict(sequence, is_intact=False)


def _to_entries(gain: _Gain) -> NewEntries:
    sequence, tokens, finish = gain
    if sequence.is_pooled:
        ended = FinishEntry(sequence.choice, finish, tokens[0].embedding)
        return NewEntries(sequence.request_id, sequence.attempt, sequence.choice, (ended,), finish)
    num_cached = sequence.num_cached or 0
    entries: tuple[LogEntry, ...] = tuple(
        TokenEntry(sequence.choice, t.token_id, t.logprobs, 0 if sequence.num_output > len(tokens) or i else num_cached)
        for i, t in enumerate(tokens)
    )
    if finish:
        entries += (FinishEntry(sequence.choice, finish),)
    return NewEntries(sequence.request_id, sequence.attempt, sequence.choice, entries, finish)

"""A worker as the scheduler sees one: blocks, slots, steps and reports, without a model.

It follows the engine's contract: sequences enter in order (priority, rank, choice) when blocks and a slot are free,
leaving one for each that runs; each running one gains a token a step once its known tokens are computed, and at the
wall the last in order loses its blocks and waits again. What is computed in blocks that somebody loses is copied to
host memory, if that is the cheaper way (`shared/preemption.py`) or the scheduler keeps it, and there is room. One that
the scheduler keeps does not come back at once. Beginnings of prompts are found in `simulated_prefix_cache.py`.

Steps are made in *runs* (`simulated_run.py`): one step, or as many equal ones as pass before anything happens. Between
two calls of `advance` the worker shows its state at the last of them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from scheduler_svc.policy.state import entry_key
from scheduler_svc.simulated_prefix_cache import Names, SimulatedPrefixCache
from scheduler_svc.simulated_run import Run
from scheduler_svc.simulation_trace import CostModel
from shared.capacity import blocks_for
from shared.ids import EntryId, RequestId
from shared.messages import AbortRequest, HeldRequest, PreemptRequest, RunRequest, WorkerHello, WorkerReport
from shared.preemption import MAX_PLANS_ASIDE, is_swapped

InboxMessage = RunRequest | PreemptRequest | AbortRequest
_ORDER = attrgetter("order")


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """One choice inside a worker; `end` is the number of known tokens at which it ends by itself.

    `order` is (priority, rank, choice). `is_decoding`: its blocks hold all of its known tokens but the newest, which it
    has drawn. Of its `num_blocks` the first ones are those of its `prefix`, which it uses with others; it found
    `num_found` of them. The next `num_shared` are a running sibling's, which computes what is in them of the
    `num_prompt` tokens. `num_swapped` blocks with all it has computed lie in host memory while it waits.
    `aside_until`: it leaves its place to others until the worker has planned so many steps.
    """

    request_id: RequestId
    attempt: int
    choice: int
    order: tuple[int, int, int]
    num_prompt: int
    num_known: int
    end: int
    num_computed: int = 0
    num_blocks: int = 0
    prefix: Names = ()
    num_found: int = 0
    num_shared: int = 0
    num_swapped: int = 0
    aside_until: int = 0
    is_decoding: bool = False


Chunks = list[tuple[SimulatedSequence, int]]


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Mutable state of one incarnation. `is_alive` False: it does and says nothing more.

    `running` and `waiting` are kept in order. `inbox` holds (seconds at which it arrives, entry, message). `chunks` is
    the plan of each step of `run`; `num_runs` tells the end of a run that was cut short from the one that replaced it.
    `copied` blocks went out and in since the last step began.
    """

    hello: WorkerHello
    index: int = 0
    cost: CostModel = field(default_factory=CostModel)
    max_num_batched_tokens: int = 512
    is_alive: bool = True
    is_draining: bool = False
    beat: int = 0
    num_steps: int = 0
    num_evictions: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    copied: tuple[int, int] = (0, 0)
    report_seq: int = 0
    evicted_after_report: int = -1
    last_inbox_id: str = "0-0"
    reported_at_s: float = 0.0
    reported_free: int = 0
    is_calm: bool = False
    has_changed: bool = False
    free_blocks: int = 0
    free_swap_blocks: int = 0
    running: list[SimulatedSequence] = field(default_factory=list)
    waiting: list[SimulatedSequence] = field(default_factory=list)
    inbox: deque[tuple[float, EntryId, InboxMessage]] = field(default_factory=deque)
    run: Run | None = None
    chunks: Chunks = field(default_factory=list)
    num_runs: int = 0
    cache: SimulatedPrefixCache | None = None

    def __post_init__(self) -> None:
        if self.hello.has_prefix_cache:
            self.cache = SimulatedPrefixCache(self.hello.block_size)
        self.free_blocks = self.hello.num_blocks
        self.free_swap_blocks = self.hello.num_swap_blocks

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def holds(self, request_id: RequestId) -> bool:
        return any(s.request_id == request_id for s in (*self.running, *self.waiting))

    def is_void(self, preempt: PreemptRequest) -> bool:
        """Whether it evicted by itself after the report that `preempt` is based on."""
        return self.evicted_after_report >= preempt.report_seq

    def mark_applied(self, entry_id: EntryId) -> None:
        """Entries are applied in order."""
        assert entry_key(entry_id) > entry_key(self.last_inbox_id)
        self.last_inbox_id = entry_id
        self.has_changed = True

    def add(self, sequence: SimulatedSequence) -> None:
        """Let `sequence` wait for blocks and a slot."""
        insort(self.waiting, sequence, key=_ORDER)

    def drop(self, request_id: RequestId) -> None:
        """Free everything of a request."""
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self.finish(sequence)
        for sequence in [s for s in self.waiting if s.request_id == request_id]:
            self.free_swap_blocks += sequence.num_swapped
            self.waiting.remove(sequence)

    def keep(self, request_id: RequestId) -> None:
        """The scheduler has a request give way and stay."""
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self._put_aside(sequence, "swap")
            sequence.aside_until = self.num_steps + MAX_PLANS_ASIDE

    def finish(self, sequence: SimulatedSequence) -> None:
        """A running sequence leaves for good: nobody has to stay aside any more."""
        self._vacate(sequence)
        for waiting in self.waiting:
            waiting.aside_until = 0

    def _vacate(self, sequence: SimulatedSequence) -> None:
        self.running.remove(sequence)
        num_left = len(sequence.prefix) + sequence.num_shared
        if not sequence.num_shared and (heir := next(self._siblings(sequence), None)) is not None:
            num_left += heir.num_shared
            heir.num_shared = 0
        self.free_blocks += sequence.num_blocks - num_left
        if self.cache is not None:
            num_full = sequence.num_computed // self.hello.block_size
            self.free_blocks += self.cache.leave(sequence, num_full - num_left, self.running)
        sequence.num_shared = 0
        self.has_changed = True

    def _take(self, num_blocks: int) -> None:
        """Give out free blocks; what could be found in them is forgotten."""
        self.free_blocks -= num_blocks
        if self.cache is not None:
            self.cache.trim(self.free_blocks)

    def _siblings(self, sequence: SimulatedSequence) -> Iterator[SimulatedSequence]:
        """Running choices of the same request."""
        return (s for s in self.running if s.request_id == sequence.request_id)

    def _shareable(self, sequence: SimulatedSequence) -> int:
        """Blocks of its prompt, behind its prefix, that choices have between them: each computes its last token."""
        return (sequence.num_prompt - 1) // self.hello.block_size - len(sequence.prefix)

    # Steps.

    @property
    def num_steps_aside(self) -> int:
        """Steps for which the first that waits still leaves its place to others; 0: it does not."""
        if not self.running or not self.waiting:
            return 0
        return max(0, self.waiting[0].aside_until - self.num_steps - 1)

    def admit(self) -> list[SimulatedSequence]:
        """Let waiting ones run, in order, while blocks and slots last; those that now do."""
        admitted = []
        while self.waiting and len(self.running) < self.hello.max_num_seqs and not self.num_steps_aside:
            sequence = self.waiting[0]
            needed = blocks_for(sequence.num_known, self.hello.block_size)
            num_shared = self._shareable(sequence) if next(self._siblings(sequence), None) is not None else 0
            missing = needed - num_shared - (self.cache.num_in_use(sequence.prefix) if self.cache is not None else 0)
            if missing + len(self.running) > self.free_blocks:
                break
            self._bring_back(sequence)
            if self.cache is not None:
                self.cache.enter(sequence)
            self._take(missing)
            sequence.num_blocks, sequence.num_shared, sequence.aside_until = needed, num_shared, 0
            admitted.append(self.waiting.pop(0))
            insort(self.running, sequence, key=_ORDER)
        return admitted

    def plan(self) -> Chunks:
        """The next step: (sequence, tokens to compute), at most `max_num_batched_tokens` in all; takes the blocks.
        Those that decode come first, then prompts, each in order."""
        budget, chunks = self.max_num_batched_tokens, Chunks()
        for is_decoding in (True, False):
            for sequence in [s for s in self.running if s.is_decoding is is_decoding]:
                if budget > 0 and self._is_ready(sequence, chunks) and self._cover(sequence):
                    length = min(budget, sequence.num_known - sequence.num_computed)
                    budget -= length
                    chunks.append((sequence, length))
        return [chunk for chunk in chunks if chunk[0].num_blocks > 0]

    def _is_ready(self, sequence: SimulatedSequence, chunks: Chunks) -> bool:
        """Whether what it shares is computed, a prefix with the step of `chunks` at the latest; then it goes on behind
        that."""
        if self.cache is not None and not self.cache.is_ready(sequence, chunks):
            return False
        if not sequence.num_shared:
            return True
        end = (len(sequence.prefix) + sequence.num_shared) * self.hello.block_size
        if sequence.num_computed < end:
            owner = next(s for s in self._siblings(sequence) if not s.num_shared)
            if owner.num_computed < end:
                return False
            sequence.num_computed = end
        return True

    def _cover(self, sequence: SimulatedSequence) -> bool:
        """Give `sequence` blocks for all it knows; False if it is itself the one that must wait."""
        while sequence.num_blocks > 0:
            missing = blocks_for(sequence.num_known, self.hello.block_size) - sequence.num_blocks
            if missing <= self.free_blocks:
                sequence.num_blocks += missing
                self._take(missing)
                return True
            self._evict(self.running[-1])
        return False

    def _evict(self, sequence: SimulatedSequence) -> None:
        self._put_aside(sequence, self.hello.preemption_mode)
        self.num_evictions += 1
        self.evicted_after_report = self.report_seq

    def _put_aside(self, sequence: SimulatedSequence, mode: str) -> None:
        """Take a running sequence's blocks; it waits in its place."""
        size, num_prefix = self.hello.block_size, len(sequence.prefix)
        num_computed_in = max(0, blocks_for(sequence.num_computed, size) - num_prefix)
        self._vacate(sequence)
        sequence.num_blocks = 0
        if is_swapped(
            mode,
            num_blocks=num_computed_in,
            num_tokens=sequence.num_computed - num_prefix * size,
            free_swap_blocks=self.free_swap_blocks,
            block_copy_s=self.cost.block_copy_s,
            token_s=self.cost.token_s,
        ):
            sequence.num_swapped = num_computed_in
            self._copy(num_computed_in, 0)
        else:
            sequence.num_computed, sequence.is_decoding = 0, False
        self.add(sequence)

    def _bring_back(self, sequence: SimulatedSequence) -> None:
        """Have what lies in host memory copied back; it is of no use if what stands before it has been forgotten."""
        if self.cache is None or self.cache.is_computed(sequence.prefix):
            self._copy(0, sequence.num_swapped)
        elif sequence.num_swapped:
            self.free_swap_blocks += sequence.num_swapped
            sequence.num_computed, sequence.is_decoding = 0, False
        sequence.num_swapped = 0

    def _copy(self, num_out: int, num_in: int) -> None:
        """Copy so many blocks to host memory, and back."""
        self.free_swap_blocks += num_in - num_out
        self.num_swapped_out += num_out
        self.num_swapped_in += num_in
        self.copied = self.copied[0] + num_out, self.copied[1] + num_in

    def take_copied(self) -> tuple[int, int]:
        """Blocks that were copied out and in since the last call; they hold up the step that begins."""
        copied, self.copied = self.copied, (0, 0)
        return copied

    def advance(self, num_steps: int, note: Callable[[SimulatedSequence, int], None]) -> None:
        """`num_steps` equal steps of a run have passed, and the next one has begun: each sequence has gained as many
        tokens, and has the blocks for the step that computes the last of them.

        Args:
            note: told of each sequence and the tokens that it gained.
        """
        if num_steps == 0:
            return
        self.num_steps += num_steps
        for sequence in self.running:
            sequence.num_known += num_steps
            sequence.num_computed += num_steps
            num_blocks = blocks_for(sequence.num_known, self.hello.block_size)
            self.free_blocks -= num_blocks - sequence.num_blocks
            sequence.num_blocks = num_blocks
            note(sequence, num_steps)
        self._take(0)

    # Reports.

    def report(self, now: float) -> WorkerReport:
        """The next report, made at `now` seconds."""
        self.report_seq += 1
        self.reported_at_s, self.reported_free = now, self.free_blocks
        self.is_calm, self.has_changed = bool(self.running) and not self.waiting, False
        here, gone = (b"", b"") if self.cache is None else self.cache.journal.take()
        return WorkerReport(
            worker_id=self.hello.worker_id,
            seq=self.report_seq,
            last_inbox_id=self.last_inbox_id,
            free_blocks=self.free_blocks,
            num_blocks=self.hello.num_blocks,
            num_steps=self.num_steps,
            held=self._held(),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_evictions=self.num_evictions,
            free_swap_blocks=self.free_swap_blocks,
            num_swapped_out=self.num_swapped_out,
            num_swapped_in=self.num_swapped_in,
            block_copy_s=self.cost.block_copy_s,
            token_s=self.cost.token_s,
            prefixes_here=here,
            prefixes_gone=gone,
            is_draining=self.is_draining,
        )

    def _num_others_use(self, sequence: SimulatedSequence) -> int:
        """Blocks that it found and others use, too."""
        return sequence.num_found if self.cache is not None and self.cache.is_shared(sequence.prefix) else 0

    def _held(self) -> tuple[HeldRequest, ...]:
        by_request: dict[tuple[RequestId, int], list[int]] = {}
        for is_running, sequences in ((1, self.running), (0, self.waiting)):
            for sequence in sequences:
                sums = by_request.setdefault((sequence.request_id, sequence.attempt), [0, 0, 0, 0, 0, 0])
                sums[0] += sequence.num_blocks
                sums[1] += sequence.num_known
                sums[2] += is_running
                sums[3] += 1 - is_running
                sums[4] += sequence.num_swapped
                sums[5] += sequence.num_shared + (self._num_others_use(sequence) if is_running else 0)
        return tuple(
            HeldRequest(
                request_id=request_id,
                attempt=attempt,
                num_blocks=sums[0],
                num_tokens=sums[1],
                num_running=sums[2],
                num_waiting=sums[3],
                num_swapped_blocks=sums[4],
                num_shared_blocks=sums[5],
            )
            for (request_id, attempt), sums in by_request.items()
        )

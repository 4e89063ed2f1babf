"""A worker as the scheduler sees one: blocks, slots, steps and reports, without a model.

It follows the engine's contract: sequences enter in rank order when blocks and a slot are free, each running one gains
a token a step once its known tokens are computed, and at the wall the highest rank loses its blocks and waits again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.policy.state import entry_key
from shared.capacity import blocks_for
from shared.ids import EntryId, RequestId
from shared.messages import AbortRequest, HeldRequest, PreemptRequest, RunRequest, WorkerHello, WorkerReport


@dataclass(slots=True)
class SimulatedSequence:
    """One choice inside a worker; `end` is the number of known tokens at which it ends by itself."""

    request_id: RequestId
    attempt: int
    choice: int
    rank: int
    num_known: int
    end: int
    num_computed: int = 0
    num_blocks: int = 0
    is_running: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, self.choice


@dataclass(slots=True)
class SimulatedWorker:
    """Mutable state of one incarnation. `is_alive` False: it does and says nothing more."""

    hello: WorkerHello
    max_num_batched_tokens: int = 64
    is_alive: bool = True
    is_stepping: bool = False
    beat: int = 0
    num_steps: int = 0
    num_evictions: int = 0
    report_seq: int = 0
    evicted_after_report: int = -1
    last_inbox_id: str = "0-0"
    sequences: list[SimulatedSequence] = field(default_factory=list)
    inbox: list[tuple[EntryId, RunRequest | PreemptRequest | AbortRequest]] = field(default_factory=list)

    @property
    def free_blocks(self) -> int:
        return self.hello.num_blocks - sum(s.num_blocks for s in self.sequences)

    def holds(self, request_id: RequestId) -> bool:
        return any(s.request_id == request_id for s in self.sequences)

    def drop(self, request_id: RequestId) -> None:
        """Free everything of a request."""
        self.sequences = [s for s in self.sequences if s.request_id != request_id]

    def is_void(self, preempt: PreemptRequest) -> bool:
        """Whether it evicted by itself after the report that `preempt` is based on."""
        return self.evicted_after_report >= preempt.report_seq

    def mark_applied(self, entry_id: EntryId) -> None:
        """Entries are applied in order."""
        assert entry_key(entry_id) > entry_key(self.last_inbox_id)
        self.last_inbox_id = entry_id

    def plan(self) -> list[tuple[SimulatedSequence, int]]:
        """The next step: (sequence, tokens to compute), at most `max_num_batched_tokens` in all; takes the blocks."""
        self._admit()
        budget, chunks = self.max_num_batched_tokens, []
        for sequence in sorted(self.sequences, key=lambda s: s.order):
            if sequence.is_running and budget > 0:
                length = min(budget, sequence.num_known - sequence.num_computed)
                if self._cover(sequence, sequence.num_computed + length):
                    budget -= length
                    chunks.append((sequence, length))
        return [(sequence, length) for sequence, length in chunks if sequence.is_running]

    def _admit(self) -> None:
        free = self.free_blocks
        slots = self.hello.max_num_seqs - sum(s.is_running for s in self.sequences)
        for sequence in sorted((s for s in self.sequences if not s.is_running), key=lambda s: s.order):
            needed = blocks_for(sequence.num_known, self.hello.block_size)
            if slots <= 0 or needed > free:
                break
            sequence.is_running, sequence.num_blocks = True, needed
            free, slots = free - needed, slots - 1

    def _cover(self, sequence: SimulatedSequence, num_tokens: int) -> bool:
        """Give `sequence` blocks for `num_tokens`; False if it is itself the one that must wait."""
        while sequence.is_running:
            missing = blocks_for(num_tokens, self.hello.block_size) - sequence.num_blocks
            if missing <= self.free_blocks:
                sequence.num_blocks += max(0, missing)
                return True
            self._evict(max((s for s in self.sequences if s.is_running), key=lambda s: s.order))
        return False

    def _evict(self, sequence: SimulatedSequence) -> None:
        sequence.is_running, sequence.num_blocks, sequence.num_computed = False, 0, 0
        self.num_evictions += 1
        self.evicted_after_report = self.report_seq

    def report(self) -> WorkerReport:
        """The next report."""
        self.report_seq += 1
        by_request: dict[tuple[RequestId, int], list[SimulatedSequence]] = {}
        for sequence in self.sequences:
            by_request.setdefault((sequence.request_id, sequence.attempt), []).append(sequence)
        return WorkerReport(
            worker_id=self.hello.worker_id,
            seq=self.report_seq,
            last_inbox_id=self.last_inbox_id,
            free_blocks=self.free_blocks,
            num_blocks=self.hello.num_blocks,
            num_steps=self.num_steps,
            held=tuple(_held(*key, sequences) for key, sequences in by_request.items()),
            num_evictions=self.num_evictions,
        )


def _held(request_id: RequestId, attempt: int, sequences: list[SimulatedSequence]) -> HeldRequest:
    num_running = sum(s.is_running for s in sequences)
    return HeldRequest(
        request_id=request_id,
        attempt=attempt,
        num_blocks=sum(s.num_blocks for s in sequences),
        num_tokens=sum(s.num_known for s in sequences),
        num_running=num_running,
        num_waiting=len(sequences) - num_running,
    )

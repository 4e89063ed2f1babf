"""The bus of a simulation: records and inboxes with the scripts' rules, without messages' bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.decisions import Dispatch
from scheduler_svc.simulated_worker import SimulatedWorker
from scheduler_svc.simulation_trace import Party, party_of
from shared.bus import ChoiceState, DispatchAnswer, DispatchOutcome, RequestRecord, RequestState, WorkerPulse
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.messages import RequestEnded, RunRequest, SubmitRequest

GATEWAY = GatewayId("gateway:0")
_LISTENERS = ((GATEWAY, ConnectionId("c")),)
_OPEN = ChoiceState()


@dataclass(slots=True, eq=False)
class SimulatedRecord:
    """The record of a request, changed in place; `num_tokens` and `is_done` have one item a choice."""

    summary: SubmitRequest
    order: tuple[int, int]
    num_tokens: list[int]
    is_done: list[bool]
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    owner: WorkerId | None = None
    preemptions: int = 0
    crashes: int = 0
    ended: RequestEnded | None = None

    @property
    def choices(self) -> tuple[ChoiceState, ...]:
        return tuple(
            ChoiceState(num_entries=count + is_done, finish="stop" if is_done else "") if count else _OPEN
            for count, is_done in zip(self.num_tokens, self.is_done, strict=True)
        )

    def snapshot(self) -> RequestRecord:
        """The record as the scheduler reads it now."""
        return RequestRecord(
            summary=self.summary,
            state=self.state,
            order=self.order,
            attempt=self.attempt,
            owner=self.owner,
            listeners=_LISTENERS,
            orphan_ttl_s=0.0,
            preemptions=self.preemptions,
            crashes=self.crashes,
            choices=self.choices,
            ended=self.ended,
        )


@dataclass(slots=True)
class SimulatedCell:
    """`live` and the records, and the workers that have said hello.

    `num_queued` counts requests that wait for a dispatch, by tenant and class.
    """

    records: dict[RequestId, SimulatedRecord] = field(default_factory=dict)
    workers: dict[WorkerId, SimulatedWorker] = field(default_factory=dict)
    num_queued: Counter[Party] = field(default_factory=Counter)
    num_entries: int = 0
    _live: dict[RequestId, None] = field(default_factory=dict)

    @property
    def live(self) -> set[RequestId]:
        return set(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def list_live(self) -> tuple[RequestId, ...]:
        """`live` in the order of arrival."""
        return tuple(self._live)

    def submit(self, summary: SubmitRequest, order: int) -> None:
        self._live[summary.request_id] = None
        count = summary.num_choices
        self.records[summary.request_id] = SimulatedRecord(summary, (order, 0), [0] * count, [False] * count)
        self.num_queued[party_of(summary)] += 1

    def observe(self, request_ids: Iterable[RequestId]) -> tuple[RequestRecord, ...]:
        """Copies of these records."""
        return tuple(self.records[request_id].snapshot() for request_id in request_ids)

    def pulses(self) -> tuple[WorkerPulse, ...]:
        """The `workers` hash. Dead workers stay in it until they are requeued."""
        return tuple(
            WorkerPulse(hello=w.hello, beat=w.beat, num_steps=w.num_steps, has_work=w.has_work)
            for w in self.workers.values()
        )

    def dispatch(self, decision: Dispatch) -> tuple[DispatchOutcome, RunRequest | None]:
        """The script's answer and, if it ran, the message for the worker's inbox."""
        request_id, worker_id = decision.request_id, decision.worker_id
        record = self.records[request_id]
        if record.state is not RequestState.QUEUED:
            is_ended = record.state is RequestState.ENDED
            return DispatchOutcome(DispatchAnswer.ENDED if is_ended else DispatchAnswer.NOT_QUEUED), None
        if worker_id not in self.workers:
            return DispatchOutcome(DispatchAnswer.NO_WORKER), None
        record.state, record.owner = RequestState.RUNNING, worker_id
        record.attempt += 1
        self.num_queued[party_of(record.summary)] -= 1
        message = RunRequest(
            request_id=request_id,
            attempt=record.attempt,
            choices=tuple(c for c, is_done in enumerate(record.is_done) if not is_done),
            rank=decision.rank,
            crashes=record.crashes,
            priority=decision.priority,
        )
        return DispatchOutcome(DispatchAnswer.OK, self.new_entry_id(), record.attempt), message

    def new_entry_id(self) -> EntryId:
        self.num_entries += 1
        return EntryId(f"1-{self.num_entries}")

    def is_owner(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> bool:
        record = self.records[request_id]
        return record.owner == worker_id and record.attempt == attempt and record.state is RequestState.RUNNING

    def commit(self, request_id: RequestId, choice: int, *, is_last: bool) -> bool:
        """One more token of `choice`; whether that ended the request."""
        record = self.records[request_id]
        record.num_tokens[choice] += 1
        record.crashes = 0
        if is_last:
            record.is_done[choice] = True
        return is_last and all(record.is_done) and self.end(request_id, "finished")

    def end(self, request_id: RequestId, reason: str) -> bool:
        """Whether this call ended it."""
        record = self.records[request_id]
        if record.state is RequestState.ENDED:
            return False
        if record.state is RequestState.QUEUED:
            self.num_queued[party_of(record.summary)] -= 1
        record.ended = RequestEnded(request_id=request_id, reason=reason)
        record.state, record.owner = RequestState.ENDED, None
        del self._live[request_id]
        return True

    def queue_again(
        self, request_id: RequestId, owner: WorkerId, attempt: int, *, preempted: int, crashed: int
    ) -> bool:
        """Release and requeue: running → queued, attempt and order kept."""
        if not self.is_owner(owner, request_id, attempt):
            return False
        record = self.records[request_id]
        record.state, record.owner = RequestState.QUEUED, None
        record.preemptions += preempted
        record.crashes += crashed if record.crashes == 0 else 0
        self.num_queued[party_of(record.summary)] += 1
        return True

    def requeue(self, worker_id: WorkerId) -> SimulatedWorker | None:
        """All that a lost worker owns is queued again; the worker, if it was in the hash."""
        lost = self.workers.pop(worker_id, None)
        for request_id in self._live:
            record = self.records[request_id]
            if record.owner == worker_id:
                self.queue_again(request_id, worker_id, record.attempt, preempted=0, crashed=1)
        return lost

"""The bus of a simulation: records and inboxes with the scripts' rules, without messages' bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from scheduler_svc.simulated_worker import SimulatedWorker
from shared.bus import ChoiceState, DispatchAnswer, DispatchOutcome, RequestRecord, RequestState, WorkerPulse
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.messages import AbortRequest, PreemptRequest, RequestEnded, RunRequest, SubmitRequest

GATEWAY = GatewayId("gateway:0")


@dataclass(slots=True)
class SimulatedCell:
    """`live` and the records, and the workers that have said hello."""

    records: dict[RequestId, RequestRecord] = field(default_factory=dict)
    live: set[RequestId] = field(default_factory=set)
    workers: dict[WorkerId, SimulatedWorker] = field(default_factory=dict)
    num_entries: int = 0

    def submit(self, summary: SubmitRequest, order: int) -> None:
        self.live.add(summary.request_id)
        self.records[summary.request_id] = RequestRecord(
            summary=summary,
            state=RequestState.QUEUED,
            order=(order, 0),
            attempt=0,
            owner=None,
            listeners=((GATEWAY, ConnectionId("c")),),
            orphan_ttl_s=0.0,
            preemptions=0,
            crashes=0,
            choices=tuple(ChoiceState() for _ in range(summary.num_choices)),
        )

    def pulses(self) -> tuple[WorkerPulse, ...]:
        """The `workers` hash. Dead workers stay in it until they are requeued."""
        return tuple(
            WorkerPulse(hello=w.hello, beat=w.beat, num_steps=w.num_steps, has_work=bool(w.sequences))
            for w in self.workers.values()
        )

    def dispatch(self, request_id: RequestId, worker_id: WorkerId, rank: int) -> DispatchOutcome:
        record = self.records[request_id]
        if record.state is not RequestState.QUEUED:
            is_ended = record.state is RequestState.ENDED
            return DispatchOutcome(DispatchAnswer.ENDED if is_ended else DispatchAnswer.NOT_QUEUED)
        if worker_id not in self.workers:
            return DispatchOutcome(DispatchAnswer.NO_WORKER)
        record = replace(record, state=RequestState.RUNNING, attempt=record.attempt + 1, owner=worker_id)
        self.records[request_id] = record
        choices = tuple(c for c, state in enumerate(record.choices) if state.is_open)
        message = RunRequest(
            request_id=request_id, attempt=record.attempt, choices=choices, rank=rank, crashes=record.crashes
        )
        return DispatchOutcome(DispatchAnswer.OK, self.send(worker_id, message), record.attempt)

    def send(self, worker_id: WorkerId, message: RunRequest | PreemptRequest | AbortRequest) -> EntryId:
        self.num_entries += 1
        entry_id = EntryId(f"1-{self.num_entries}")
        if worker_id in self.workers:
            self.workers[worker_id].inbox.append((entry_id, message))
        return entry_id

    def is_owner(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> bool:
        record = self.records[request_id]
        return record.state is RequestState.RUNNING and (record.owner, record.attempt) == (worker_id, attempt)

    def commit(self, request_id: RequestId, choice: int, *, is_last: bool) -> bool:
        """One more token of `choice`; whether that ended the request."""
        record = self.records[request_id]
        state = record.choices[choice]
        state = replace(state, num_entries=state.num_entries + 1 + is_last, finish="stop" if is_last else "")
        choices = (*record.choices[:choice], state, *record.choices[choice + 1 :])
        self.records[request_id] = replace(record, choices=choices, crashes=0)
        return all(not c.is_open for c in choices) and self.end(request_id, "finished")

    def end(self, request_id: RequestId, reason: str) -> bool:
        record = self.records[request_id]
        if record.state is RequestState.ENDED:
            return False
        ended = RequestEnded(request_id=request_id, reason=reason)
        self.records[request_id] = replace(record, state=RequestState.ENDED, owner=None, ended=ended)
        self.live.discard(request_id)
        if record.owner is not None:
            self.send(record.owner, AbortRequest(request_id=request_id))
        return True

    def queue_again(
        self, request_id: RequestId, owner: WorkerId, attempt: int, *, preempted: int, crashed: int
    ) -> bool:
        """Release and requeue: running → queued, attempt and order kept."""
        if not self.is_owner(owner, request_id, attempt):
            return False
        record = self.records[request_id]
        self.records[request_id] = replace(
            record,
            state=RequestState.QUEUED,
            owner=None,
            preemptions=record.preemptions + preempted,
            crashes=record.crashes + (crashed if record.crashes == 0 else 0),
        )
        return True

    def requeue(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        for request_id in self.live:
            record = self.records[request_id]
            if record.owner == worker_id:
                self.queue_again(request_id, worker_id, record.attempt, preempted=0, crashed=1)

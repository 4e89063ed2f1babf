"""Runs the very policy of the service against simulated workers: a heap of timed events and a cost model.

    result = Simulation(requests, workers).run(until_s=60)

Delays of reports and inboxes, deaths and restarts of workers, cancels and changes of leader are part of the trace, so
a property test can make thousands of cells in seconds and a recorded trace can be replayed with other settings. There
is no randomness here; equal inputs give equal results.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from scheduler_svc.simulated_cell import GATEWAY, SimulatedCell
from scheduler_svc.simulated_worker import SimulatedSequence, SimulatedWorker
from shared.bus import DispatchAnswer
from shared.ids import RequestId, WorkerId
from shared.messages import PreemptRequest, RunRequest, SubmitRequest, WorkerHello

FINGERPRINT = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRequest:
    """One arrival. `output_len` tokens end each choice by itself (at most `max_tokens`)."""

    arrival_s: float
    prompt_len: int
    max_tokens: int
    output_len: int
    n: int = 1
    cancel_s: float | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorkerSpec:
    """One worker start, and maybe its death (as by kill -9)."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 8
    start_s: float = 0.0
    death_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds: a step takes `step_s` + `token_s` for each of its tokens; messages are under way for a delay."""

    step_s: float = 0.02
    token_s: float = 0.001
    report_delay_s: float = 0.005
    inbox_delay_s: float = 0.002
    idle_report_s: float = 0.1


@dataclass(slots=True)
class SimulationResult:
    """What happened. Times are seconds of the simulation; `dispatched` holds (request, worker) in order."""

    ended: dict[RequestId, str] = field(default_factory=dict)
    first_token_s: dict[RequestId, float] = field(default_factory=dict)
    end_s: dict[RequestId, float] = field(default_factory=dict)
    dispatched: list[tuple[RequestId, WorkerId]] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    num_evictions: int = 0
    num_steps: int = 0


class Simulation:
    """One run.

    Args:
        leader_changes_s: when a new leader, with an empty policy, takes over.
        on_decisions: called with each batch of decisions before they are carried out; for checks.
    """

    def __init__(
        self,
        requests: list[SimulatedRequest],
        workers: list[SimulatedWorkerSpec],
        *,
        config: PolicyConfig | None = None,
        cost: CostModel | None = None,
        leader_changes_s: tuple[float, ...] = (),
        on_decisions: Callable[[Simulation, d.Event, list[d.Decision]], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.cell = SimulatedCell()
        self.result = SimulationResult()
        self.config = config or PolicyConfig()
        self.policy = Policy(self.config)
        self._cost = cost or CostModel()
        self._on_decisions = on_decisions
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._requests: dict[RequestId, SimulatedRequest] = {}
        for index, spec in enumerate(workers):
            self._at(spec.start_s, lambda i=index, s=spec: self._start_worker(i, s))  # type: ignore[misc]
        for index, request in enumerate(requests):
            self._at(request.arrival_s, lambda i=index, r=request: self._arrive(i, r))  # type: ignore[misc]
        for change_s in leader_changes_s:
            self._at(change_s, self._take_over)
        self._at(0.0, self._scan)

    def run(self, until_s: float) -> SimulationResult:
        """Run until `until_s`; may be called again with a later time."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until_s
        return self.result

    def feed(self, event: d.Event) -> None:
        """Tell the policy, and carry out what it decides and what follows from that."""
        todo = deque(self._decide(event))
        while todo:
            outcome = self._carry_out(todo.popleft())
            if outcome is not None:
                todo.extend(self._decide(outcome))

    def _decide(self, event: d.Event) -> list[d.Decision]:
        decisions = self.policy.on_event(event, self.now)
        if self._on_decisions is not None:
            self._on_decisions(self, event, decisions)
        return decisions

    def _carry_out(self, decision: d.Decision) -> d.Event | None:
        match decision:
            case d.Dispatch():
                return self._dispatch(decision)
            case d.Preempt(request_id=request_id, attempt=attempt, report_seq=seq):
                self.result.preempted.append(request_id)
                message = PreemptRequest(request_id=request_id, attempt=attempt, report_seq=seq)
                entry_id = self.cell.send(decision.worker_id, message)
                self._deliver(decision.worker_id)
                return d.PreemptSent(request_id=request_id, entry_id=entry_id)
            case d.Requeue():
                self.cell.requeue(decision.worker_id)
            case d.RequeueOne(request_id=request_id, owner=owner, attempt=attempt):
                if self.cell.queue_again(request_id, owner, attempt, preempted=0, crashed=0):
                    return self._observed((request_id,))
            case d.Reject():
                self._end(decision.request_id, "rejected")
            case d.Abort():
                self._end(decision.request_id, decision.reason)
            case d.Recheck():
                return self._observed(decision.request_ids)
            case d.RemoveGateway():
                return d.GatewayRemoved(orphans=())
        return None

    def _dispatch(self, decision: d.Dispatch) -> d.Event:
        outcome = self.cell.dispatch(decision.request_id, decision.worker_id, decision.rank)
        match outcome.answer:
            case DispatchAnswer.OK:
                assert outcome.entry_id is not None
                self.result.dispatched.append((decision.request_id, decision.worker_id))
                self._deliver(decision.worker_id)
                return d.DispatchDone(
                    request_id=decision.request_id, attempt=outcome.attempt, entry_id=outcome.entry_id
                )
            case DispatchAnswer.ENDED:
                return d.Ended(request_ids=(decision.request_id,))
            case DispatchAnswer.NOT_QUEUED:
                return d.DispatchRefused(request_id=decision.request_id)
            case DispatchAnswer.NO_WORKER:
                return d.WorkerLeft(worker_id=decision.worker_id)

    def _observed(self, request_ids: tuple[RequestId, ...]) -> d.Observed:
        return d.Observed(records=tuple(self.cell.records[i] for i in request_ids))

    def _end(self, request_id: RequestId, reason: str) -> None:
        record = self.cell.records[request_id]
        if self.cell.end(request_id, reason):
            self._note_end(request_id, reason)
            if record.owner is not None:
                self._deliver(record.owner)

    def _note_end(self, request_id: RequestId, reason: str) -> None:
        assert request_id not in self.result.ended, "one terminal event each"
        self.result.ended[request_id] = reason
        self.result.end_s[request_id] = self.now

    # The trace.

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (time_s, self._num_events, action))

    def _arrive(self, index: int, request: SimulatedRequest) -> None:
        request_id = RequestId(f"r{index}")
        self._requests[request_id] = request
        summary = SubmitRequest(
            request_id=request_id,
            tenant="t",
            model="m",
            fingerprint=FINGERPRINT,
            prompt_lens=(request.prompt_len,),
            n=request.n,
            max_tokens=request.max_tokens,
            timeout_s=request.timeout_s,
        )
        self.cell.submit(summary, order=len(self.cell.records))
        if request.cancel_s is not None:
            self._at(request.cancel_s, lambda: self._cancel(request_id))
        self.feed(d.Submitted(requests=((summary, self.cell.records[request_id].order),)))

    def _cancel(self, request_id: RequestId) -> None:
        """The gateway ends it; the scheduler hears of it as a report."""
        self._end(request_id, "cancelled")
        self._at(self.now + self._cost.report_delay_s, lambda: self.feed(d.Ended(request_ids=(request_id,))))

    def _take_over(self) -> None:
        self.policy = Policy(self.config)
        self.feed(d.WorkersSeen(pulses=self.cell.pulses()))
        self.feed(self._observed(tuple(sorted(self.cell.live))))

    def _scan(self) -> None:
        """What the service does on its timers."""
        for worker in self.cell.workers.values():
            worker.beat += worker.is_alive
        self.feed(d.WorkersSeen(pulses=self.cell.pulses()))
        self.feed(d.GatewaysSeen(beats={GATEWAY: self._num_events}))
        gone = self.policy.request_ids - self.cell.live
        self.feed(d.Ended(request_ids=tuple(sorted(gone))))
        self.feed(self._observed(tuple(sorted(self.cell.live))))
        self.feed(d.Tick())
        self._at(self.now + 0.5, self._scan)

    # Workers.

    def _start_worker(self, index: int, spec: SimulatedWorkerSpec) -> None:
        hello = WorkerHello(
            worker_id=WorkerId(f"w{index}:{index}"),
            model="m",
            fingerprint=FINGERPRINT,
            dtype="float32",
            device="cpu",
            max_model_len=spec.num_blocks * spec.block_size,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_num_seqs=spec.max_num_seqs,
            pid=1,
            host="h",
        )
        worker = self.cell.workers[hello.worker_id] = SimulatedWorker(hello)
        if spec.death_s is not None:
            self._at(spec.death_s, lambda: setattr(worker, "is_alive", False))
        self._idle_report(worker)

    def _idle_report(self, worker: SimulatedWorker) -> None:
        if worker.is_alive:
            self._report(worker)
            self._at(self.now + self._cost.idle_report_s, lambda: self._idle_report(worker))

    def _report(self, worker: SimulatedWorker) -> None:
        report = worker.report()
        self._at(self.now + self._cost.report_delay_s, lambda: self.feed(d.Reported(report=report)))

    def _deliver(self, worker_id: WorkerId) -> None:
        worker = self.cell.workers.get(worker_id)
        if worker is not None:
            self._at(self.now + self._cost.inbox_delay_s, lambda: self._wake(worker))

    def _wake(self, worker: SimulatedWorker) -> None:
        if worker.is_alive and not worker.is_stepping:
            self._apply_inbox(worker)
            self._step(worker)

    def _apply_inbox(self, worker: SimulatedWorker) -> None:
        for entry_id, message in worker.inbox:
            worker.mark_applied(entry_id)
            match message:
                case RunRequest():
                    worker.sequences += self._sequences(worker, message)
                case PreemptRequest(request_id=request_id):
                    if worker.holds(request_id) and not worker.is_void(message):
                        self._release(worker, message)
                case _:
                    worker.drop(message.request_id)
        worker.inbox.clear()

    def _release(self, worker: SimulatedWorker, message: PreemptRequest) -> None:
        worker.drop(message.request_id)
        owner = worker.hello.worker_id
        self.cell.queue_again(message.request_id, owner, message.attempt, preempted=1, crashed=0)

    def _sequences(self, worker: SimulatedWorker, message: RunRequest) -> list[SimulatedSequence]:
        if not self.cell.is_owner(worker.hello.worker_id, message.request_id, message.attempt):
            return []
        record, request = self.cell.records[message.request_id], self._requests[message.request_id]
        return [
            SimulatedSequence(
                request_id=message.request_id,
                attempt=message.attempt,
                choice=choice,
                rank=message.rank,
                num_known=request.prompt_len + record.choices[choice].num_tokens,
                end=request.prompt_len + min(request.output_len, request.max_tokens),
            )
            for choice in message.choices
        ]

    def _step(self, worker: SimulatedWorker) -> None:
        chunks = worker.plan()
        if not chunks:
            self._report(worker)
            return
        worker.is_stepping = True
        took_s = self._cost.step_s + self._cost.token_s * sum(length for _, length in chunks)
        self._at(self.now + took_s, lambda: self._finish_step(worker, chunks))

    def _finish_step(self, worker: SimulatedWorker, chunks: list[tuple[SimulatedSequence, int]]) -> None:
        worker.is_stepping = False
        if not worker.is_alive:
            return
        worker.num_steps += 1
        self.result.num_steps += 1
        for sequence, length in chunks:
            sequence.num_computed += length
            if sequence.num_computed == sequence.num_known:
                self._commit(worker, sequence)
        self.result.num_evictions = sum(w.num_evictions for w in self.cell.workers.values())
        self._apply_inbox(worker)
        self._report(worker)
        self._step(worker)

    def _commit(self, worker: SimulatedWorker, sequence: SimulatedSequence) -> None:
        request_id = sequence.request_id
        if not self.cell.is_owner(worker.hello.worker_id, request_id, sequence.attempt):
            worker.drop(request_id)
            return
        sequence.num_known += 1
        self.result.first_token_s.setdefault(request_id, self.now)
        is_last = sequence.num_known >= sequence.end
        if self.cell.commit(request_id, sequence.choice, is_last=is_last):
            self._note_end(request_id, "finished")
            self._at(self.now + self._cost.report_delay_s, lambda: self.feed(d.Ended(request_ids=(request_id,))))
        if is_last:
            worker.sequences.remove(sequence)

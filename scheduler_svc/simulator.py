"""Runs the very policy of the service against simulated workers: a heap of timed events and a cost model.

    result = Simulation(requests, workers).run(until_s=60)

Delays of reports and inboxes, deaths and restarts of workers, cancels and changes of leader are part of the trace, so
a property test can make thousands of cells in seconds and a recorded trace can be replayed with other settings. There
is no randomness here; equal inputs give equal results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from scheduler_svc import decisions as d
from scheduler_svc.agenda import Agenda
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from scheduler_svc.service import RECORDS_PER_SCAN, SCAN_S
from scheduler_svc.simulated_autoscaler import Autoscaling, SimulatedAutoscaler
from scheduler_svc.simulated_cell import GATEWAY, SimulatedCell
from scheduler_svc.simulated_fleet import FINGERPRINT, SimulatedFleet
from scheduler_svc.simulated_prefix_cache import SharedNames
from scheduler_svc.simulation_trace import CostModel, Sample, SimulatedRequest, SimulatedWorkerSpec, SimulationResult
from shared.bus import DispatchAnswer
from shared.ids import RequestId
from shared.messages import AbortRequest, PreemptRequest, SubmitRequest
from shared.prefix import pack

WATCH_S = 0.5


class Simulation:
    """One run. `policy_s` is processor time spent in the policy, over `num_events` events with `num_decisions`.

    Args:
        leader_changes_s: when a new leader, with an empty policy, takes over.
        on_decisions: called with each batch of decisions before they are carried out; for checks and logs. The cell's
            counts of tokens and blocks may be some steps old then.
        can_jump: False: workers make each step by itself, for a comparison.
        autoscaling: how workers beside `workers` come and go; None: they stay as they are.
    """

    def __init__(
        self,
        requests: list[SimulatedRequest],
        workers: list[SimulatedWorkerSpec],
        *,
        config: PolicyConfig | None = None,
        cost: CostModel | None = None,
        leader_changes_s: tuple[float, ...] = (),
        on_decisions: Observer | None = None,
        can_jump: bool = True,
        autoscaling: Autoscaling | None = None,
    ) -> None:
        self.cell = SimulatedCell()
        self.result = SimulationResult()
        self.config = replace(config or PolicyConfig(), autoscale=autoscaling.config if autoscaling else None)
        self.policy = Policy(self.config)
        self.policy_s = 0.0
        self.num_events = self.num_decisions = 0
        self._cost = cost or CostModel()
        self._on_decisions = on_decisions
        self._agenda = Agenda()
        self._requests: dict[RequestId, SimulatedRequest] = {}
        self._num_watches = 0
        self._to_scan: list[RequestId] = []
        self._names = SharedNames()
        self._named_size = next((spec.block_size for spec in workers if spec.has_prefix_cache), None)
        self._fleet = SimulatedFleet(
            self.cell,
            self._agenda,
            cost=self._cost,
            result=self.result,
            requests=self._requests,
            names=self._names,
            tell=self.feed,
            can_jump=can_jump,
        )
        self._autoscaler = None
        if autoscaling is not None:
            self._autoscaler = SimulatedAutoscaler(autoscaling, self.cell, self._agenda, self._fleet)
        for index, spec in enumerate(workers):
            self._agenda.at(spec.start_s, partial(self._fleet.start, index, spec))
        for index, request in enumerate(requests):
            self._agenda.at(request.arrival_s, partial(self._arrive, index, request))
        for change_s in leader_changes_s:
            self._agenda.at(change_s, self._take_over)
        self._agenda.at(0.0, self._watch)

    @property
    def now(self) -> float:
        """Seconds of the simulation."""
        return self._agenda.now

    def watch(self, observer: Observer) -> None:
        """Have `observer` called as `on_decisions` is."""
        self._on_decisions = observer

    def run(self, until_s: float) -> SimulationResult:
        """Run until `until_s`; may be called again with a later time."""
        self._agenda.run(until_s)
        self._fleet.sync_all()
        return self.result

    def feed(self, event: d.Event) -> None:
        """Tell the policy, and carry out what it decides and what follows from that."""
        todo = deque(self._decide(event))
        while todo:
            outcome = self._carry_out(todo.popleft())
            if outcome is not None:
                todo.extend(self._decide(outcome))

    def _decide(self, event: d.Event) -> list[d.Decision]:
        since = time.thread_time()
        decisions = self.policy.on_event(event, self.now)
        self.policy_s += time.thread_time() - since
        self.num_events += 1
        self.num_decisions += len(decisions)
        if self._on_decisions is not None:
            self._on_decisions(self, event, decisions)
        return decisions

    def _carry_out(self, decision: d.Decision) -> d.Event | None:
        match decision:
            case d.Dispatch():
                return self._dispatch(decision)
            case d.Preempt():
                return self._preempt(decision)
            case d.Requeue(worker_id=worker_id):
                self._fleet.sync(worker_id)
                if (lost := self.cell.requeue(worker_id)) is not None:
                    self._fleet.settle_lost(lost)
            case d.RequeueOne(request_id=request_id, owner=owner, attempt=attempt):
                self._fleet.sync(owner)
                if self.cell.queue_again(request_id, owner, attempt, preempted=0, crashed=0):
                    self._fleet.settle(owner)
                    return self._observed((request_id,))
            case d.Reject():
                self._end(decision.request_id, "rejected")
            case d.Abort():
                self._end(decision.request_id, decision.reason)
            case d.Recheck():
                return self._observed(decision.request_ids)
            case d.RemoveGateway():
                return d.GatewayRemoved(orphans=())
            case d.WantWorkers():
                if self._autoscaler is not None:
                    self._autoscaler.carry_out(decision)
        return None

    def _dispatch(self, decision: d.Dispatch) -> d.Event:
        request_id, worker_id = decision.request_id, decision.worker_id
        outcome, message = self.cell.dispatch(decision)
        match outcome.answer:
            case DispatchAnswer.OK:
                assert outcome.entry_id is not None
                assert message is not None
                self.result.dispatched.append((request_id, worker_id))
                self._fleet.deliver(worker_id, outcome.entry_id, message)
                return d.DispatchDone(request_id=request_id, attempt=outcome.attempt, entry_id=outcome.entry_id)
            case DispatchAnswer.ENDED:
                return d.Ended(request_ids=(request_id,))
            case DispatchAnswer.NOT_QUEUED:
                return d.DispatchRefused(request_id=request_id)
            case DispatchAnswer.NO_WORKER:
                return d.WorkerLeft(worker_id=worker_id)

    def _preempt(self, decision: d.Preempt) -> d.Event:
        request_id, entry_id = decision.request_id, self.cell.new_entry_id()
        self.result.preempted.append(request_id)
        message = PreemptRequest(
            request_id=request_id, attempt=decision.attempt, report_seq=decision.report_seq, keeps=decision.keeps
        )
        self._fleet.deliver(decision.worker_id, entry_id, message)
        return d.PreemptSent(request_id=request_id, entry_id=entry_id)

    def _observed(self, request_ids: tuple[RequestId, ...]) -> d.Observed:
        for request_id in request_ids:
            self._fleet.sync(self.cell.records[request_id].owner)
        return d.Observed(records=self.cell.observe(request_ids))

    def _end(self, request_id: RequestId, reason: str) -> None:
        owner = self.cell.records[request_id].owner
        self._fleet.sync(owner)
        if self.cell.end(request_id, reason):
            self._fleet.note_end(request_id, reason)
            if owner is not None:
                self._fleet.settle(owner)
                self._fleet.deliver(owner, self.cell.new_entry_id(), AbortRequest(request_id=request_id))

    # The trace.

    def _arrive(self, index: int, request: SimulatedRequest) -> None:
        request_id = RequestId(f"r{index}")
        self._requests[request_id] = request
        names = () if self._named_size is None else self._names.of(request, self._named_size)
        summary = SubmitRequest(
            request_id=request_id,
            tenant=request.tenant,
            model="m",
            fingerprint=FINGERPRINT,
            prompt_lens=(request.prompt_len,),
            n=request.n,
            max_tokens=request.max_tokens,
            timeout_s=request.timeout_s,
            priority=request.priority,
            user=request.user,
            prefixes=(pack(names),) if names else (),
        )
        self.cell.submit(summary, order=len(self.cell.records))
        if request.cancel_s is not None:
            self._agenda.at(request.cancel_s, partial(self._cancel, request_id))
        self.feed(d.Submitted(requests=((summary, self.cell.records[request_id].order),)))

    def _cancel(self, request_id: RequestId) -> None:
        """The gateway ends it; the scheduler hears of it as a report."""
        self._end(request_id, "cancelled")
        num_tokens = sum(self.cell.records[request_id].num_tokens)
        ended = d.Ended(request_ids=(request_id,), completion_tokens=(num_tokens,))
        self._agenda.after(self._cost.report_delay_s, partial(self.feed, ended))

    def _take_over(self) -> None:
        self.policy = Policy(self.config)
        self._fleet.sync_all()
        self.feed(d.WorkersSeen(pulses=self.cell.pulses()))
        self.feed(self._observed(self.cell.list_live()))

    def _watch(self) -> None:
        """What the service does on its timers."""
        self._fleet.sync_all()
        for worker in self.cell.workers.values():
            worker.beat += worker.is_alive
        if self._autoscaler is not None:
            self._autoscaler.look()
        self._take_sample()
        self.feed(d.WorkersSeen(pulses=self.cell.pulses()))
        self.feed(d.GatewaysSeen(beats={GATEWAY: self._num_watches}))
        self.feed(d.Tick())
        if self._num_watches * WATCH_S % SCAN_S == 0:
            self._scan()
        self._num_watches += 1
        self._agenda.after(WATCH_S, self._watch)

    def _scan(self) -> None:
        """Compare with `live`, and read some of the records again."""
        known, live = self.policy.request_ids, self.cell.live
        self.feed(d.Ended(request_ids=tuple(sorted(known - live))))
        unknown = tuple(i for i in self.cell.list_live() if i not in known) if live - known else ()
        self._to_scan = self._to_scan or list(self.cell.list_live())
        again, self._to_scan = self._to_scan[:RECORDS_PER_SCAN], self._to_scan[RECORDS_PER_SCAN:]
        again = [i for i in again if i in live and i in known]
        self.feed(self._observed((*unknown, *again)))

    def _take_sample(self) -> None:
        alive = [worker for worker in self.cell.workers.values() if worker.is_alive]
        num_blocks = sum(worker.hello.num_blocks for worker in alive)
        self.result.samples.append(
            Sample(
                now_s=self.now,
                used_blocks=num_blocks - sum(worker.free_blocks for worker in alive),
                num_blocks=num_blocks,
                num_workers=len(alive) + (0 if self._autoscaler is None else self._autoscaler.num_starting),
                num_running=self.cell.num_live - self.cell.num_queued.total(),
                served=dict(self.result.served),
                queued=dict(self.cell.num_queued),
            )
        )


Observer = Callable[[Simulation, d.Event, list[d.Decision]], None]

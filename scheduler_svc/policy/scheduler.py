"""The policy: every rule of who runs where and who gives way, as a pure function of events and their times.

How it keeps its picture true:

* A request is queued, running (assigned to one worker) or unknown. Only `Observed`, made from the record, moves one it
  knows to queued or confirms where it runs; `Dispatch` moves it to running at once, before the bus has confirmed, so
  that two decisions never use the same blocks.
* A new request is queued by its wake-up alone. Should its record say otherwise, the dispatch is refused and the request
  looked at; who listens is known from the next scan on.
* A record with a lower attempt than ours was read before our last dispatch, and is skipped.
* A worker gets work only after its first report to this leader. What was sent to it and is not in its report yet stays
  counted with its full demand (`admission.py`), so a late report over-commits nothing.
* An assigned request that a later report does not list has ended, was given back, or is forgotten: `Recheck` tells
  the first two, patience and `RequeueOne` end the third.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_svc import decisions as d
from scheduler_svc.policy import dispatching, keeping, listing, placement, preemption, yielding
from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.policy.deadlines import Deadlines
from scheduler_svc.policy.fleet import TOKENS_PER_SEQUENCE, Fleet
from scheduler_svc.policy.liveness import Watch
from scheduler_svc.policy.queue import Queue
from scheduler_svc.policy.sizing import Sizing
from scheduler_svc.policy.state import EntryKey, Phase, Request, Worker, entry_key
from shared.bus import RequestRecord, RequestState, WorkerPulse
from shared.capacity import never_fits_message
from shared.ids import GatewayId, RequestId, WorkerId
from shared.messages import SubmitRequest, WorkerHello

Decisions = list[d.Decision]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Limits and times of the policy; seconds of whatever clock `now` comes from.

    `aging_s`: a request that has waited this long rises a class; 0: never. `passing_s`: how long smaller ones may pass
    one that does not fit; 0: nobody passes. `ttft_s` and `tpot_s`: targets, which reorder among even tenants only.
    `tokens_per_sequence` is what load weighs against prefixes (`placement.py`). `autoscale`: how many workers to ask
    for; None: never ask.
    """

    worker_lease_s: float = 3.0
    worker_stall_s: float = 60.0
    gateway_lease_s: float = 3.0
    orphan_ttl_s: float = 30.0
    max_crashes: int = 3
    max_preemptions: int = 8
    admission_headroom: int | None = None
    aging_s: float = 0.0
    passing_s: float = 0.0
    delay_factor: float = 0.0
    ttft_s: float = 0.5
    tpot_s: float = 0.05
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    tokens_per_sequence: float = TOKENS_PER_SEQUENCE
    autoscale: AutoscaleConfig | None = None

    def rules(self) -> dispatching.DispatchRules:
        """What placing from the queue goes by."""
        return dispatching.DispatchRules(
            max_preemptions=self.max_preemptions, passing_s=self.passing_s, delay_factor=self.delay_factor
        )


class Policy:
    """Holds the picture of one cell for as long as one scheduler leads."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._requests: dict[RequestId, Request] = {}
        self._workers: dict[WorkerId, Worker] = {}
        self._rules = config.rules()
        self._fleets: dict[str, Fleet] = {}
        self._queue = Queue(aging_s=config.aging_s, weights=config.tenant_weights)
        self._deadlines = Deadlines()
        self._sizing = None if config.autoscale is None else Sizing(config.autoscale)
        self._leases: Watch[WorkerId] = Watch(config.worker_lease_s)
        self._stalls: Watch[WorkerId] = Watch(config.worker_stall_s)
        self._gateways: Watch[GatewayId] = Watch(config.gateway_lease_s)

    @property
    def request_ids(self) -> set[RequestId]:
        """All live requests it knows."""
        return set(self._requests)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return sum(fleet.news.levels.total() for fleet in self._fleets.values())

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    def knows_worker(self, worker_id: WorkerId) -> bool:
        """Whether `WorkersSeen` has shown it."""
        return worker_id in self._workers

    def on_event(self, event: d.Event, now: float) -> Decisions:
        """What to do, in this order, now that `event` has happened.

        Args:
            event: what happened; each decision's outcome comes back as an event.
            now: seconds; never goes back between calls.
        """
        match event:
            case d.Reported():
                found = self._on_report(event, now)
            case d.Submitted():
                found = self._on_submitted(event, now)
            case d.DispatchDone() | d.DispatchRefused() | d.PreemptSent():
                found = self._on_outcome(event)
            case d.Ended():
                found = self._on_ended(event)
            case d.Observed():
                found = [decision for record in event.records for decision in self._observe(record, now)]
            case d.WorkersSeen():
                found = self._on_workers(event.pulses, now)
            case d.WorkerLeft():
                found = self._remove_worker(event.worker_id)
            case d.GatewaysSeen():
                found = self._on_gateways(event, now)
            case d.GatewayRemoved():
                found = self._on_gateway_removed(event, now)
            case d.Tick():
                found = [self._abort(self._requests[i], "deadline", _DEADLINE) for i in self._deadlines.due(now)]
                self._queue.age(now)
        if len(self._queue):
            found += self._place_queued(now, always=isinstance(event, d.Tick))
        if self._sizing is not None and isinstance(event, d.Tick):
            found += self._sizing.look(self._workers.values(), self._requests.values(), len(self._queue), now)
        return found

    # Requests.

    def _on_submitted(self, event: d.Submitted, now: float) -> Decisions:
        found: Decisions = []
        for summary, order in event.requests:
            if summary.request_id not in self._requests:
                found += self._follow_queued(self._add(summary, order, now), now)
        return found

    def _add(self, summary: SubmitRequest, order: EntryKey, now: float) -> Request:
        request = self._requests[summary.request_id] = Request(summary, order, now)
        request.due = now + self._config.ttft_s
        self._queue.open(request)
        self._deadlines.add(request, request.deadline)
        return request

    def _observe(self, record: RequestRecord, now: float) -> Decisions:
        request = self._requests.get(record.summary.request_id)
        if record.state is RequestState.ENDED:
            return self._on_ended(d.Ended(request_ids=(record.summary.request_id,)))
        is_new = request is None
        if request is None:
            request = self._add(record.summary, record.order, now)
        elif request.phase is Phase.RUNNING and record.attempt < request.attempt:
            return []
        request.update(record)
        if is_new and record.attempt:  # an earlier leader has counted what it was served
            request.arrived_at = None
            request.set_charged(request.num_served)
        if request.attempt and request.num_served > request.charged:
            self._queue.charge(request, request.num_served)
        if record.owner is None:
            found = self._follow_queued(request, now)
        else:
            found = self._follow_running(request, record.owner)
        return found or self._follow_listeners(request, record, now)

    def _follow_queued(self, request: Request, now: float) -> Decisions:
        self._unassign(request)
        request.phase = Phase.QUEUED
        if request.crashes >= self._config.max_crashes:
            return [self._abort(request, "failed", _CRASHED.format(request.crashes))]
        if request not in self._queue:
            request.queued_at = now
            request.due = now + self._config.tpot_s if request.num_logged else request.due
            self._queue.add(request, now)
        return self._refuse(request)

    def _follow_running(self, request: Request, owner: WorkerId) -> Decisions:
        self._queue.remove(request)
        worker = self._workers.get(owner)
        if request.worker_id != owner:
            self._unassign(request)
        if worker is None:
            request.phase = Phase.UNKNOWN
            return [d.RequeueOne(request_id=request.request_id, owner=owner, attempt=request.attempt)]
        worker.assign(request)
        return []

    def _follow_listeners(self, request: Request, record: RequestRecord, now: float) -> Decisions:
        """A request that nobody listens to any more ends after its time."""
        for gateway_id, _ in record.listeners:
            self._gateways.expect(gateway_id, now)
        if record.listeners:
            request.orphan_since, request.lost_gateway = None, False
            return []
        if request.orphan_since is None:
            request.orphan_since = now
        ttl = record.orphan_ttl_s
        if request.lost_gateway or ttl == 0:
            ttl = max(ttl, self._config.orphan_ttl_s)
        return [self._abort(request, "cancelled")] if now - request.orphan_since >= ttl else []

    def _on_ended(self, event: d.Ended) -> Decisions:
        known = dict(zip(event.request_ids, event.completion_tokens, strict=False))
        for request_id in event.request_ids:
            if (request := self._requests.get(request_id)) is not None:
                self._settle(request, known.get(request_id))
                self._forget(request)
        return []

    def _settle(self, request: Request, completion_tokens: int | None = None) -> None:
        """Count an ended request's tokens to its tenant for good; nothing if no worker has taken it up."""
        if self._sizing is not None and completion_tokens and request.worker_id in self._workers:
            self._sizing.note_first_token(request, self._workers[request.worker_id])
        if request.was_listed or request.num_logged or completion_tokens:
            known = 0 if completion_tokens is None else sum(request.summary.prompt_lens) + completion_tokens
            self._queue.charge(request, max(request.charged, known))
        else:
            self._queue.charge(request, 0)

    def _abort(self, request: Request, reason: str, message: str = "") -> d.Decision:
        self._settle(request)
        self._forget(request)
        return d.Abort(request_id=request.request_id, reason=reason, message=message)

    def _forget(self, request: Request) -> None:
        self._unassign(request)
        self._queue.close(request)
        self._deadlines.remove(request)
        del self._requests[request.request_id]

    def _unassign(self, request: Request) -> None:
        worker = None if request.worker_id is None else self._workers.get(request.worker_id)
        if worker is None:
            request.leave_worker()
        else:
            worker.drop(request)

    def _refuse(self, request: Request) -> Decisions:
        """Reject it if no live worker of its model could hold it even alone; one that has run before may wait for a
        larger worker to come back."""
        fleet = self._fleets.get(request.summary.fingerprint)
        if request.attempt > 0 or fleet is None or fleet.can_ever_hold(request):
            return []
        hello = fleet.largest.hello
        message = never_fits_message(
            request.largest,
            block_size=hello.block_size,
            num_blocks=hello.num_blocks,
            num_resident=hello.num_resident,
        )
        self._forget(request)
        return [d.Reject(request_id=request.request_id, message=message)]

    # Placement.

    def _place_queued(self, now: float, *, always: bool) -> Decisions:
        """Dispatch where anything has changed, or time alone may let somebody through."""
        found: Decisions = []
        for fingerprint in self._queue.fingerprints():
            fleet = self._fleets.get(fingerprint)
            if fleet is not None and (always or fleet.may_take_more or not self._queue.is_blocked(fingerprint)):
                found += dispatching.place_queued(self._queue, fleet, fingerprint, self._rules, now)
        return found

    def _on_outcome(self, event: d.DispatchDone | d.DispatchRefused | d.PreemptSent) -> Decisions:
        request = self._requests.get(event.request_id)
        if request is None:
            return []
        match event:
            case d.DispatchDone():
                request.attempt, request.entry = event.attempt, entry_key(event.entry_id)
            case d.PreemptSent():
                request.preempt_entry, request.is_steady = entry_key(event.entry_id), False
            case d.DispatchRefused():
                self._unassign(request)
                request.phase = Phase.UNKNOWN
                return [d.Recheck(request_ids=(request.request_id,))]
        return []

    # Workers and gateways.

    def _on_report(self, event: d.Reported, now: float) -> Decisions:
        report = event.report
        worker = self._workers.get(report.worker_id)
        if worker is None:
            return []
        is_next = worker.report is not None and report.seq == worker.report.seq + 1
        if not worker.take(report):
            return []
        fleet = self._fleets[worker.hello.fingerprint]
        fleet.news.prefixes.take(report, is_next=is_next)
        reading = listing.read(worker, now, lease_s=self._config.worker_lease_s)
        self._queue.charge_all(reading.served)
        for request in reading.first_tokens:
            self._note_first_token(request, worker, fleet, now)
        worker.reported_at = now
        found = reading.decisions
        for victim in preemption.choose_victims(worker, self._config.max_preemptions):
            found.append(dispatching.preempt(victim, worker))
        return found + self._make_way(worker, fleet, now) if reading.is_waiting else found

    def _note_first_token(self, request: Request, worker: Worker, fleet: Fleet, now: float) -> None:
        """A report of `worker` is the first to show a token of `request` since its dispatch."""
        if self._sizing is not None:
            self._sizing.note_first_token(request, worker)
        if request.sent_at is not None:
            fleet.prompt_latency_s, request.sent_at = now - request.sent_at, None

    def _make_way(self, worker: Worker, fleet: Fleet, now: float) -> Decisions:
        """Since somebody waits in `worker`, those of lower classes give way, or the one that waits leaves for another
        worker."""
        waiting = placement.passed_over(worker)
        if not waiting:
            return []
        first = min(waiting, key=lambda request: request.standing)
        most = self._config.max_preemptions
        lower = yielding.choose_victims(worker, first, most)
        if lower:
            return [dispatching.preempt(victim, worker) for victim in lower]
        movable = [request for request in waiting if keeping.may_move(worker, request, now)]
        revoked = placement.choose_revoked(worker, movable, fleet, most)
        may_go = first in movable and first.preemptions < most
        if revoked is None and lower is None and may_go and yielding.choose(fleet, first, most):
            revoked = first  # queued again, it takes a lower one's place elsewhere
        return [] if revoked is None else [dispatching.revoke(revoked, worker)]

    def _on_workers(self, pulses: tuple[WorkerPulse, ...], now: float) -> Decisions:
        seen = {pulse.hello.worker_id: pulse for pulse in pulses}
        joined = [pulse.hello for worker_id, pulse in seen.items() if worker_id not in self._workers]
        for hello in joined:
            self._add_worker(hello)
        found: Decisions = []
        for worker_id in [worker_id for worker_id in self._workers if worker_id not in seen]:
            found += self._remove_worker(worker_id)
        silent = self._leases.lapsed({i: pulse.beat for i, pulse in seen.items()}, now)
        stalled = self._stalls.lapsed({i: pulse.num_steps for i, pulse in seen.items() if pulse.has_work}, now)
        for worker_id in {**dict.fromkeys(silent), **dict.fromkeys(stalled)}:
            found.append(d.Requeue(worker_id=worker_id, why="silent" if worker_id in silent else "stalled"))
            found += self._remove_worker(worker_id)
        if joined or found:
            for request in list(self._queue):
                found += self._refuse(request)
        return found

    def _make_fleet(self) -> Fleet:
        return Fleet(self._config.max_preemptions, self._config.tokens_per_sequence)

    def _add_worker(self, hello: WorkerHello) -> None:
        fleet = self._fleets.setdefault(hello.fingerprint, self._make_fleet())
        worker = self._workers[hello.worker_id] = Worker(hello, self._config.admission_headroom, fleet.news)
        fleet.add(worker)
        self._queue.unpark(hello.fingerprint)

    def _remove_worker(self, worker_id: WorkerId) -> Decisions:
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return []
        self._leases.forget(worker_id)
        self._stalls.forget(worker_id)
        requests = list(worker.assigned.values())
        for request in requests:
            worker.drop(request)
            request.phase = Phase.UNKNOWN
        fleet = self._fleets[worker.hello.fingerprint]
        fleet.remove(worker)
        if not fleet.workers:
            del self._fleets[worker.hello.fingerprint]
        return [d.Recheck(request_ids=tuple(request.request_id for request in requests))] if requests else []

    def _on_gateways(self, event: d.GatewaysSeen, now: float) -> Decisions:
        lost = self._gateways.lapsed(event.beats, now)
        for gateway_id in lost:
            self._gateways.forget(gateway_id)
        return [d.RemoveGateway(gateway_id=gateway_id) for gateway_id in lost]

    def _on_gateway_removed(self, event: d.GatewayRemoved, now: float) -> Decisions:
        for request_id in event.orphans:
            if (request := self._requests.get(request_id)) is not None:
                request.lost_gateway = True
                request.orphan_since = now
        return []


_DEADLINE = "the request did not finish before its deadline"
_CRASHED = "{} workers in a row died while they ran this request; it is not tried again"

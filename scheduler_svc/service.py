"""The scheduler's shell: it competes for the lead, feeds the policy, carries its decisions out and acks.

A *term* is one time of leading. It starts with an empty policy, rebuilt from the workers, `live` and the records; it
ends with any error, since after a lost reply only the records say what happened. So there is one way into a correct
state, and it is used after a crash, a lost lead and a Redis that was away alike.

Within a term four tasks run: one raises the leader's beat, two read the streams into a queue, and one, alone, does all
deciding and writing. Every leader's write carries the token, so a stopped leader that wakes up writes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from scheduler_svc import decisions as d
from scheduler_svc.decision_log import DecisionLog
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from scheduler_svc.policy.state import entry_key
from shared.bus import Bus, DispatchAnswer, LeaderPulse, ReportMessage
from shared.clock import Clock
from shared.config import ScalingConfig, SchedulerConfig
from shared.errors import BusError, LeaderLost
from shared.failpoints import failpoint
from shared.ids import EntryId, RequestId, new_leader_token
from shared.logs import get_log
from shared.messages import PreemptRequest, RequestEnded, SubmitRequest
from shared.worker_wish import WorkerWish

CONSUMER = "leader"
SCAN_S = 1.0
RECORDS_PER_SCAN = 1000
"""Known records read again per scan; with more live requests the scans take turns over them."""
CLAIM_IDLE_MS = 5_000
READ_COUNT = 256
READ_BLOCK_MS = 1_000
MAX_BACK_OFF_S = 2.0
_ERROR_KINDS = {"failed": "internal_error", "deadline": "deadline_exceeded"}

log = get_log("scheduler")


@dataclass(frozen=True, slots=True)
class _WakeUps:
    entries: list[tuple[EntryId, SubmitRequest]]


@dataclass(frozen=True, slots=True)
class _Reports:
    entries: list[tuple[EntryId, ReportMessage]]


class SchedulerService:
    """One scheduler process: standby or leader.

    Args:
        bus: closed by whoever made it.
    """

    def __init__(self, bus: Bus, config: SchedulerConfig, clock: Clock, metrics: SchedulerMetrics) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._token = new_leader_token()
        path, max_mb = config.scheduling.decision_log_path(), config.scheduling.decision_log_max_mb
        self._decision_log = None if path is None else DecisionLog(path, max_mb * 1024 * 1024)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then give the lead up."""
        serving = asyncio.create_task(self._serve(stop))
        try:
            await stop.wait()
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            self._metrics.clear_gauges()
            if self._decision_log is not None:
                self._decision_log.close()
        with suppress(BusError, LeaderLost, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._bus.yield_lead(self._token)
        log.info("scheduler.stopped")

    async def _serve(self, stop: asyncio.Event) -> None:
        back_off_s = 0.1
        while not stop.is_set():  # looked at, since a task group that fails as it is cancelled tells only the failure
            term: _Term | None = None
            try:
                await self._stand_by()
                term = _Term(self._bus, self._token, self._config, self._clock, self._metrics)
                term.log_to(self._decision_log)
                await term.lead()
            except* LeaderLost:
                log.warning("leader.lost")
                self._token = new_leader_token()
            except* BusError as errors:
                log.recurring("bus.lost", error=_first(errors), retry_s=back_off_s)
            except* Exception as errors:
                self._metrics.errors.inc()
                log.error("term.failed", exc_info=True, error=_first(errors), retry_s=back_off_s)
            self._metrics.clear_gauges()
            back_off_s = 0.1 if term is not None and term.is_rebuilt else min(MAX_BACK_OFF_S, back_off_s * 2)
            await asyncio.sleep(back_off_s)

    async def _stand_by(self) -> None:
        """Return once the lead is ours: nobody has it, or its beat stood still for the lease by our clock."""
        lease_s = self._config.process.leader_lease_s
        seen: LeaderPulse | None = None
        since = self._clock.now()
        while True:
            pulse = await self._bus.read_leader()
            if pulse != seen:
                seen, since = pulse, self._clock.now()
            is_free = pulse.token in ("", self._token) or self._clock.now() - since >= lease_s
            if is_free and await self._bus.take_lead(self._token, pulse):
                log.info("leader.taken", beat=pulse.beat)
                return
            await asyncio.sleep(lease_s / 10)


class _Term:
    """One time of leading, and all that is forgotten with it."""

    def __init__(self, bus: Bus, token: str, config: SchedulerConfig, clock: Clock, metrics: SchedulerMetrics) -> None:
        self._bus = bus
        self._token = token
        self._clock = clock
        self._metrics = metrics
        self._policy_config = policy_config(config)
        self._policy = Policy(self._policy_config)
        self._lease_s = config.process.leader_lease_s
        self._watch_s = min(0.5, config.process.worker_lease_s / 6)
        self._inbox: asyncio.Queue[_WakeUps | _Reports] = asyncio.Queue(maxsize=16)
        self._next_watch = 0.0
        self._next_scan = 0.0
        self._to_scan: list[RequestId] = []
        self._to_ack: list[EntryId] = []
        self._decision_log: DecisionLog | None = None
        self.is_rebuilt = False

    def log_to(self, decision_log: DecisionLog | None) -> None:
        """Write down what the policy hears and decides, from its first event on."""
        if decision_log is not None:
            decision_log.begin(self._policy_config)
        self._decision_log = decision_log

    async def lead(self) -> None:
        """Lead until an error; raises an exception group."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_lead())
            tasks.create_task(self._read_submits())
            tasks.create_task(self._read_reports())
            tasks.create_task(self._decide())

    async def _keep_lead(self) -> None:
        while True:
            await self._bus.raise_lead(self._token, int(self._clock.now() * 1000))
            await asyncio.sleep(self._lease_s / 5)

    async def _read_submits(self) -> None:
        while True:
            entries = await self._bus.read_submits(CONSUMER, READ_COUNT, READ_BLOCK_MS)
            if entries:
                await self._inbox.put(_WakeUps(entries))

    async def _read_reports(self) -> None:
        after = EntryId("$")
        while True:
            entries = await self._bus.read_reports(after, READ_COUNT, READ_BLOCK_MS)
            if entries:
                after = entries[-1][0]
                await self._inbox.put(_Reports(entries))

    async def _decide(self) -> None:
        await self._rebuild()
        while True:
            await self._handle_next()
            await self._run_timers()
            self._show()

    async def _rebuild(self) -> None:
        await self._watch()
        await self._look(await self._bus.list_live())
        await self._handle_left_over(await self._bus.claim_submits(CONSUMER, 0, READ_COUNT))
        self._next_scan = self._clock.now() + SCAN_S
        self.is_rebuilt = True
        log.info("leader.rebuilt", workers=self._policy.num_workers, requests=len(self._policy.request_ids))
        self._show()

    async def _handle_next(self) -> None:
        """Handle what comes before the next timer."""
        wait_s = max(0.0, min(self._next_watch, self._next_scan) - self._clock.now())
        try:
            async with asyncio.timeout(wait_s):
                work = await self._inbox.get()
        except TimeoutError:
            return
        match work:
            case _WakeUps(entries):
                await self._handle_new(entries)
            case _Reports(entries):
                for _, message in entries:
                    await self._handle_report(message)

    async def _handle_new(self, entries: list[tuple[EntryId, SubmitRequest]]) -> None:
        """Place what was submitted, without a look at the records: a dispatch looks itself. The entries are deleted by
        and by: right away, that write would lie between a request and its first token."""
        failpoint("scheduler.after_read")
        requests = tuple((summary, entry_key(entry_id)) for entry_id, summary in entries)
        await self._feed(d.Submitted(requests=requests))
        failpoint("scheduler.before_ack")
        self._to_ack += [entry_id for entry_id, _ in entries]

    async def _handle_left_over(self, entries: list[tuple[EntryId, SubmitRequest]]) -> None:
        """Look at what was submitted and read before, by this leader or another one."""
        await self._look([summary.request_id for _, summary in entries])
        self._to_ack += [entry_id for entry_id, _ in entries]

    async def _handle_report(self, message: ReportMessage) -> None:
        if isinstance(message, RequestEnded):
            tokens = (message.completion_tokens,)
            await self._feed(d.Ended(request_ids=(message.request_id,), completion_tokens=tokens))
            return
        if not self._policy.knows_worker(message.worker_id):
            await self._watch()
        await self._feed(d.Reported(report=message))

    async def _run_timers(self) -> None:
        now = self._clock.now()
        if now >= self._next_watch:
            await self._ack()
            await self._watch()
        if now >= self._next_scan:
            await self._scan()
            self._next_scan = now + SCAN_S

    async def _ack(self) -> None:
        """Delete wake-ups that were looked at."""
        await self._bus.ack_submits(self._to_ack)
        self._to_ack.clear()

    async def _watch(self) -> None:
        """Leases and deadlines."""
        self._next_watch = self._clock.now() + self._watch_s
        pulses, beats = await asyncio.gather(self._bus.read_workers(), self._bus.read_gateways())  # in one round trip
        await self._feed(d.WorkersSeen(pulses=tuple(pulses)))
        await self._feed(d.GatewaysSeen(beats=beats))
        await self._feed(d.Tick())

    async def _scan(self) -> None:
        """Compare with `live` and the records: streams are only wake-ups."""
        claim = self._bus.claim_submits(CONSUMER, CLAIM_IDLE_MS, READ_COUNT)
        wake_ups, live = await asyncio.gather(claim, self._bus.list_live())
        await self._handle_left_over(wake_ups)
        known = self._policy.request_ids
        await self._feed(d.Ended(request_ids=tuple(known - live)))
        self._to_scan = self._to_scan or list(live)
        again, self._to_scan = self._to_scan[:RECORDS_PER_SCAN], self._to_scan[RECORDS_PER_SCAN:]
        await self._look((live - known) | (live & set(again)))

    async def _look(self, request_ids: Iterable[RequestId]) -> None:
        """Read records and feed them."""
        event = await self._observe(request_ids)
        if event is not None:
            await self._feed(event)

    async def _observe(self, request_ids: Iterable[RequestId]) -> d.Event | None:
        wanted = list(request_ids)
        if not wanted:
            return None
        records = await self._bus.load_records(wanted)
        gone = tuple(i for i, record in zip(wanted, records, strict=True) if record is None)
        if gone:
            await self._feed(d.Ended(request_ids=gone))
        return d.Observed(records=tuple(record for record in records if record is not None))

    # Decisions.

    async def _feed(self, event: d.Event) -> None:
        """Tell the policy; carry out what it decides, and what follows from the outcomes."""
        todo = deque(self._ask(event))
        while todo:
            outcome = await self._carry_out(todo.popleft())
            if outcome is not None:
                todo.extend(self._ask(outcome))

    def _ask(self, event: d.Event) -> list[d.Decision]:
        now = self._clock.now()
        decisions = self._policy.on_event(event, now)
        if self._decision_log is not None:
            self._decision_log.note(now, event, decisions)
        return decisions

    async def _carry_out(self, decision: d.Decision) -> d.Event | None:
        match decision:
            case d.Dispatch():
                return await self._dispatch(decision)
            case d.Preempt():
                return await self._preempt(decision)
            case d.Requeue(worker_id=worker_id, why=why):
                log.warning("worker.lost", worker=worker_id, why=why)
                self._metrics.workers_lost.inc()
                for request_id in await self._bus.requeue(self._token, worker_id):
                    log.info("request.requeued", request_id=request_id, worker=worker_id)
            case d.RequeueOne():
                return await self._requeue_one(decision)
            case d.Reject(request_id=request_id, message=message):
                log.info("request.rejected", request_id=request_id, why=message)
                self._metrics.rejections.inc()
                await self._bus.end(request_id, "rejected", "never_fits", message, token=self._token)
            case d.Abort(request_id=request_id, reason=reason, message=message):
                log.info("request.aborted", request_id=request_id, reason=reason)
                self._metrics.aborts.inc()
                await self._bus.end(request_id, reason, _ERROR_KINDS.get(reason, ""), message, token=self._token)
            case d.Recheck(request_ids=request_ids):
                return await self._observe(request_ids)
            case d.WantWorkers(num_workers=num_workers, leaving=leaving):
                log.info("workers.wanted", wanted=num_workers, known=self._policy.num_workers, leaving=leaving)
                self._metrics.wanted_workers.set(num_workers)
                await self._bus.want_workers(self._token, WorkerWish(num_workers=num_workers, leaving=leaving))
            case d.RemoveGateway(gateway_id=gateway_id):
                orphans = await self._bus.remove_gateway(self._token, gateway_id)
                log.warning("gateway.lost", gateway=gateway_id, orphans=len(orphans))
                return d.GatewayRemoved(orphans=tuple(orphans))
        return None

    async def _dispatch(self, decision: d.Dispatch) -> d.Event:
        request_id, worker_id = decision.request_id, decision.worker_id
        outcome = await self._bus.dispatch(self._token, request_id, worker_id, decision.rank, decision.priority)
        failpoint("scheduler.after_dispatch", request_id)
        log.info("request.dispatched", request_id=request_id, worker=worker_id, attempt=outcome.attempt,
                 answer=outcome.answer)  # fmt: skip
        match outcome.answer:
            case DispatchAnswer.OK:
                assert outcome.entry_id is not None
                self._metrics.dispatches.inc()
                return d.DispatchDone(request_id=request_id, attempt=outcome.attempt, entry_id=outcome.entry_id)
            case DispatchAnswer.ENDED:
                return d.Ended(request_ids=(request_id,))
            case DispatchAnswer.NOT_QUEUED:
                return d.DispatchRefused(request_id=request_id)
            case DispatchAnswer.NO_WORKER:
                return d.WorkerLeft(worker_id=worker_id)

    async def _preempt(self, decision: d.Preempt) -> d.Event:
        log.info("request.preempted", request_id=decision.request_id, worker=decision.worker_id,
                 attempt=decision.attempt, report_seq=decision.report_seq, keeps=decision.keeps)  # fmt: skip
        self._metrics.preemptions.inc()
        message = PreemptRequest(
            request_id=decision.request_id,
            attempt=decision.attempt,
            report_seq=decision.report_seq,
            keeps=decision.keeps,
        )
        entry_id = await self._bus.preempt(self._token, decision.worker_id, message)
        return d.PreemptSent(request_id=decision.request_id, entry_id=entry_id)

    async def _requeue_one(self, decision: d.RequeueOne) -> d.Event | None:
        was_owned = await self._bus.requeue_one(self._token, decision.request_id, decision.owner, decision.attempt)
        log.info("request.requeued", request_id=decision.request_id, worker=decision.owner, done=was_owned)
        return await self._observe((decision.request_id,)) if was_owned else None

    def _show(self) -> None:
        self._metrics.is_leader.set(1)
        self._metrics.queue_length.set(self._policy.num_queued)
        self._metrics.requests_running.set(self._policy.num_running)
        self._metrics.workers.set(self._policy.num_workers)


def policy_config(config: SchedulerConfig) -> PolicyConfig:
    """The policy's part of the settings."""
    return PolicyConfig(
        worker_lease_s=config.process.worker_lease_s,
        worker_stall_s=config.scheduling.worker_stall_s,
        orphan_ttl_s=config.orphan_ttl_s,
        max_crashes=config.scheduling.max_crashes,
        max_preemptions=config.scheduling.max_preemptions,
        admission_headroom=config.scheduling.admission_headroom,
        aging_s=config.scheduling.priority_aging_s,
        passing_s=config.scheduling.max_passing_s,
        delay_factor=config.scheduling.scheduler_delay_factor,
        ttft_s=config.scheduling.ttft_target_ms / 1000,
        tpot_s=config.scheduling.tpot_target_ms / 1000,
        tenant_weights=config.scheduling.weights(),
        autoscale=autoscale_config(config.scaling, config.scheduling.ttft_target_ms / 1000),
    )


def autoscale_config(scaling: ScalingConfig, ttft_target_s: float) -> AutoscaleConfig | None:
    """What decides how many workers there should be; None: nobody asks. Raises `ConfigError`."""
    limits = scaling.limits()
    if limits is None:
        return None
    return AutoscaleConfig(
        min_workers=limits.low,
        max_workers=limits.high,
        ttft_target_s=ttft_target_s,
        grow_after_s=scaling.autoscale_grow_after_s,
        shrink_after_s=scaling.autoscale_shrink_after_s,
    )


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception of a group, for the log."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

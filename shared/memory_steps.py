"""The protocol's steps on plain Python objects: what the Lua scripts do, method for script, with the same answers.

Nothing here awaits, so each step is atomic. Messages are encoded as they are in Redis, and publications go out through
`publish`, one for each gateway and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from shared import keys, wire
from shared.bus import (
    BusLimits,
    CommitAnswer,
    CommitItem,
    CommitOutcome,
    DispatchAnswer,
    DispatchOutcome,
    LeaderPulse,
    NewRequest,
    RequestState,
    SubmitAnswer,
    SubmitOutcome,
    WorkItem,
)
from shared.clock import Clock
from shared.errors import LeaderLost
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId, worker_name
from shared.limits import QueueDepth, RefusalReason
from shared.memory_records import MemoryRecord, MemoryStream, MemoryWorker, to_order
from shared.memory_tenants import MemoryTenants
from shared.messages import (
    AbortRequest,
    AdapterCard,
    Message,
    PreemptRequest,
    RequestEnded,
    RunRequest,
    SubmitRequest,
    TokenChunk,
    WorkerHello,
)
from shared.prefix import new_key
from shared.work_time import NO_WORK, WorkTime
from shared.worker_wish import WorkerWish

Boxes = defaultdict[GatewayId, list[Message]]


class MemorySteps:
    """All that Redis would hold, and the steps that change it.

    Args:
        publish: takes a gateway and the messages that one step has for it.
        grown: called after each append to a stream.
    """

    def __init__(
        self,
        limits: BusLimits,
        clock: Clock,
        publish: Callable[[GatewayId, list[Message]], None],
        grown: Callable[[], None],
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._publish = publish
        self._grown = grown
        self.records: dict[RequestId, MemoryRecord] = {}
        self.live: dict[RequestId, MemoryRecord] = {}
        self.idempotency: dict[str, tuple[RequestId, str]] = {}
        self.submits = MemoryStream()
        self.reports = MemoryStream()
        self.leader = LeaderPulse()
        self.workers: dict[WorkerId, MemoryWorker] = {}
        self.gateways: dict[GatewayId, int] = {}
        self.devices: dict[str, WorkerId] = {}
        self.prefix_key = new_key()
        self.cards: dict[str, bytes] = {}
        """The latest one last."""
        self.adapters: dict[str, AdapterCard] = {}
        self.tenants = MemoryTenants()
        self.wish: WorkerWish | None = None
        self.worked: dict[str, WorkTime] = {}

    def append(
        self, stream: MemoryStream, message: Message, request_id: RequestId | None = None, cap: int | None = None
    ) -> EntryId:
        """XADD."""
        entry_id = stream.append(wire.encode(message), request_id, cap=cap)
        self._grown()
        return entry_id

    def submit(self, request: NewRequest) -> SubmitOutcome:
        self._drop_expired()
        summary, key = request.summary, request.idempotency_key
        if summary.request_id in self.records:
            return SubmitOutcome(SubmitAnswer.EXISTS, summary.request_id)
        name = "" if key is None else keys.idempotency(summary.tenant, key)
        if name in self.idempotency:
            first, body_hash = self.idempotency[name]
            is_same = body_hash == request.body_hash
            return SubmitOutcome(SubmitAnswer.EXISTS if is_same else SubmitAnswer.CONFLICT, first)
        if refusal := self._refusal(request):
            return refusal
        entry_id = self.append(self.submits, summary, summary.request_id)
        record = MemoryRecord.of(request, to_order(entry_id), name)
        self.records[summary.request_id] = self.live[summary.request_id] = record
        record.charged = self.tenants.charge(summary, request.tenant_limits)
        if name:
            self.idempotency[name] = (summary.request_id, request.body_hash)
        budget = self.tenants.budget(summary.tenant, request.tenant_limits)
        return SubmitOutcome(SubmitAnswer.NEW, summary.request_id, budget=budget)

    def attach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> bool:
        record = self.live.get(request_id)
        if record is None:
            return False
        if (gateway_id, connection_id) not in record.listeners:
            record.listeners.append((gateway_id, connection_id))
        return True

    def detach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> int:
        record = self.live.get(request_id)
        if record is None:
            return 0
        record.listeners = [pair for pair in record.listeners if pair != (gateway_id, connection_id)]
        return len(record.listeners)

    def stop_choice(self, request_id: RequestId, choice: int, index: int) -> bool:
        record = self.live.get(request_id)
        if record is None or choice >= len(record.choices):
            return False
        chosen = record.choices[choice]
        if chosen.stop_index is not None or index >= chosen.state().num_tokens:
            return False
        chosen.stop_index = index
        if record.num_open == 0:
            self.end(RequestEnded(request_id=request_id, reason="finished"))
        return True

    def end(self, ended: RequestEnded) -> bool:
        """`ended` without its usage, which is counted here."""
        boxes: Boxes = defaultdict(list)
        has_won = self._end(boxes, ended, is_abort=True)
        self._send(boxes)
        return has_won

    def take_lead(self, token: str, seen: LeaderPulse) -> bool:
        if self.leader.token != token and self.leader != seen:
            return False
        if self.leader.token != token:
            self.leader = LeaderPulse(token=token, beat=seen.beat + 1)
            self.tenants.restart_clock()
        return True

    def raise_lead(self, token: str, now_ms: int | None) -> None:
        self.require_lead(token)
        if now_ms is not None:
            self.tenants.advance_clock(now_ms)
        self.leader = LeaderPulse(token=token, beat=self.leader.beat + 1)

    def yield_lead(self, token: str) -> None:
        if self.leader.token == token:
            self.leader = LeaderPulse(token="", beat=self.leader.beat)

    def require_lead(self, token: str) -> None:
        """Raise `LeaderLost` unless `token` leads."""
        if self.leader.token != token:
            raise LeaderLost("the leader token is not this one")

    def dispatch(
        self, token: str, request_id: RequestId, worker_id: WorkerId, rank: int, priority: int = 0
    ) -> DispatchOutcome:
        self.require_lead(token)
        record, worker = self.live.get(request_id), self.workers.get(worker_id)
        if record is None:
            return DispatchOutcome(DispatchAnswer.ENDED)
        if record.state is not RequestState.QUEUED:
            return DispatchOutcome(DispatchAnswer.NOT_QUEUED)
        if worker is None:
            return DispatchOutcome(DispatchAnswer.NO_WORKER)
        record.attempt, record.owner, record.state = record.attempt + 1, worker_id, RequestState.RUNNING
        message = RunRequest(
            request_id=request_id,
            attempt=record.attempt,
            choices=tuple(i for i, choice in enumerate(record.choices) if choice.state().is_open),
            rank=rank,
            crashes=record.crashes,
            priority=priority,
        )
        return DispatchOutcome(DispatchAnswer.OK, self.append(worker.inbox, message, request_id), record.attempt)

    def preempt(self, token: str, worker_id: WorkerId, message: PreemptRequest) -> EntryId:
        self.require_lead(token)
        worker = self.workers.get(worker_id)
        return EntryId("0-0") if worker is None else self.append(worker.inbox, message, message.request_id)

    def requeue(self, token: str, worker_id: WorkerId) -> list[RequestId]:
        self.require_lead(token)
        return self._requeue(worker_id)

    def requeue_one(self, token: str, request_id: RequestId, owner: WorkerId, attempt: int) -> bool:
        self.require_lead(token)
        return self._queue_again(request_id, owner, attempt) is not None

    def remove_gateway(self, token: str, gateway_id: GatewayId) -> list[RequestId]:
        self.require_lead(token)
        for record in self.live.values():
            record.listeners = [pair for pair in record.listeners if pair[0] != gateway_id]
        self.gateways.pop(gateway_id, None)
        return [request_id for request_id, record in self.live.items() if not record.listeners]

    def hello(self, message: WorkerHello) -> None:
        self.workers.setdefault(message.worker_id, MemoryWorker(message)).hello = message
        name = worker_name(message.worker_id)
        for other in [w for w in self.workers if w != message.worker_id and worker_name(w) == name]:
            self._requeue(other)

    def use_card(self, card_id: str, data: bytes | None = None) -> bool:
        data = self.cards.pop(card_id, data)
        if data is None:
            return False
        self.cards[card_id] = data
        named = {worker.hello.card for worker in self.workers.values()}
        for spare in [card for card in self.cards if card not in named][: -keys.SPARE_CARDS]:
            del self.cards[spare]
        return True

    def bye(self, worker_id: WorkerId) -> None:
        self.workers.pop(worker_id, None)
        self.devices = {device: holder for device, holder in self.devices.items() if holder != worker_id}

    def commit(
        self, worker_id: WorkerId, items: Sequence[CommitItem], work: Sequence[WorkItem] = ()
    ) -> list[CommitOutcome]:
        boxes: Boxes = defaultdict(list)
        for item in work:
            self._count_work(item)
        outcomes = [self._commit(boxes, worker_id, commit) for commit in items]
        self._send(boxes)
        return outcomes

    def beat(self, worker_id: WorkerId, num_steps: int, held: Sequence[tuple[RequestId, int]]) -> list[CommitAnswer]:
        worker = self.workers.get(worker_id)
        if worker is None:
            return [CommitAnswer.LOST] * len(held)
        worker.beat, worker.num_steps, worker.num_held = worker.beat + 1, num_steps, len(held)
        return [self._answer_held(worker_id, request_id, attempt) for request_id, attempt in held]

    def release(self, worker_id: WorkerId, request_id: RequestId, attempt: int, *, is_preempted: bool) -> bool:
        record = self._queue_again(request_id, worker_id, attempt)
        if record is None:
            return False
        record.preemptions += is_preempted
        return True

    def claim_device(self, worker_id: WorkerId, device_ids: Sequence[str]) -> str | None:
        own = [device for device in device_ids if self.devices.get(device) == worker_id]
        free = own or [device for device in device_ids if self._is_free(device, worker_id)]
        if not free:
            return None
        self.devices[free[0]] = worker_id
        return free[0]

    def _requeue(self, worker_id: WorkerId) -> list[RequestId]:
        worker = self.workers.get(worker_id)
        suspect = None if worker is None else worker.suspect
        queued = [request_id for request_id, record in self.live.items() if record.owner == worker_id]
        for request_id in queued:
            record = self.live[request_id]
            record.queue_again()
            if suspect is None:
                record.crashes = max(record.crashes, 1)
            elif suspect == request_id:
                record.crashes += 1
        self.bye(worker_id)
        return queued

    def read_queue(self) -> QueueDepth:
        queued = [record.summary for record in self.live.values() if record.state is RequestState.QUEUED]
        return QueueDepth(
            num_sequences=sum(summary.num_choices for summary in queued),
            num_tokens=sum(sum(summary.prompt_lens) for summary in queued),
        )

    def _refusal(self, request: NewRequest) -> SubmitOutcome | None:
        """The limit that keeps `request` out, None if none does."""
        summary, limits, wait_s = request.summary, request.tenant_limits, 0.0
        answer = SubmitAnswer.LIMITED
        most = limits.max_in_flight
        if most is not None and sum(r.summary.tenant == summary.tenant for r in self.live.values()) >= most:
            reason, detail = RefusalReason.TENANT_IN_FLIGHT, f"requests in flight: at most {most}"
        elif lack := self.tenants.find_lack(summary, limits):
            reason, detail, wait_s = lack
        elif full := self._find_full(summary):
            answer, (reason, detail) = SubmitAnswer.FULL, full
        else:
            return None
        return SubmitOutcome(
            answer,
            summary.request_id,
            detail=detail,
            reason=reason,
            wait_s=wait_s,
            queued=self.read_queue(),
            budget=self.tenants.budget(summary.tenant, limits),
        )

    def _find_full(self, summary: SubmitRequest) -> tuple[RefusalReason, str] | None:
        limits, queued = self._limits, self.read_queue()
        if len(self.live) >= limits.max_live_requests:
            return RefusalReason.LIVE_REQUESTS, f"live requests: at most {limits.max_live_requests}"
        reserved = sum(r.summary.num_reserved_tokens for r in self.live.values()) + summary.num_reserved_tokens
        if reserved > limits.max_live_tokens:
            return RefusalReason.LIVE_TOKENS, f"tokens of live requests: at most {limits.max_live_tokens}"
        most = limits.max_queued_requests
        if most is not None and queued.num_sequences and queued.num_sequences + summary.num_choices > most:
            return RefusalReason.QUEUED_REQUESTS, f"queued requests: at most {most}"
        most = limits.max_queued_tokens
        if most is not None and queued.num_sequences and queued.num_tokens + sum(summary.prompt_lens) > most:
            return RefusalReason.QUEUED_TOKENS, f"prompt tokens of queued requests: at most {most}"
        return None

    def _drop_expired(self) -> None:
        now = self._clock.now()
        for request_id in [i for i, r in self.records.items() if r.expires_at is not None and r.expires_at <= now]:
            self.idempotency.pop(self.records.pop(request_id).idempotency, None)

    def _end(self, boxes: Boxes, ended: RequestEnded, *, is_abort: bool) -> bool:
        request_id = ended.request_id
        record = self.live.pop(request_id, None)
        if record is None:
            return False
        was_running, record.state = record.state is RequestState.RUNNING, RequestState.ENDED
        record.ended = RequestEnded(
            request_id=request_id,
            reason=ended.reason,
            prompt_tokens=sum(record.summary.prompt_lens),
            completion_tokens=sum(choice.state().num_tokens for choice in record.choices),
            error_kind=ended.error_kind,
            error_message=ended.error_message,
        )
        used = 0 if record.attempt == 0 else record.ended.prompt_tokens + record.ended.completion_tokens
        self.tenants.refund(record.summary.tenant, record.charged - used)
        record.expires_at = self._clock.now() + self._limits.record_ttl_s
        for gateway_id in record.gateways():
            boxes[gateway_id].append(record.ended)
        self.append(self.reports, record.ended, request_id, cap=keys.REPORTS_CAP)
        worker = self.workers.get(record.owner) if record.owner is not None else None
        if is_abort and was_running and worker is not None:
            self.append(worker.inbox, AbortRequest(request_id=request_id), request_id)
        return True

    def _commit(self, boxes: Boxes, worker_id: WorkerId, item: CommitItem) -> CommitOutcome:
        record = self.records.get(item.request_id)
        if record is None:
            return CommitOutcome(CommitAnswer.LOST)
        choice, last = record.choices[item.choice], item.start + len(item.entries)
        if (record.owner, record.attempt) != (worker_id, item.attempt):
            return CommitOutcome(CommitAnswer.LOST if record.is_live else CommitAnswer.STOP, choice.length)
        if choice.finish and last <= choice.length:
            return CommitOutcome(CommitAnswer.OK, choice.length)
        if not record.is_live or not choice.state().is_open:
            return CommitOutcome(CommitAnswer.STOP, choice.length)
        if item.start > choice.length:
            return CommitOutcome(CommitAnswer.GAP, choice.length)
        if last > choice.length:
            self._append_log(boxes, record, item)
        return CommitOutcome(CommitAnswer.OK, choice.length)

    def _append_log(self, boxes: Boxes, record: MemoryRecord, item: CommitItem) -> None:
        choice = record.choices[item.choice]
        gained = item.entries[choice.length - item.start :]
        chunk = TokenChunk(request_id=item.request_id, offset=len(record.log), data=b"".join(gained))
        record.log += chunk.data
        for gateway_id in record.gateways():
            boxes[gateway_id].append(chunk)
        if len(gained) > bool(item.finish):
            record.crashes = 0
        choice.length += len(gained)
        choice.finish = item.finish
        if record.num_open == 0:
            self._end(boxes, RequestEnded(request_id=item.request_id, reason="finished"), is_abort=False)

    def _count_work(self, item: WorkItem) -> None:
        self._drop_expired()
        record = self.records.get(item.request_id)
        if record is None or item.attempt > record.attempt:
            return
        said, before = WorkTime(item.prefill_us, item.decode_us), record.works.get(item.attempt, NO_WORK)
        more = WorkTime(said.prefill_us - before.prefill_us, said.decode_us - before.decode_us)
        if min(more) < 0 or not any(more):
            return
        record.works[item.attempt] = said
        tenant = record.summary.tenant
        self.worked[tenant] = self.worked.get(tenant, NO_WORK).plus(more)

    def _answer_held(self, worker_id: WorkerId, request_id: RequestId, attempt: int) -> CommitAnswer:
        record = self.records.get(request_id)
        if record is not None and not record.is_live:
            return CommitAnswer.STOP
        return CommitAnswer.OK if record is not None and record.is_held(worker_id, attempt) else CommitAnswer.LOST

    def _is_free(self, device: str, worker_id: WorkerId) -> bool:
        holder = self.devices.get(device)
        if holder is None:
            return True
        return worker_name(holder) == worker_name(worker_id) and holder not in self.workers

    def _queue_again(self, request_id: RequestId, owner: WorkerId, attempt: int) -> MemoryRecord | None:
        record = self.live.get(request_id)
        if record is None or not record.is_held(owner, attempt):
            return None
        record.queue_again()
        return record

    def _send(self, boxes: Boxes) -> None:
        for gateway_id, messages in boxes.items():
            self._publish(gateway_id, messages)

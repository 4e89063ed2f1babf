"""`MemoryBus`: the bus inside one process, for tests and for machines without Redis.

`shared/memory_steps.py` does what the Lua scripts do; here are the waiting, the dead letters and the subscriptions
around it. Everything is gone with this object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from shared import dead_letters, keys, wire
from shared.bus import (
    BusLimits,
    CommitAnswer,
    CommitItem,
    CommitOutcome,
    DispatchOutcome,
    InboxMessage,
    LeaderPulse,
    NewRequest,
    ReportMessage,
    RequestRecord,
    SubmitOutcome,
    WorkerPulse,
    WorkItem,
)
from shared.clock import Clock, MonotonicClock
from shared.errors import WireError
from shared.failpoints import failpoint
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.limits import QueueDepth
from shared.logs import get_log
from shared.memory_records import Entry, MemoryStream, MemorySubscription
from shared.memory_steps import MemorySteps
from shared.messages import (
    AbortRequest,
    AdapterCard,
    Message,
    PreemptRequest,
    RequestBody,
    RequestEnded,
    RunRequest,
    SubmitRequest,
    WorkerHello,
    WorkerReport,
)
from shared.work_time import WorkTime
from shared.worker_wish import WorkerWish

M = TypeVar("M")

log = get_log("bus")


class MemoryBus:
    """See `shared.bus.Bus`, which documents every method."""

    def __init__(self, limits: BusLimits | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self.steps = MemorySteps(limits or BusLimits(), self._clock, self._publish, self.wake_readers)
        self.dead: list[tuple[str, bytes, str]] = []
        self._subscriptions: dict[GatewayId, list[MemorySubscription]] = {}
        self._grown = asyncio.Event()

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        return

    async def bury(self, source: str, data: bytes, why: str) -> None:
        log.warning("message.buried", source=source, size=len(data), why=why)
        self.dead.append((source, data[: dead_letters.MAX_BURIED_BYTES], why))
        del self.dead[: -keys.DEAD_CAP]

    # RequestOps

    async def submit(self, request: NewRequest) -> SubmitOutcome:
        outcome = self.steps.submit(request)
        failpoint("bus.submit.reply")
        return outcome

    async def load_record(self, request_id: RequestId) -> RequestRecord | None:
        record = self.steps.records.get(request_id)
        return None if record is None else record.snapshot()

    async def load_body(self, request_id: RequestId) -> RequestBody | None:
        record = self.steps.records.get(request_id)
        return None if record is None else record.body

    async def read_log(self, request_id: RequestId, offset: int = 0) -> bytes:
        record = self.steps.records.get(request_id)
        return b"" if record is None else bytes(record.log[offset:])

    async def attach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> bool:
        return self.steps.attach(request_id, gateway_id, connection_id)

    async def detach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> int:
        return self.steps.detach(request_id, gateway_id, connection_id)

    async def stop_choice(self, request_id: RequestId, choice: int, index: int) -> bool:
        return self.steps.stop_choice(request_id, choice, index)

    async def end(
        self, request_id: RequestId, reason: str, error_kind: str = "", error_message: str = "", *, token: str = ""
    ) -> bool:
        if token:
            self.steps.require_lead(token)
        ended = RequestEnded(request_id=request_id, reason=reason, error_kind=error_kind, error_message=error_message)
        return self.steps.end(ended)

    # LeaderOps

    async def read_leader(self) -> LeaderPulse:
        return self.steps.leader

    async def take_lead(self, token: str, seen: LeaderPulse) -> bool:
        return self.steps.take_lead(token, seen)

    async def raise_lead(self, token: str, now_ms: int | None = None) -> None:
        self.steps.raise_lead(token, now_ms)

    async def yield_lead(self, token: str) -> None:
        self.steps.yield_lead(token)

    async def read_submits(self, consumer: str, count: int, block_ms: int) -> list[tuple[EntryId, SubmitRequest]]:
        submits = self.steps.submits
        entries = await self._wait(lambda: submits.deliver(count, self._clock.now()), block_ms)
        return await self._decode(keys.SUBMIT, submits, entries, (SubmitRequest,))

    async def claim_submits(self, consumer: str, min_idle_ms: int, count: int) -> list[tuple[EntryId, SubmitRequest]]:
        submits = self.steps.submits
        entries = submits.claim(count, self._clock.now(), min_idle_ms / 1000)
        return await self._decode(keys.SUBMIT, submits, entries, (SubmitRequest,))

    async def ack_submits(self, entry_ids: Sequence[EntryId]) -> None:
        for entry_id in entry_ids:
            self.steps.submits.delete(entry_id)

    async def list_live(self) -> set[RequestId]:
        return set(self.steps.live)

    async def load_records(self, request_ids: Sequence[RequestId]) -> list[RequestRecord | None]:
        return [await self.load_record(request_id) for request_id in request_ids]

    async def dispatch(
        self, token: str, request_id: RequestId, worker_id: WorkerId, rank: int, priority: int = 0
    ) -> DispatchOutcome:
        return self.steps.dispatch(token, request_id, worker_id, rank, priority)

    async def preempt(self, token: str, worker_id: WorkerId, message: PreemptRequest) -> EntryId:
        return self.steps.preempt(token, worker_id, message)

    async def requeue(self, token: str, worker_id: WorkerId) -> list[RequestId]:
        return self.steps.requeue(token, worker_id)

    async def requeue_one(self, token: str, request_id: RequestId, owner: WorkerId, attempt: int) -> bool:
        return self.steps.requeue_one(token, request_id, owner, attempt)

    async def read_reports(self, after: EntryId, count: int, block_ms: int) -> list[tuple[EntryId, ReportMessage]]:
        reports = self.steps.reports
        start = reports.last_id() if after == "$" else after
        entries = await self._wait(lambda: reports.read(start, count), block_ms)
        return await self._decode(keys.REPORTS, reports, entries, (WorkerReport, RequestEnded))

    async def read_gateways(self) -> dict[GatewayId, int]:
        return dict(self.steps.gateways)

    async def remove_gateway(self, token: str, gateway_id: GatewayId) -> list[RequestId]:
        return self.steps.remove_gateway(token, gateway_id)

    async def want_workers(self, token: str, wish: WorkerWish) -> None:
        self.steps.require_lead(token)
        self.steps.wish = wish

    # WorkerOps

    async def hello(self, message: WorkerHello) -> None:
        self.steps.hello(message)

    async def use_card(self, card_id: str) -> bool:
        return self.steps.use_card(card_id)

    async def put_card(self, card_id: str, data: bytes) -> None:
        self.steps.use_card(card_id, data)

    async def bye(self, worker_id: WorkerId) -> None:
        self.steps.bye(worker_id)

    async def read_inbox(
        self, worker_id: WorkerId, after: EntryId, count: int, block_ms: int
    ) -> list[tuple[EntryId, InboxMessage]]:
        entries = await self._wait(lambda: self._inbox(worker_id).read(after, count), block_ms)
        kinds = (RunRequest, PreemptRequest, AbortRequest)
        return await self._decode(keys.inbox(worker_id), self._inbox(worker_id), entries, kinds)

    async def ack_inbox(self, worker_id: WorkerId, entry_ids: Sequence[EntryId]) -> None:
        for entry_id in entry_ids:
            self._inbox(worker_id).delete(entry_id)

    async def commit(
        self, worker_id: WorkerId, items: Sequence[CommitItem], work: Sequence[WorkItem] = ()
    ) -> list[CommitOutcome]:
        outcomes = self.steps.commit(worker_id, items, work)
        failpoint("bus.commit.reply")
        return outcomes

    async def beat(
        self, worker_id: WorkerId, num_steps: int, held: Sequence[tuple[RequestId, int]]
    ) -> list[CommitAnswer]:
        return self.steps.beat(worker_id, num_steps, held)

    async def release(self, worker_id: WorkerId, request_id: RequestId, attempt: int, *, is_preempted: bool) -> bool:
        return self.steps.release(worker_id, request_id, attempt, is_preempted=is_preempted)

    async def mark_suspect(self, worker_id: WorkerId, request_id: RequestId | None) -> None:
        if worker_id in self.steps.workers:
            self.steps.workers[worker_id].suspect = request_id

    async def report(self, message: WorkerReport) -> None:
        self.steps.append(self.steps.reports, message, cap=keys.REPORTS_CAP)

    async def claim_device(self, worker_id: WorkerId, device_ids: Sequence[str]) -> str | None:
        return self.steps.claim_device(worker_id, device_ids)

    async def read_workers(self) -> list[WorkerPulse]:
        return [worker.pulse() for worker in self.steps.workers.values()]

    async def read_wish(self) -> WorkerWish | None:
        return self.steps.wish

    # AdapterOps

    async def put_adapter(self, card: AdapterCard) -> None:
        self.steps.adapters[card.name] = card

    async def drop_adapter(self, name: str) -> bool:
        return self.steps.adapters.pop(name, None) is not None

    async def read_adapters(self) -> dict[str, AdapterCard]:
        return dict(self.steps.adapters)

    # GatewayOps

    async def gateway_beat(self, gateway_id: GatewayId) -> None:
        self.steps.gateways[gateway_id] = self.steps.gateways.get(gateway_id, 0) + 1

    async def gateway_bye(self, gateway_id: GatewayId) -> None:
        self.steps.gateways.pop(gateway_id, None)

    async def load_card(self, card_id: str) -> bytes | None:
        return self.steps.cards.get(card_id)

    async def read_queue(self) -> QueueDepth:
        return self.steps.read_queue()

    async def read_worked(self) -> dict[str, WorkTime]:
        return dict(sorted(self.steps.worked.items()))

    def subscribe(self, gateway_id: GatewayId) -> MemorySubscription:
        subscription = MemorySubscription()
        self._subscriptions.setdefault(gateway_id, []).append(subscription)
        return subscription

    async def prefix_key(self) -> bytes:
        return self.steps.prefix_key

    def wake_readers(self) -> None:
        """Let those who wait for a stream look again."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def _inbox(self, worker_id: WorkerId) -> MemoryStream:
        """The worker's inbox; an empty one when it is gone."""
        worker = self.steps.workers.get(worker_id)
        return MemoryStream() if worker is None else worker.inbox

    async def _wait(self, read: Callable[[], list[Entry]], block_ms: int) -> list[Entry]:
        entries = read()
        try:
            async with asyncio.timeout(block_ms / 1000):
                while not entries and block_ms > 0:
                    await self._grown.wait()
                    entries = read()
        except TimeoutError:
            return []
        return entries

    async def _decode(
        self, source: str, stream: MemoryStream, entries: list[Entry], kinds: tuple[type[M], ...]
    ) -> list[tuple[EntryId, M]]:
        messages: list[tuple[EntryId, M]] = []
        for entry in entries:
            try:
                messages.append((entry.id, wire.decode(entry.data, *kinds)))
            except WireError as error:
                await self.bury(source, entry.data, str(error))
                await self._fail_named(entry)
                stream.delete(entry.id)
        return messages

    async def _fail_named(self, entry: Entry) -> None:
        request_id = entry.request_id or dead_letters.named_request(entry.data)
        if request_id is not None:
            await self.end(request_id, dead_letters.END_REASON, dead_letters.ERROR_KIND, dead_letters.ERROR_MESSAGE)

    def _publish(self, gateway_id: GatewayId, messages: list[Message]) -> None:
        data = wire.encode_batch(messages)
        open_ones = [s for s in self._subscriptions.get(gateway_id, []) if not s.is_closed]
        self._subscriptions[gateway_id] = open_ones
        for subscription in open_ones:
            subscription.publish(data)

"""What `MemoryBus` keeps: records, streams of bytes, and subscriptions. No step of the protocol is here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

from shared import wire
from shared.bus import ChannelMessage, ChoiceState, NewRequest, RequestRecord, RequestState, Subscribed, WorkerPulse
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.messages import RequestBody, RequestEnded, SubmitRequest, TokenChunk, WorkerHello
from shared.work_time import NO_WORK, WorkTime

Order = tuple[int, int]


def to_order(entry_id: str) -> Order:
    """An entry id "a-b" (or "a") as something that can be compared."""
    first, _, second = entry_id.partition("-")
    return int(first), int(second or 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """One stream entry: the message's bytes and the request it is about, None when its writer did not say."""

    id: EntryId
    data: bytes
    request_id: RequestId | None = None


class MemoryStream:
    """An append-only list of entries with rising ids, and what one consumer group has pending."""

    def __init__(self) -> None:
        self._entries: dict[EntryId, Entry] = {}
        self._last = 0
        self._delivered = 0
        self.pending: dict[EntryId, float] = {}

    def append(self, data: bytes, request_id: RequestId | None = None, *, cap: int | None = None) -> EntryId:
        """Add an entry, dropping the oldest beyond `cap`."""
        self._last += 1
        entry = Entry(EntryId(f"{self._last}-0"), data, request_id)
        self._entries[entry.id] = entry
        while cap is not None and len(self._entries) > cap:
            del self._entries[next(iter(self._entries))]
        return entry.id

    def last_id(self) -> EntryId:
        """The id of the newest entry there ever was."""
        return EntryId(f"{self._last}-0")

    def read(self, after: EntryId, count: int) -> list[Entry]:
        """Entries after `after`."""
        return [e for e in self._entries.values() if to_order(e.id) > to_order(after)][:count]

    def deliver(self, count: int, now: float) -> list[Entry]:
        """Entries that the group has not seen; they are pending from now on."""
        entries = self.read(EntryId(f"{self._delivered}-0"), count)
        for entry in entries:
            self._delivered = to_order(entry.id)[0]
            self.pending[entry.id] = now
        return entries

    def claim(self, count: int, now: float, min_idle_s: float) -> list[Entry]:
        """Pending entries that were delivered `min_idle_s` ago; their time starts anew."""
        idle = [i for i, since in self.pending.items() if now - since >= min_idle_s and i in self._entries][:count]
        for entry_id in idle:
            self.pending[entry_id] = now
        return [self._entries[i] for i in idle]

    def delete(self, entry_id: EntryId) -> None:
        """Ack and remove an entry."""
        self.pending.pop(entry_id, None)
        self._entries.pop(entry_id, None)

    def __len__(self) -> int:
        return len(self._entries)


@dataclass(slots=True)
class MemoryChoice:
    """One choice: entries logged, stop index, finish reason."""

    length: int = 0
    stop_index: int | None = None
    finish: str = ""

    def state(self) -> ChoiceState:
        return ChoiceState(num_entries=self.length, stop_index=self.stop_index, finish=self.finish)


@dataclass(slots=True)
class MemoryRecord:
    """One request, as the hash `req:{id}` holds it."""

    summary: SubmitRequest
    body: RequestBody
    order: Order
    listeners: list[tuple[GatewayId, ConnectionId]]
    orphan_ttl_s: float
    idempotency: str
    choices: list[MemoryChoice]
    state: RequestState = RequestState.QUEUED
    attempt: int = 0
    owner: WorkerId | None = None
    preemptions: int = 0
    crashes: int = 0
    log: bytearray = field(default_factory=bytearray)
    ended: RequestEnded | None = None
    expires_at: float | None = None
    charged: int = 0
    works: dict[int, WorkTime] = field(default_factory=dict)

    @classmethod
    def of(cls, request: NewRequest, order: Order, idempotency: str) -> MemoryRecord:
        """The record of a request just submitted."""
        return cls(
            summary=request.summary,
            body=request.body,
            order=order,
            listeners=[(request.gateway_id, request.connection_id)],
            orphan_ttl_s=request.orphan_ttl_s,
            idempotency=idempotency,
            choices=[MemoryChoice() for _ in range(request.summary.num_choices)],
        )

    @property
    def is_live(self) -> bool:
        return self.state is not RequestState.ENDED

    @property
    def num_open(self) -> int:
        return sum(choice.state().is_open for choice in self.choices)

    def is_held(self, worker_id: WorkerId, attempt: int) -> bool:
        """Whether it runs, on this worker, as this attempt."""
        return self.state is RequestState.RUNNING and (self.owner, self.attempt) == (worker_id, attempt)

    def queue_again(self) -> None:
        """Running → queued."""
        self.state, self.owner = RequestState.QUEUED, None

    def gateways(self) -> list[GatewayId]:
        """Those with listeners, each once."""
        return list(dict.fromkeys(gateway for gateway, _ in self.listeners))

    def snapshot(self) -> RequestRecord:
        """What readers see."""
        return RequestRecord(
            summary=self.summary,
            state=self.state,
            order=self.order,
            attempt=self.attempt,
            owner=self.owner,
            listeners=tuple(self.listeners),
            orphan_ttl_s=self.orphan_ttl_s,
            preemptions=self.preemptions,
            crashes=self.crashes,
            choices=tuple(choice.state() for choice in self.choices),
            ended=self.ended,
            worked=reduce(WorkTime.plus, self.works.values(), NO_WORK),
        )


class MemoryWorker:
    """Fields and inbox of one worker."""

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.beat = 0
        self.num_steps = 0
        self.num_held = 0
        self.suspect: RequestId | None = None
        self.inbox = MemoryStream()

    def pulse(self) -> WorkerPulse:
        return WorkerPulse(hello=self.hello, beat=self.beat, num_steps=self.num_steps, has_work=self.num_held > 0)


class MemorySubscription:
    """See `shared.bus.Subscription`."""

    def __init__(self) -> None:
        self.deliver: Callable[[list[ChannelMessage]], None] | None = None  # `next` returns everything here
        self._queue: asyncio.Queue[bytes | Subscribed] = asyncio.Queue()
        self._queue.put_nowait(Subscribed())
        self.is_closed = False

    def publish(self, data: bytes) -> None:
        """Hand one publication over."""
        self._queue.put_nowait(data)

    def interrupt(self) -> None:
        """As a lost connection does: what was not read yet is gone, and the subscription is confirmed anew."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(Subscribed())

    async def next(self, timeout_s: float) -> list[ChannelMessage] | Subscribed | None:
        try:
            async with asyncio.timeout(max(timeout_s, 0.001)):
                event = await self._queue.get()
        except TimeoutError:
            return None
        return event if isinstance(event, Subscribed) else wire.decode_batch(event, TokenChunk, RequestEnded)

    async def close(self) -> None:
        self.is_closed = True

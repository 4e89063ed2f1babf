"""`RedisBus`: the bus on Redis, one script per step of the protocol.

Here each step's arguments are put together and its reply is read; what a step does is in `shared/redis_scripts.py`,
what it means in `shared/bus.py`. Nothing here keeps state about requests: two buses on one Redis are as good as one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache

import msgpack

from shared import dead_letters, keys, wire
from shared import redis_scripts as scripts
from shared.bus import (
    Bus,
    BusLimits,
    CommitAnswer,
    CommitItem,
    CommitOutcome,
    DispatchAnswer,
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
from shared.errors import WireError
from shared.failpoints import failpoint
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId, worker_name
from shared.limits import QueueDepth
from shared.messages import (
    AbortRequest,
    AdapterCard,
    PreemptRequest,
    RequestBody,
    RequestEnded,
    RunRequest,
    SubmitRequest,
    WorkerHello,
    WorkerReport,
)
from shared.prefix import new_key
from shared.redis_link import RedisLink
from shared.redis_records import parse_outcome, parse_record, submit_arguments
from shared.redis_streams import RedisStreams
from shared.redis_subscription import RedisSubscription
from shared.work_time import WorkTime
from shared.worker_wish import WorkerWish

COMMIT_ANSWERS = (CommitAnswer.OK, CommitAnswer.GAP, CommitAnswer.STOP, CommitAnswer.LOST)
WORK_PHASES = ("prefill", "decode")
RECORDS_PER_CALL = 200
"""Records that one script loads: bounds how long it keeps Redis from other callers (about a millisecond)."""
MEMORY_SAMPLE_S = 1.0

_pack = msgpack.Packer(use_bin_type=False).pack
"""For Lua: cmsgpack does not know the bin type, so bytes go as strings."""


def open_bus(url: str, limits: BusLimits | None = None) -> Bus:
    """The bus at `url`; connects at first use. Raises `ConfigError` when `url` is none."""
    return RedisBus(url, limits or BusLimits())


class RedisBus:
    """See `shared.bus.Bus`, which documents every method."""

    def __init__(self, url: str, limits: BusLimits) -> None:
        self._link = RedisLink(url)
        self._limits = limits
        self._streams = RedisStreams(self._link, self._fail_unreadable)
        self._memory_sampled_at = float("-inf")
        self._memory_high = ""

    async def ping(self) -> None:
        await self._link.call("PING")

    async def close(self) -> None:
        await self._link.close()

    async def bury(self, source: str, data: bytes, why: str) -> None:
        await self._streams.bury(source, data, why)

    # RequestOps

    async def submit(self, request: NewRequest) -> SubmitOutcome:
        arguments = submit_arguments(request, self._limits, await self._memory_limit())
        reply = await self._link.run(scripts.SUBMIT, *arguments)
        failpoint("bus.submit.reply")
        return parse_outcome(reply)

    async def load_record(self, request_id: RequestId) -> RequestRecord | None:
        return (await self.load_records([request_id]))[0]

    async def load_body(self, request_id: RequestId) -> RequestBody | None:
        data = await self._link.call("HGET", keys.record(request_id), "body")
        if data is None:
            return None
        try:
            return wire.decode(data, RequestBody)
        except WireError as error:
            await self._bury_record(request_id, data, str(error))
            return None

    async def read_log(self, request_id: RequestId, offset: int = 0) -> bytes:
        data: bytes = await self._link.call("GETRANGE", keys.log(request_id), offset, -1)
        return data

    async def attach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> bool:
        return bool(await self._link.run(scripts.ATTACH, request_id, gateway_id, connection_id))

    async def detach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> int:
        return int(await self._link.run(scripts.DETACH, request_id, gateway_id, connection_id))

    async def stop_choice(self, request_id: RequestId, choice: int, index: int) -> bool:
        return bool(await self._link.run(scripts.STOP_CHOICE, request_id, choice, index))

    async def end(
        self, request_id: RequestId, reason: str, error_kind: str = "", error_message: str = "", *, token: str = ""
    ) -> bool:
        return bool(await self._link.run(scripts.END, request_id, reason, error_kind, error_message, token))

    # LeaderOps

    async def read_leader(self) -> LeaderPulse:
        token, beat = await self._link.call("HMGET", keys.LEADER, "token", "beat")
        return LeaderPulse(token=(token or b"").decode("latin-1"), beat=_count(beat))

    async def take_lead(self, token: str, seen: LeaderPulse) -> bool:
        return bool(await self._link.run(scripts.TAKE_LEAD, token, seen.token.encode("latin-1"), seen.beat))

    async def raise_lead(self, token: str, now_ms: int | None = None) -> None:
        await self._link.run(scripts.RAISE_LEAD, token, "" if now_ms is None else now_ms)

    async def yield_lead(self, token: str) -> None:
        await self._link.run(scripts.YIELD_LEAD, token)

    async def read_submits(self, consumer: str, count: int, block_ms: int) -> list[tuple[EntryId, SubmitRequest]]:
        return await self._streams.read_group(keys.SUBMIT, (SubmitRequest,), consumer, count, block_ms)

    async def claim_submits(self, consumer: str, min_idle_ms: int, count: int) -> list[tuple[EntryId, SubmitRequest]]:
        return await self._streams.claim(keys.SUBMIT, (SubmitRequest,), consumer, min_idle_ms, count)

    async def ack_submits(self, entry_ids: Sequence[EntryId]) -> None:
        if entry_ids:
            await self._link.run(scripts.ACK_SUBMITS, keys.SUBMIT_GROUP, *entry_ids)

    async def list_live(self) -> set[RequestId]:
        names = await self._link.call("SMEMBERS", keys.LIVE)
        foreign = [name for name in names if not name.isascii()]
        if foreign:
            await self._link.call("SREM", keys.LIVE, *foreign)
        return {RequestId(name.decode()) for name in names if name.isascii()}

    async def load_records(self, request_ids: Sequence[RequestId]) -> list[RequestRecord | None]:
        records: list[RequestRecord | None] = []
        for first in range(0, len(request_ids), RECORDS_PER_CALL):
            names = request_ids[first : first + RECORDS_PER_CALL]
            rows = await self._link.run(scripts.LOAD_RECORDS, *names)
            for name, row in zip(names, rows, strict=True):
                try:
                    records.append(None if row is None else parse_record(name, row))
                except WireError as error:
                    await self._bury_record(name, row[0] or b"", str(error))
                    records.append(None)
        return records

    async def dispatch(
        self, token: str, request_id: RequestId, worker_id: WorkerId, rank: int, priority: int = 0
    ) -> DispatchOutcome:
        answer, *entry = await self._link.run(scripts.DISPATCH, token, request_id, worker_id, rank, priority)
        if not entry:
            return DispatchOutcome(DispatchAnswer(answer.decode()))
        return DispatchOutcome(DispatchAnswer.OK, EntryId(entry[0].decode()), entry[1])

    async def preempt(self, token: str, worker_id: WorkerId, message: PreemptRequest) -> EntryId:
        entry = await self._link.run(scripts.PREEMPT, token, worker_id, message.request_id, wire.encode(message))
        return EntryId(entry.decode())

    async def requeue(self, token: str, worker_id: WorkerId) -> list[RequestId]:
        return [RequestId(name.decode()) for name in await self._link.run(scripts.REQUEUE, token, worker_id)]

    async def requeue_one(self, token: str, request_id: RequestId, owner: WorkerId, attempt: int) -> bool:
        return bool(await self._link.run(scripts.REQUEUE_ONE, token, request_id, owner, attempt))

    async def read_reports(self, after: EntryId, count: int, block_ms: int) -> list[tuple[EntryId, ReportMessage]]:
        return await self._streams.read(keys.REPORTS, (WorkerReport, RequestEnded), after, count, block_ms)

    async def read_gateways(self) -> dict[GatewayId, int]:
        fields = await self._read_hash(keys.GATEWAYS)
        beats = {name.removeprefix("beat:"): beat for name, beat in fields.items() if name.startswith("beat:")}
        return {GatewayId(name): _count(beat) for name, beat in beats.items()}

    async def remove_gateway(self, token: str, gateway_id: GatewayId) -> list[RequestId]:
        return [RequestId(name.decode()) for name in await self._link.run(scripts.REMOVE_GATEWAY, token, gateway_id)]

    async def want_workers(self, token: str, wish: WorkerWish) -> None:
        await self._link.run(scripts.WANT_WORKERS, token, wish.num_workers, " ".join(wish.leaving))

    # WorkerOps

    async def hello(self, message: WorkerHello) -> None:
        names = (message.worker_id, worker_name(message.worker_id))
        await self._link.run(scripts.HELLO, *names, wire.encode(message), message.card)

    async def use_card(self, card_id: str) -> bool:
        return bool(await self._link.run(scripts.USE_CARD, card_id))

    async def put_card(self, card_id: str, data: bytes) -> None:
        await self._link.run(scripts.USE_CARD, card_id, data)

    async def bye(self, worker_id: WorkerId) -> None:
        await self._link.run(scripts.BYE, worker_id)

    async def read_inbox(
        self, worker_id: WorkerId, after: EntryId, count: int, block_ms: int
    ) -> list[tuple[EntryId, InboxMessage]]:
        kinds = (RunRequest, PreemptRequest, AbortRequest)
        return await self._streams.read(keys.inbox(worker_id), kinds, after, count, block_ms)

    async def ack_inbox(self, worker_id: WorkerId, entry_ids: Sequence[EntryId]) -> None:
        if entry_ids:
            await self._link.call("XDEL", keys.inbox(worker_id), *entry_ids)

    async def commit(
        self, worker_id: WorkerId, items: Sequence[CommitItem], work: Sequence[WorkItem] = ()
    ) -> list[CommitOutcome]:
        arguments = (worker_id, _pack(items), _pack(work)) if work else (worker_id, _pack(items))
        reply = await self._link.run(scripts.COMMIT, *arguments)
        failpoint("bus.commit.reply")
        pairs = zip(reply[::2], reply[1::2], strict=True)
        return [CommitOutcome(COMMIT_ANSWERS[code], length) for code, length in pairs]

    async def beat(
        self, worker_id: WorkerId, num_steps: int, held: Sequence[tuple[RequestId, int]]
    ) -> list[CommitAnswer]:
        return [COMMIT_ANSWERS[code] for code in await self._link.run(scripts.BEAT, worker_id, num_steps, _pack(held))]

    async def release(self, worker_id: WorkerId, request_id: RequestId, attempt: int, *, is_preempted: bool) -> bool:
        return bool(await self._link.run(scripts.RELEASE, worker_id, request_id, attempt, int(is_preempted)))

    async def mark_suspect(self, worker_id: WorkerId, request_id: RequestId | None) -> None:
        await self._link.run(scripts.MARK_SUSPECT, worker_id, request_id or "")

    async def report(self, message: WorkerReport) -> None:
        entry = ("MAXLEN", "~", keys.REPORTS_CAP, "*", "d", wire.encode(message))
        await self._link.call("XADD", keys.REPORTS, *entry)

    async def claim_device(self, worker_id: WorkerId, device_ids: Sequence[str]) -> str | None:
        device = await self._link.run(scripts.CLAIM_DEVICE, worker_id, worker_name(worker_id), *device_ids)
        return None if device is None else str(device.decode())

    async def read_workers(self) -> list[WorkerPulse]:
        fields = await self._read_hash(keys.WORKERS)
        pulses = []
        for name, data in fields.items():
            kind, _, worker = name.partition(":")
            if kind != "hello":
                continue
            try:
                pulses.append(_to_pulse(_decode_hello(data), worker, fields))
            except WireError as error:
                await self.bury(keys.WORKERS, data, str(error))
                await self._link.call("HDEL", keys.WORKERS, name)
        return pulses

    async def read_wish(self) -> WorkerWish | None:
        wanted, leaving = await self._link.call("HMGET", keys.WISH, "num_workers", "leaving")
        if wanted is None:
            return None
        names = (leaving or b"").decode(errors="replace").split()
        return WorkerWish(num_workers=_count(wanted), leaving=tuple(map(WorkerId, names)))

    async def prefix_key(self) -> bytes:
        return bytes(await self._link.run(scripts.PREFIX_KEY, new_key()))

    # AdapterOps

    async def put_adapter(self, card: AdapterCard) -> None:
        await self._link.call("HSET", keys.ADAPTERS, card.name, wire.encode(card))

    async def drop_adapter(self, name: str) -> bool:
        return bool(await self._link.call("HDEL", keys.ADAPTERS, name))

    async def read_adapters(self) -> dict[str, AdapterCard]:
        cards = {}
        for name, data in (await self._read_hash(keys.ADAPTERS)).items():
            try:
                cards[name] = wire.decode(data, AdapterCard)
            except WireError as error:
                await self.bury(keys.ADAPTERS, data, str(error))
                await self._link.call("HDEL", keys.ADAPTERS, name)
        return cards

    # GatewayOps

    async def gateway_beat(self, gateway_id: GatewayId) -> None:
        await self._link.run(scripts.GATEWAY_BEAT, gateway_id)

    async def gateway_bye(self, gateway_id: GatewayId) -> None:
        await self._link.call("HDEL", keys.GATEWAYS, f"beat:{gateway_id}")

    async def load_card(self, card_id: str) -> bytes | None:
        data: bytes | None = await self._link.wait("GET", keys.card(card_id))  # large: not between other commands
        return data

    async def read_queue(self) -> QueueDepth:
        num_sequences, num_tokens = await self._link.call("HMGET", keys.QUEUE, "sequences", "tokens")
        return QueueDepth(num_sequences=_count(num_sequences), num_tokens=_count(num_tokens))

    async def read_worked(self) -> dict[str, WorkTime]:
        fields = await self._read_hash(keys.WORKED)
        tenants = {tenant for phase, _, tenant in (name.partition(":") for name in fields) if phase in WORK_PHASES}
        return {t: WorkTime(*(_count(fields.get(f"{phase}:{t}")) for phase in WORK_PHASES)) for t in sorted(tenants)}

    def subscribe(self, gateway_id: GatewayId) -> RedisSubscription:
        return RedisSubscription(self._link, self._streams, gateway_id)

    async def _read_hash(self, key: str) -> dict[str, bytes]:
        flat = await self._link.call("HGETALL", key)
        return {name.decode(errors="replace"): value for name, value in zip(flat[::2], flat[1::2], strict=True)}

    async def _fail_unreadable(self, request_id: RequestId) -> None:
        await self.end(request_id, dead_letters.END_REASON, dead_letters.ERROR_KIND, dead_letters.ERROR_MESSAGE)

    async def _bury_record(self, request_id: RequestId, data: bytes, why: str) -> None:
        """A record that cannot be read ends; it is buried by the one caller that ended it."""
        if await self.end(request_id, dead_letters.END_REASON, dead_letters.ERROR_KIND, dead_letters.ERROR_MESSAGE):
            await self.bury(keys.record(request_id), data, why)

    async def _memory_limit(self) -> str:
        """Why new work must be refused for memory, "" when it need not; asks Redis at most every second."""
        now = time.monotonic()
        if now - self._memory_sampled_at >= MEMORY_SAMPLE_S:
            self._memory_sampled_at = now
            lines = (await self._link.call("INFO", "memory")).decode().splitlines()
            info = dict(line.split(":", 1) for line in lines if ":" in line)
            used, most = int(info["used_memory"]), int(info.get("maxmemory", 0))
            is_high = most > 0 and used > self._limits.max_memory_fraction * most
            self._memory_high = f"memory of Redis: {used} of {most} bytes used" if is_high else ""
        return self._memory_high


@lru_cache(maxsize=1024)
def _decode_hello(data: bytes) -> WorkerHello:
    """Everybody looks at the workers several times a second, and what one says of itself stays the same."""
    return wire.decode(data, WorkerHello)


def _to_pulse(hello: WorkerHello, worker: str, fields: dict[str, bytes]) -> WorkerPulse:
    return WorkerPulse(
        hello=hello,
        beat=_count(fields.get(f"beat:{worker}")),
        num_steps=_count(fields.get(f"steps:{worker}")),
        has_work=_count(fields.get(f"held:{worker}")) > 0,
    )


def _count(data: bytes | None) -> int:
    """A counter; one that is no number stands at 0 until its owner raises it."""
    return int(data) if data is not None and data.isdigit() and len(data) < 20 else 0

"""A small cell for contract tests: two workers, a leader, a gateway; and windows into what a bus keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from shared import keys, log
from shared.bus import Bus, CommitItem, CommitOutcome, NewRequest, RequestRecord
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId, new_request_id
from shared.limits import UNLIMITED, TenantLimits
from shared.memory_bus import MemoryBus
from shared.messages import RequestBody, SamplingParams, SubmitRequest, WorkerHello, WorkerReport

TOKEN = "leader-token"
W1, W2 = WorkerId("w1:aa"), WorkerId("w2:bb")
G1, G2 = GatewayId("g1:aa"), GatewayId("g2:bb")
C1, C2 = ConnectionId("c1"), ConnectionId("c2")


def make_hello(worker_id: WorkerId = W1) -> WorkerHello:
    return WorkerHello(
        worker_id=worker_id,
        model="tiny",
        fingerprint="f",
        dtype="float32",
        device="cpu",
        max_model_len=64,
        block_size=4,
        num_blocks=16,
        max_num_seqs=4,
        pid=1,
        host="here",
    )


def make_report(worker_id: WorkerId = W1, seq: int = 1) -> WorkerReport:
    return WorkerReport(worker_id=worker_id, seq=seq, last_inbox_id="0-0", free_blocks=16, num_blocks=16, num_steps=0)


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """What tests vary in a request."""

    prompt_lens: tuple[int, ...] = (3,)
    n: int = 1
    max_tokens: int = 8
    tenant: str = "tenant"
    orphan_ttl_s: float = 0.0
    idempotency_key: str | None = None
    body_hash: str = ""
    tenant_limits: TenantLimits = UNLIMITED
    request_id: RequestId = field(default_factory=lambda: new_request_id("completion"))


def make_request(spec: RequestSpec) -> NewRequest:
    summary = SubmitRequest(
        request_id=spec.request_id,
        tenant=spec.tenant,
        model="tiny",
        fingerprint="f",
        prompt_lens=spec.prompt_lens,
        n=spec.n,
        max_tokens=spec.max_tokens,
    )
    body = RequestBody(
        kind="completion",
        model="tiny",
        created=1,
        prompts=tuple((7,) * length for length in spec.prompt_lens),
        n=spec.n,
        sampling=SamplingParams(seed=2**63 - 1, max_tokens=spec.max_tokens, logit_bias=((5, -1.5),)),
    )
    return NewRequest(
        summary=summary,
        body=body,
        gateway_id=G1,
        connection_id=C1,
        orphan_ttl_s=spec.orphan_ttl_s,
        idempotency_key=spec.idempotency_key,
        body_hash=spec.body_hash,
        tenant_limits=spec.tenant_limits,
    )


def tokens(choice: int, *token_ids: int) -> tuple[bytes, ...]:
    return tuple(log.encode_entry(log.TokenEntry(choice, token_id)) for token_id in token_ids)


def finish(choice: int, reason: str = "stop") -> bytes:
    return log.encode_entry(log.FinishEntry(choice, reason))


@dataclass(frozen=True)
class Cell:
    """A bus with two workers that said hello and a leader."""

    bus: Bus

    @classmethod
    async def start(cls, bus: Bus) -> Cell:
        await bus.hello(make_hello(W1))
        await bus.hello(make_hello(W2))
        assert await bus.take_lead(TOKEN, await bus.read_leader())
        return cls(bus)

    async def submit(self, **spec: Any) -> RequestId:
        """A new request, listened to by (G1, C1)."""
        outcome = await self.bus.submit(make_request(RequestSpec(**spec)))
        assert outcome.answer == "new"
        return outcome.request_id

    async def dispatch(self, request_id: RequestId, worker_id: WorkerId = W1) -> int:
        """The attempt that runs now."""
        outcome = await self.bus.dispatch(TOKEN, request_id, worker_id, 1)
        assert outcome.answer == "ok"
        return outcome.attempt

    async def run(self, **spec: Any) -> RequestId:
        """A request that runs as attempt 1 on W1."""
        request_id = await self.submit(**spec)
        assert await self.dispatch(request_id) == 1
        return request_id

    async def commit(
        self, request_id: RequestId, start: int, *token_ids: int, reason: str = "", choice: int = 0, attempt: int = 1
    ) -> CommitOutcome:
        """One choice's step on W1; `reason` adds the finish entry."""
        item = make_item(request_id, start, *token_ids, reason=reason, choice=choice, attempt=attempt)
        return (await self.bus.commit(W1, [item]))[0]

    async def record(self, request_id: RequestId) -> RequestRecord:
        record = await self.bus.load_record(request_id)
        assert record is not None
        return record

    async def log(self, request_id: RequestId) -> list[log.LogEntry]:
        return log.decode_entries(await self.bus.read_log(request_id))


def make_item(
    request_id: RequestId, start: int, *token_ids: int, reason: str = "", choice: int = 0, attempt: int = 1
) -> CommitItem:
    entries = tokens(choice, *token_ids) + ((finish(choice, reason),) if reason else ())
    return CommitItem(
        request_id=request_id, attempt=attempt, choice=choice, start=start, entries=entries, finish=reason
    )


class Probe(Protocol):
    """What tests may see and do behind the bus' back."""

    async def add_raw(self, stream: str, data: bytes, request_id: RequestId | None = None) -> EntryId: ...

    async def buried(self) -> list[bytes]: ...

    async def stream_length(self, stream: str) -> int: ...

    async def ttl_s(self, request_id: RequestId) -> float | None: ...


class RedisProbe:
    def __init__(self, link: Any) -> None:
        self.link = link

    async def add_raw(self, stream: str, data: bytes, request_id: RequestId | None = None) -> EntryId:
        name = () if request_id is None else ("id", request_id)
        entry: bytes = await self.link.call("XADD", stream, "*", *name, "d", data)
        return EntryId(entry.decode())

    async def buried(self) -> list[bytes]:
        entries = await self.link.call("XRANGE", keys.DEAD, "-", "+")
        return [dict(zip(fields[::2], fields[1::2], strict=True))[b"d"] for _, fields in entries]

    async def stream_length(self, stream: str) -> int:
        return int(await self.link.call("XLEN", stream))

    async def ttl_s(self, request_id: RequestId) -> float | None:
        milliseconds = await self.link.call("PTTL", keys.record(request_id))
        return None if milliseconds < 0 else milliseconds / 1000


class MemoryProbe:
    def __init__(self, bus: MemoryBus, now: Any) -> None:
        self.bus = bus
        self.now = now

    def _stream(self, name: str) -> Any:
        steps = self.bus.steps
        inboxes = {keys.inbox(worker_id): worker.inbox for worker_id, worker in steps.workers.items()}
        return {keys.SUBMIT: steps.submits, keys.REPORTS: steps.reports, **inboxes}.get(name, ())

    async def add_raw(self, stream: str, data: bytes, request_id: RequestId | None = None) -> EntryId:
        entry_id: EntryId = self._stream(stream).append(data, request_id)
        self.bus.wake_readers()
        return entry_id

    async def buried(self) -> list[bytes]:
        return [data for _, data, _ in self.bus.dead]

    async def stream_length(self, stream: str) -> int:
        return len(self._stream(stream))

    async def ttl_s(self, request_id: RequestId) -> float | None:
        expires_at = self.bus.steps.records[request_id].expires_at
        return None if expires_at is None else expires_at - self.now()

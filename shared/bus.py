"""The bus: every way in which services touch each other, as one Protocol with two implementations.

`RedisBus` (one Lua script per atomic step) is what runs; `MemoryBus` does the same in one process for tests and for
machines without Redis. Both pass `tests/contract`. The rules behind each method are in ARCHITECTURE.md; in short:

* the record `req:{id}` and the set `live` are the truth; streams and channels are wake-ups, at least once;
* a write that depends on a role carries its proof: the leader token, or (worker incarnation, attempt);
* every method is idempotent: a caller that lost the reply calls again.

Any method raises `BusUnavailable` (the effect may have happened), `BusRefused` (it has not) or `BusBroken`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from shared.adapter_ops import AdapterOps
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.limits import EMPTY_QUEUE, NO_BUDGET, UNLIMITED, QueueDepth, RefusalReason, TenantBudget, TenantLimits
from shared.messages import (
    AbortRequest,
    PreemptRequest,
    RequestBody,
    RequestEnded,
    RunRequest,
    SubmitRequest,
    TokenChunk,
    WorkerHello,
    WorkerReport,
)
from shared.work_time import NO_WORK, WorkTime
from shared.worker_wish import WorkerWish

InboxMessage = RunRequest | PreemptRequest | AbortRequest
ReportMessage = WorkerReport | RequestEnded
ChannelMessage = TokenChunk | RequestEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """All that the submit script stores. `orphan_ttl_s` 0: the request ends when its last listener leaves."""

    summary: SubmitRequest
    body: RequestBody
    gateway_id: GatewayId
    connection_id: ConnectionId
    orphan_ttl_s: float = 0.0
    idempotency_key: str | None = None
    body_hash: str = ""
    tenant_limits: TenantLimits = UNLIMITED


class SubmitAnswer(StrEnum):
    """`new`: stored. `exists`: this id, or this idempotency key with the same body, was there before.
    `conflict`: the idempotency key belongs to another body. `full`: a limit of the cell; nothing was stored.
    `limited`: a limit of the tenant; the same."""

    NEW = "new"
    EXISTS = "exists"
    CONFLICT = "conflict"
    FULL = "full"
    LIMITED = "limited"


@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    """`request_id` is the one in Redis: the earlier one when an idempotency key was known.

    When it was refused, `reason` says by what, `detail` names the limit with its value, `queued` is what waits, and
    `wait_s` is how long until the tenant's bucket holds enough, 0 when that is not known. `budget` is set when it was
    stored or `limited`.
    """

    answer: SubmitAnswer
    request_id: RequestId
    detail: str = ""
    reason: RefusalReason | None = None
    wait_s: float = 0.0
    queued: QueueDepth = EMPTY_QUEUE
    budget: TenantBudget = NO_BUDGET


class RequestState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """`num_entries` logged; `stop_index` entry at which a stop string matched; `finish` reason, "" while open.

    `num_tokens` are those that count: entries less the finish entry, and none past `stop_index`.
    """

    num_entries: int = 0
    stop_index: int | None = None
    finish: str = ""

    @property
    def is_open(self) -> bool:
        return not self.finish and self.stop_index is None

    @property
    def num_tokens(self) -> int:
        if self.stop_index is not None:
            return self.stop_index + 1
        return self.num_entries - bool(self.finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The record of a request without its body. `order` sorts by arrival. `ended` is set once it has ended. `worked`
    is what workers have written so far, over all attempts."""

    summary: SubmitRequest
    state: RequestState
    order: tuple[int, int]
    attempt: int
    owner: WorkerId | None
    listeners: tuple[tuple[GatewayId, ConnectionId], ...]
    orphan_ttl_s: float
    preemptions: int
    crashes: int
    choices: tuple[ChoiceState, ...]
    ended: RequestEnded | None = None
    worked: WorkTime = NO_WORK


class CommitItem(NamedTuple):
    """What one choice gained in a step. `start` is the choice's entry count before `entries` (encoded log entries).
    `finish` is the reason when the last of `entries` is the finish entry, "" otherwise.

    A tuple, as what else is made for each token: a frozen dataclass takes 1 to 2 µs to make, a tuple a quarter.
    """

    request_id: RequestId
    attempt: int
    choice: int
    start: int
    entries: tuple[bytes, ...]
    finish: str = ""


class WorkItem(NamedTuple):
    """What a worker has computed for attempt `attempt` of a request so far: microseconds, by phase."""

    request_id: RequestId
    attempt: int
    prefill_us: int
    decode_us: int


class CommitAnswer(StrEnum):
    """`ok`: logged (or had been). `gap`: the log is shorter than `start`; send again from its length. `stop`: the
    choice or the request has ended. `lost`: another owner or attempt holds the request."""

    OK = "ok"
    GAP = "gap"
    STOP = "stop"
    LOST = "lost"


class CommitOutcome(NamedTuple):
    """`length`: entries now in the choice's log."""

    answer: CommitAnswer
    length: int = 0


class DispatchAnswer(StrEnum):
    """`ok`; `ended`: the request has ended; `not_queued`: it runs already; `no_worker`: the worker is gone."""

    OK = "ok"
    ENDED = "ended"
    NOT_QUEUED = "not_queued"
    NO_WORKER = "no_worker"


@dataclass(frozen=True, slots=True)
class DispatchOutcome:
    """`entry_id` of the RunRequest in the worker's inbox, and the attempt it carries, when `ok`."""

    answer: DispatchAnswer
    entry_id: EntryId | None = None
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPulse:
    """A worker as the `workers` hash shows it. Watchers time "`beat` has not moved" with their own clock."""

    hello: WorkerHello
    beat: int
    num_steps: int
    has_work: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPulse:
    """The `leader` hash; an empty token means nobody ever led."""

    token: str = ""
    beat: int = 0


class RequestOps(Protocol):
    """What gateways (and whoever ends a request) do."""

    async def submit(self, request: NewRequest) -> SubmitOutcome:
        """Store record, `live` entry, first listener and wake-up at once; a no-op for an id or key that exists.

        A request beyond a limit (`BusLimits`, `tenant_limits`) is refused whole and costs its tenant nothing. An empty
        queue takes any request, or one that alone is larger than the queue may be would never be taken."""
        ...

    async def load_record(self, request_id: RequestId) -> RequestRecord | None:
        """The record, None if there is none (never was, or expired)."""
        ...

    async def load_body(self, request_id: RequestId) -> RequestBody | None:
        """The body, None if there is no record."""
        ...

    async def read_log(self, request_id: RequestId, offset: int = 0) -> bytes:
        """The log from byte `offset` on; empty when there is nothing."""
        ...

    async def attach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> bool:
        """Add a listener; False when there is no live record (an ended one can still be read)."""
        ...

    async def detach(self, request_id: RequestId, gateway_id: GatewayId, connection_id: ConnectionId) -> int:
        """Remove a listener; how many are left (0 also when there is no live record)."""
        ...

    async def stop_choice(self, request_id: RequestId, choice: int, index: int) -> bool:
        """A stop string matched in `choice` at entry `index` (of that choice): entries past it are void. The first
        caller wins; whether this one did. Ends the request (finished) when this was the last open choice. False, with
        no effect, too when the request has ended (usage is told) or entry `index` is no token of the log."""
        ...

    async def end(
        self, request_id: RequestId, reason: str, error_kind: str = "", error_message: str = "", *, token: str = ""
    ) -> bool:
        """Compare-and-set to ended: reason, usage once, out of `live`, TTLs, publish to listeners, hint to leader and
        owner. True for exactly one caller. A leader gives its `token`: `LeaderLost` when it leads no more."""
        ...


class LeaderOps(Protocol):
    """What the scheduler does. Methods with `token` raise `LeaderLost` when it is not the one in Redis."""

    async def read_leader(self) -> LeaderPulse:
        """The leader hash."""
        ...

    async def take_lead(self, token: str, seen: LeaderPulse) -> bool:
        """Become leader if the hash is still exactly `seen`."""
        ...

    async def raise_lead(self, token: str, now_ms: int | None = None) -> None:
        """Raise the leader's beat. With `now_ms`, the caller's monotonic clock, the cell's clock (`shared/limits.py`)
        goes on by what has passed on it since this leader's last call; the same `now_ms` again adds nothing."""
        ...

    async def yield_lead(self, token: str) -> None:
        """Stop leading (clean shutdown): clears the token if it is ours."""
        ...

    async def read_submits(self, consumer: str, count: int, block_ms: int) -> list[tuple[EntryId, SubmitRequest]]:
        """New wake-ups for the group (made at `0`, made again when lost). Undecodable ones go to `dead`, and the
        request they name, if any, is ended as failed."""
        ...

    async def claim_submits(self, consumer: str, min_idle_ms: int, count: int) -> list[tuple[EntryId, SubmitRequest]]:
        """Wake-ups that another consumer read and never acked."""
        ...

    async def ack_submits(self, entry_ids: Sequence[EntryId]) -> None:
        """Ack and delete."""
        ...

    async def list_live(self) -> set[RequestId]:
        """All ids that have not ended."""
        ...

    async def load_records(self, request_ids: Sequence[RequestId]) -> list[RequestRecord | None]:
        """Records in the order asked, None where there is none."""
        ...

    async def dispatch(
        self, token: str, request_id: RequestId, worker_id: WorkerId, rank: int, priority: int = 0
    ) -> DispatchOutcome:
        """Queued → running: attempt + 1, owner, and a RunRequest for the unfinished choices in the inbox, with the
        standing order (`priority`, `rank`); both lie within ±2**53."""
        ...

    async def preempt(self, token: str, worker_id: WorkerId, message: PreemptRequest) -> EntryId:
        """Append to the worker's inbox; "0-0" and no effect when the worker is gone."""
        ...

    async def requeue(self, token: str, worker_id: WorkerId) -> list[RequestId]:
        """A lost worker: its requests are queued again, its inbox and fields deleted. Crash counts: only the suspect's
        rises if one was marked; otherwise each that it owned rises from 0 to 1."""
        ...

    async def requeue_one(self, token: str, request_id: RequestId, owner: WorkerId, attempt: int) -> bool:
        """Queue again a running request whose owner does not know it (never started, forgotten)."""
        ...

    async def read_reports(self, after: EntryId, count: int, block_ms: int) -> list[tuple[EntryId, ReportMessage]]:
        """Reports and ends after entry `after` ("$" = new ones only)."""
        ...

    async def read_gateways(self) -> dict[GatewayId, int]:
        """Beat counters of gateways."""
        ...

    async def remove_gateway(self, token: str, gateway_id: GatewayId) -> list[RequestId]:
        """A dead gateway: drop its listeners everywhere; all live requests that have none now (orphans)."""
        ...

    async def want_workers(self, token: str, wish: WorkerWish) -> None:
        """Write how many workers there should be, in place of what was wanted before."""
        ...


class WorkerOps(Protocol):
    """What workers do. `worker_id` is the incarnation, the proof of ownership with the attempt."""

    async def hello(self, message: WorkerHello) -> None:
        """Enter the `workers` hash. Earlier incarnations of the same name are over: as `requeue` does for each."""
        ...

    async def use_card(self, card_id: str) -> bool:
        """Whether model card `card_id` is there; if so it is the latest now. For the time before `hello`, which names
        it, and with which it stays."""
        ...

    async def put_card(self, card_id: str, data: bytes) -> None:
        """Store a card unless it is there. Of those that no worker names only the latest ones stay."""
        ...

    async def bye(self, worker_id: WorkerId) -> None:
        """Leave it (clean shutdown, nothing held): fields and inbox deleted."""
        ...

    async def read_inbox(
        self, worker_id: WorkerId, after: EntryId, count: int, block_ms: int
    ) -> list[tuple[EntryId, InboxMessage]]:
        """Commands after entry `after` ("0-0" = all)."""
        ...

    async def ack_inbox(self, worker_id: WorkerId, entry_ids: Sequence[EntryId]) -> None:
        """Delete applied entries."""
        ...

    async def commit(
        self, worker_id: WorkerId, items: Sequence[CommitItem], work: Sequence[WorkItem] = ()
    ) -> list[CommitOutcome]:
        """One step's tokens, atomically: append what lies beyond each choice's length, publish exactly that, mark
        finishes, reset `crashes` of a request that gained a token, end a request whose last choice finished.

        Before all that `work` is counted, by record and by tenant: what lies beyond what that attempt had written. Its
        number is proof enough, as no other worker was ever given it; so work counts for requests that have ended or
        moved, too."""
        ...

    async def beat(
        self, worker_id: WorkerId, num_steps: int, held: Sequence[tuple[RequestId, int]]
    ) -> list[CommitAnswer]:
        """Raise the lease counter, note the engine's step count and whether anything is held (`has_work`); ok, stop
        or lost for each held (id, attempt). A worker whose `workers` fields were removed must say `hello` again under
        a new incarnation: all its answers are lost."""
        ...

    async def release(self, worker_id: WorkerId, request_id: RequestId, attempt: int, *, is_preempted: bool) -> bool:
        """Give a request back: queued again, order kept, attempt unchanged; counts a preemption if it was one."""
        ...

    async def mark_suspect(self, worker_id: WorkerId, request_id: RequestId | None) -> None:
        """Name the request that will step alone (None: no longer), so that a crash is counted for it only."""
        ...

    async def report(self, message: WorkerReport) -> None:
        """Append to `reports`."""
        ...

    async def claim_device(self, worker_id: WorkerId, device_ids: Sequence[str]) -> str | None:
        """Claim the first of `device_ids` that no living worker holds; None if all are taken. The same again for the
        same worker. A claim ends with its worker (requeue, bye); one by an incarnation that never said hello, when
        the same name starts anew."""
        ...


class GatewayOps(Protocol):
    """What gateways do besides `RequestOps`."""

    async def gateway_beat(self, gateway_id: GatewayId) -> None:
        """Raise the gateway's lease counter."""
        ...

    async def gateway_bye(self, gateway_id: GatewayId) -> None:
        """Leave the `gateways` hash (clean shutdown)."""
        ...

    async def load_card(self, card_id: str) -> bytes | None:
        """A model card as it was stored, None if there is none."""
        ...

    async def read_queue(self) -> QueueDepth:
        """What is queued now."""
        ...

    async def read_worked(self) -> dict[str, WorkTime]:
        """What workers have computed for each tenant since this bus' data began."""
        ...

    def subscribe(self, gateway_id: GatewayId) -> Subscription:
        """A subscription to `tok:{gateway_id}`."""
        ...


class Subscription(Protocol):
    """One pub/sub subscription that re-subscribes by itself after a lost connection.

    `deliver`, if it is set, may be called with a publication while `next` waits, instead of `next` returning it.
    """

    deliver: Callable[[list[ChannelMessage]], None] | None

    async def next(self, timeout_s: float) -> list[ChannelMessage] | Subscribed | None:
        """The next publication; `Subscribed` after each confirmation (the first one, and after each reconnect:
        whatever was published before may be lost); None after `timeout_s` of silence."""
        ...

    async def close(self) -> None:
        """Unsubscribe."""
        ...


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The subscription is (again) confirmed."""


class Bus(RequestOps, LeaderOps, WorkerOps, GatewayOps, AdapterOps, Protocol):
    """Everything, as one object."""

    async def ping(self) -> None:
        """Raise `BusUnavailable` unless the bus answers."""
        ...

    async def read_workers(self) -> list[WorkerPulse]:
        """All workers in the `workers` hash."""
        ...

    async def read_wish(self) -> WorkerWish | None:
        """What a leader has wanted last; None if none ever said so."""
        ...

    async def prefix_key(self) -> bytes:
        """The cell's key for the names of prefixes; whoever asks first draws it."""
        ...

    async def bury(self, source: str, data: bytes, why: str) -> None:
        """Put bytes that nobody can read into `dead`."""
        ...

    async def close(self) -> None:
        """Free connections."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BusLimits:
    """What the submit script enforces by itself, and how long ended records stay.

    `max_live_requests` and `max_live_tokens` (prompt plus max_tokens, summed) bound what Redis holds;
    `max_queued_requests` (sequences) and `max_queued_tokens` (of prompts) what waits for a worker, None: nothing does;
    `max_memory_fraction` of Redis' maxmemory, above it new work is refused.
    """

    max_live_requests: int = 100_000
    max_live_tokens: int = 500_000_000
    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    max_memory_fraction: float = 0.8
    record_ttl_s: float = 600.0

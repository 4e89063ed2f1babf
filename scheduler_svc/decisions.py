"""What the policy hears (events) and what it answers (decisions): the border between pure code and the service.

The record in the bus is the truth about a request, so there is one event for it, `Observed`, whatever made the service
look: a report that no longer lists a request, a take-over, the scan of every second. Where the policy's picture may be
stale it asks for a look with `Recheck` instead of guessing. The exception is a request that has just come: its wake-up
says enough to place it (`Submitted`), the dispatch finds out if it is out of date, and the scan looks at the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.bus import RequestRecord, WorkerPulse
from shared.ids import EntryId, GatewayId, RequestId, WorkerId
from shared.messages import SubmitRequest, WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Records as they are now; new requests are among them. Each was read after all earlier decisions had run."""

    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What new wake-ups say: each request and its order. Records may say more by now; those it knows already count."""

    requests: tuple[tuple[SubmitRequest, tuple[int, int]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """These requests have ended (finished, cancelled, expired), each with so many tokens of output; none given: not
    known."""

    request_ids: tuple[RequestId, ...]
    completion_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersSeen:
    """All workers in the bus; one that is missing has left."""

    pulses: tuple[WorkerPulse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaysSeen:
    """All gateways in the bus and their beat counters."""

    beats: Mapping[GatewayId, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRemoved:
    """The listeners of a dead gateway are gone; `orphans` are live requests left with none."""

    orphans: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A worker's report."""

    report: WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchDone:
    """A `Dispatch` ran: the RunRequest is entry `entry_id` of the worker's inbox, as attempt `attempt`."""

    request_id: RequestId
    attempt: int
    entry_id: EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRefused:
    """A `Dispatch` did not run, since the request was not queued any more."""

    request_id: RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLeft:
    """A worker is no longer in the bus."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptSent:
    """A `Preempt` is entry `entry_id` of the worker's inbox."""

    request_id: RequestId
    entry_id: EntryId


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed: deadlines."""


Event = (
    Observed
    | Submitted
    | Ended
    | WorkersSeen
    | GatewaysSeen
    | GatewayRemoved
    | Reported
    | DispatchDone
    | DispatchRefused
    | WorkerLeft
    | PreemptSent
    | Tick
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Run a queued request on a worker, which orders what it holds by (priority, rank)."""

    request_id: RequestId
    worker_id: WorkerId
    rank: int
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempt:
    """Take a running request out of its worker's batch: blocks will run out, or somebody of a better class comes. Based
    on the worker's report `report_seq`. With `keeps` it stays with the worker and waits there; else it is queued."""

    request_id: RequestId
    worker_id: WorkerId
    attempt: int
    report_seq: int
    keeps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """A worker is lost: queue again all that it owned."""

    worker_id: WorkerId
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueOne:
    """Attempt `attempt` of a request is owned by a worker that is gone or does not know it: queue it again."""

    request_id: RequestId
    owner: WorkerId
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reject:
    """The request itself can never be served; `message` is for the client."""

    request_id: RequestId
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End an accepted request: `reason` is cancelled, failed or deadline; `message` is for the client."""

    request_id: RequestId
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """Read these records and feed them back."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveGateway:
    """A gateway is dead: drop its listeners."""

    gateway_id: GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class WantWorkers:
    """There should be `num_workers`; where there are more, those `leaving` should go, who hold least."""

    num_workers: int
    leaving: tuple[WorkerId, ...] = ()


Decision = Dispatch | Preempt | Requeue | RequeueOne | Reject | Abort | Recheck | RemoveGateway | WantWorkers

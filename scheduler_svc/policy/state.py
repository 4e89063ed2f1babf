"""What the policy knows of each request and each worker; plain bookkeeping, no rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shared.bus import ChoiceState, RequestRecord, RequestState
from shared.capacity import blocks_for
from shared.ids import EntryId, RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerHello, WorkerReport

EntryKey = tuple[int, int]


def entry_key(entry_id: EntryId | str) -> EntryKey:
    """An inbox entry id as something that sorts; an empty id sorts first."""
    major, _, minor = entry_id.partition("-")
    return int(major or 0), int(minor or 0)


def rank_of(order: tuple[int, int]) -> int:
    """The standing order as one integer: earlier arrivals are lower.

    Args:
        order: (milliseconds, number within the millisecond). The result stays below 2**53, which Lua numbers hold.
    """
    return order[0] * 2048 + min(order[1], 2047)


def as_submitted(summary: SubmitRequest, order: EntryKey) -> RequestRecord:
    """The record as its submission leaves it, but for its listeners, which a wake-up does not name."""
    return RequestRecord(
        summary=summary,
        state=RequestState.QUEUED,
        order=order,
        attempt=0,
        owner=None,
        listeners=(),
        orphan_ttl_s=0.0,
        preemptions=0,
        crashes=0,
        choices=(ChoiceState(),) * summary.num_choices,
    )


class Phase(Enum):
    """Queued: waits for a place. Running: assigned to a worker. Unknown: a `Recheck` will tell."""

    QUEUED = "queued"
    RUNNING = "running"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class OpenChoice:
    """An unfinished choice: `num_tokens` known (prompt and logged), `max_tokens` at most (prompt and output)."""

    num_tokens: int
    max_tokens: int


class Request:
    """One live request.

    `entry` is where its RunRequest lies in its worker's inbox (None: dispatched by an earlier leader, or unconfirmed).
    `deadline` is in this leader's seconds. `is_preempting` while a `Preempt` of ours is under way, at `preempt_entry`
    of the inbox. `waits_from` is its worker's step count when a report first showed that none of its sequences runs.
    """

    __slots__ = (
        "attempt",
        "crashes",
        "deadline",
        "entry",
        "is_preempting",
        "lost_gateway",
        "open_choices",
        "order",
        "orphan_since",
        "phase",
        "preempt_entry",
        "preemptions",
        "rank",
        "summary",
        "unlisted_reports",
        "unlisted_since",
        "waits_from",
        "was_listed",
        "worker_id",
    )

    def __init__(self, record: RequestRecord, now: float) -> None:
        self.summary: SubmitRequest = record.summary
        self.order = record.order
        self.rank = rank_of(record.order)
        self.phase = Phase.UNKNOWN
        self.attempt = record.attempt
        self.deadline = now + record.summary.timeout_s
        self.worker_id: WorkerId | None = None
        self.orphan_since: float | None = None
        self.lost_gateway = False
        self.preemptions = 0
        self.crashes = 0
        self.open_choices: tuple[OpenChoice, ...] = ()
        self.leave_worker()
        self.update(record)

    @property
    def request_id(self) -> RequestId:
        return self.summary.request_id

    @property
    def largest(self) -> int:
        """Most tokens that one of its open choices can reach."""
        return max((choice.max_tokens for choice in self.open_choices), default=0)

    def update(self, record: RequestRecord) -> None:
        """Take over what the record counts; phase and worker are the scheduler's to change."""
        self.attempt = record.attempt
        self.preemptions = record.preemptions
        self.crashes = record.crashes
        summary = record.summary
        self.open_choices = tuple(
            OpenChoice(summary.prompt_len(c) + state.num_tokens, summary.prompt_len(c) + summary.max_tokens)
            for c, state in enumerate(record.choices)
            if state.is_open
        )

    def leave_worker(self) -> None:
        """Forget where it ran."""
        self.worker_id = None
        self.entry: EntryKey | None = None
        self.was_listed = False
        self.waits_from: int | None = None
        self.unlisted_reports = 0
        self.unlisted_since: float | None = None
        self.is_preempting = False
        self.preempt_entry: EntryKey | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A worker as the planner sees it.

    `free_blocks` after all that is assigned has grown by the headroom (may be negative); `num_seqs` assigned; both
    count what ends within the look-ahead as ended.
    """

    free_blocks: int
    num_seqs: int


class Worker:
    """One worker; `report` is None until it has reported to this leader. `load` is a cache, None when out of date.

    `headroom` is the growth in tokens kept free for each sequence at admission; None: as the forecast says.
    """

    __slots__ = ("assigned", "headroom", "held", "hello", "load", "report", "steps_per_report")

    def __init__(self, hello: WorkerHello, headroom: int | None = None) -> None:
        self.hello = hello
        self.headroom = headroom
        self.report: WorkerReport | None = None
        self.assigned: dict[RequestId, Request] = {}
        self.held: dict[RequestId, HeldRequest] = {}
        self.steps_per_report = 1
        self.load: Load | None = None

    @property
    def worker_id(self) -> WorkerId:
        return self.hello.worker_id

    @property
    def is_accepting(self) -> bool:
        """It has reported to this leader and does not drain."""
        return self.report is not None and not self.report.is_draining

    def take(self, report: WorkerReport) -> bool:
        """Take a report over; False if it is not newer than the last one, or says what cannot be."""
        if not _is_possible(report, self.hello):
            return False
        if self.report is not None:
            if report.seq <= self.report.seq:
                return False
            self.steps_per_report = max(1, report.num_steps - self.report.num_steps)
        self.report = report
        self.held = {
            held.request_id: held
            for held in report.held
            if (request := self.assigned.get(held.request_id)) is not None and request.attempt == held.attempt
        }
        self.load = None
        return True

    def assign(self, request: Request) -> None:
        """Count `request` as this worker's."""
        request.phase = Phase.RUNNING
        request.worker_id = self.worker_id
        self.assigned[request.request_id] = request
        self.load = None

    def drop(self, request: Request) -> None:
        """Count `request` no longer; a no-op if it is not this worker's."""
        if self.assigned.pop(request.request_id, None) is not None:
            self.held.pop(request.request_id, None)
            request.leave_worker()
            self.load = None

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of this worker that hold `num_tokens`."""
        return blocks_for(num_tokens, self.hello.block_size)


def _is_possible(report: WorkerReport, hello: WorkerHello) -> bool:
    """Whether the numbers could be those of a worker with that hello; wrong ones would be believed for good."""
    counts = [report.num_steps, report.num_evictions]
    for held in report.held:
        counts += [held.num_blocks, held.num_tokens, held.num_running, held.num_waiting]
    major, _, minor = report.last_inbox_id.partition("-")
    return (
        0 <= report.free_blocks <= hello.num_blocks
        and min(counts) >= 0
        and all(part == "" or (part.isascii() and part.isdigit()) for part in (major, minor))
    )

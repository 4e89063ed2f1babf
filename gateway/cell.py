"""What all workers of the cell report, summed: the numbers behind a gateway's `/metrics`.

Reports are hints that expire: gauges of a worker that is gone, or silent for a lease, go with it. Its counters stay in
the sums, so that totals never fall, and count once if it comes back. Waiting requests are those in the queue (live,
held by no worker) and the sequences that wait inside workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.pace import Pace
from shared.bus import Bus, ReportMessage
from shared.clock import Clock
from shared.errors import BusError
from shared.ids import EntryId, RequestId, WorkerId
from shared.limits import EMPTY_QUEUE, QueueDepth
from shared.messages import WorkerReport
from shared.work_time import WorkTime

READ_COUNT = 1000
READ_BLOCK_MS = 500
COUNTERS = (
    "num_preemptions", "num_prompt_tokens", "num_generation_tokens",
    "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_prefix_queries", "num_prefix_hits",
    "num_padded_rows", "num_swapped_out", "num_swapped_in", "num_swap_preemptions",
)  # fmt: skip
"""Fields of reports that are summed, and of the totals."""
FORGET_AFTER_LEASES = 100
"""An incarnation that was silent for so long never comes back: only its counters are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTotals:
    """Gauges now, counters since this gateway started to look; `worked` by tenant, since Redis' data began."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_workers: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_padded_rows: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swap_preemptions: int = 0
    num_swapped_requests: int = 0
    num_swap_blocks: int = 0
    num_swap_blocks_used: int = 0
    num_live_tokens: int = 0
    num_slots_used: int = 0
    num_kv_tokens: int = 0
    most_blocks_used: int = 0
    most_running: int = 0
    queue: QueueDepth = EMPTY_QUEUE
    worked: Mapping[str, WorkTime] = field(default_factory=dict)

    @property
    def usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return self.num_blocks_used / self.num_blocks if self.num_blocks else 0.0

    @property
    def swap_usage(self) -> float:
        """Share of the host memory for KV blocks in use, 0 to 1."""
        return self.num_swap_blocks_used / self.num_swap_blocks if self.num_swap_blocks else 0.0

    @property
    def slot_utilization(self) -> float:
        """Share of the slots of blocks in use that hold a token; 1 when none is."""
        return self.num_live_tokens / self.num_slots_used if self.num_slots_used else 1.0


class CellView:
    """The newest report of each worker."""

    def __init__(self, bus: Bus, clock: Clock, lease_s: float) -> None:
        self.ended_tokens = Pace(clock)
        """Prompt tokens of requests that end: as fast as they do, the queue moves."""
        self._bus = bus
        self._clock = clock
        self._lease_s = lease_s
        self._after = EntryId("$")
        self._latest: dict[WorkerId, tuple[WorkerReport, float]] = {}
        self._ended_counters = dict.fromkeys(COUNTERS, 0)
        self._worked: Mapping[str, WorkTime] = {}

    async def read(self) -> None:
        """Wait up to `READ_BLOCK_MS` for reports and take them. Raises `BusError`."""
        for entry_id, message in await self._bus.read_reports(self._after, READ_COUNT, READ_BLOCK_MS):
            self._after = entry_id
            self.note(message)
        self._forget()

    def note(self, message: ReportMessage) -> None:
        """Take one message of the reports stream."""
        if isinstance(message, WorkerReport):
            self._latest[message.worker_id] = (message, self._clock.now())
        else:
            self.ended_tokens.note(message.prompt_tokens)

    async def totals(self) -> CellTotals:
        """The sums now."""
        now = self._clock.now()
        reports = [report for report, at in self._latest.values() if now - at < self._lease_s]
        held = {request.request_id for report in reports for request in report.held}
        swapped = [held.num_swapped_blocks for report in reports for held in report.held if held.num_swapped_blocks]
        counters = _add([self._ended_counters, *(_counters(report) for report, _ in self._latest.values())])
        return CellTotals(
            num_running=sum(report.num_running for report in reports),
            num_waiting=sum(report.num_waiting for report in reports) + len(await self._live() - held),
            num_blocks=sum(report.num_blocks for report in reports),
            num_blocks_used=sum(report.num_blocks - report.free_blocks for report in reports),
            num_live_tokens=sum(report.num_live_tokens for report in reports),
            num_slots_used=sum((report.num_blocks - report.free_blocks) * report.block_size for report in reports),
            most_blocks_used=sum(report.most_blocks_used for report in reports),
            most_running=sum(report.most_running for report in reports),
            num_kv_tokens=sum(report.num_blocks * report.block_size for report in reports),
            num_swapped_requests=len(swapped),
            num_swap_blocks=sum(swapped) + sum(report.free_swap_blocks for report in reports),
            num_swap_blocks_used=sum(swapped),
            num_workers=len(reports),
            queue=await self._queue(),
            worked=await self._read_worked(),
            **counters,
        )

    async def _queue(self) -> QueueDepth:
        try:
            return await self._bus.read_queue()
        except BusError:
            return EMPTY_QUEUE

    async def _read_worked(self) -> Mapping[str, WorkTime]:
        """As Redis has it; as it was last while there is none."""
        with suppress(BusError):
            self._worked = await self._bus.read_worked()
        return self._worked

    async def _live(self) -> set[RequestId]:
        try:
            return await self._bus.list_live()
        except BusError:
            return set()

    def _forget(self) -> None:
        since = self._clock.now() - FORGET_AFTER_LEASES * self._lease_s
        for worker in [worker for worker, (_, at) in self._latest.items() if at <= since]:
            report, _ = self._latest.pop(worker)
            self._ended_counters = _add([self._ended_counters, _counters(report)])


def _counters(report: WorkerReport) -> dict[str, int]:
    return {name: getattr(report, name) for name in COUNTERS}


def _add(rows: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(row[name] for row in rows) for name in COUNTERS}

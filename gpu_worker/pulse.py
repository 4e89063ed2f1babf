"""The two signs of life: the beat, which is the worker's lease, and reports, which the scheduler plans by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpu_worker.incarnation import Incarnation
from shared.bus import CommitAnswer
from shared.errors import BusError, QuireError
from shared.logs import get_log
from shared.messages import WorkerReport

MAX_BEAT_S = 1.0
WORKING_REPORT_S = 0.1
CALM_REPORT_S = 0.5
"""While all that is held runs, and has taken few blocks since the last report (`Incarnation`): nothing is to be decided
then, and a report wakes three other processes, which costs a lone stream as much as a token does."""
IDLE_REPORT_S = 1.0
MIN_REPORT_GAP_S = 0.005
"""Changes so close together share a report: a tiny model would otherwise send one at each of its steps."""

_log = get_log("pulse")


class DeclaredDead(QuireError):
    """This incarnation is no longer in the `workers` hash: its requests are others' now."""


class Heart:
    """Raises the lease counter, and learns from the answers what is no longer this worker's."""

    def __init__(self, incarnation: Incarnation, *, lease_s: float) -> None:
        self._incarnation = incarnation
        self._period_s = min(MAX_BEAT_S, lease_s / 3)

    async def run(self) -> None:
        """Until cancelled. Raises `DeclaredDead`."""
        while True:
            try:
                await self._beat()
            except BusError as error:
                _log.recurring("beat.failed", error=error)
            await asyncio.sleep(self._period_s)

    async def _beat(self) -> None:
        mine = self._incarnation
        asked = list(mine.ledger)
        pairs = [(held.request_id, held.attempt) for held in asked]
        answers = await mine.bus.beat(mine.worker_id, mine.view.num_steps, pairs)
        if all(answer is CommitAnswer.LOST for answer in answers):
            await self._check_known()
        for held, answer in zip(asked, answers, strict=True):
            if answer in (CommitAnswer.STOP, CommitAnswer.LOST) and mine.ledger.is_held(held):
                mine.drop(held, str(answer))

    async def _check_known(self) -> None:
        """Nothing is held, or all was lost: find out whether this incarnation still counts."""
        mine = self._incarnation
        if mine.worker_id not in {pulse.hello.worker_id for pulse in await mine.bus.read_workers()}:
            raise DeclaredDead(f"{mine.worker_id} was declared dead")


class Reporter:
    """Sends a report at each change of who is held, and in between at a steady pace.

    Args:
        on_report: called with each report that was sent, for the metrics.
    """

    def __init__(self, incarnation: Incarnation, on_report: Callable[[WorkerReport], None]) -> None:
        self._incarnation = incarnation
        self._on_report = on_report
        self._seq = 0
        self._num_evictions = 0
        self._evictions_known_since = 0

    async def run(self) -> None:
        """Until cancelled."""
        mine = self._incarnation
        while True:
            mine.report_due.clear()
            try:
                await self._send()
            except BusError as error:
                _log.recurring("report.failed", error=error)
            await asyncio.sleep(MIN_REPORT_GAP_S)
            try:
                async with asyncio.timeout(self._period_s()):
                    await mine.report_due.wait()
            except TimeoutError:
                pass

    def _period_s(self) -> float:
        """Until the next report, unless something changes before."""
        mine = self._incarnation
        if not mine.ledger:
            return IDLE_REPORT_S
        is_calm = mine.view.num_running > 0 and mine.view.num_held == len(mine.ledger) and not mine.view.num_waiting
        return CALM_REPORT_S if is_calm else WORKING_REPORT_S

    def evictions_at(self, seq: int) -> int | None:
        """How many evictions the report `seq` told of; None when a later one told of more."""
        return self._num_evictions if seq >= self._evictions_known_since else None

    async def _send(self) -> None:
        mine, report = self._incarnation, self._make()
        applied = tuple(mine.applied)
        mine.note_reported(report.free_blocks)
        await asyncio.gather(mine.bus.report(report), mine.bus.ack_inbox(mine.worker_id, applied))  # in one write
        del mine.applied[: len(applied)]
        self._on_report(report)

    def _make(self) -> WorkerReport:
        mine, view = self._incarnation, self._incarnation.view
        self._seq += 1
        if view.num_evictions != self._num_evictions:
            self._num_evictions, self._evictions_known_since = view.num_evictions, self._seq
        held = mine.ledger.describe(view)
        prefixes_here, prefixes_gone = mine.prefixes.take()
        return WorkerReport(
            worker_id=mine.worker_id,
            seq=self._seq,
            last_inbox_id=mine.inbox_id,
            free_blocks=view.free_blocks,
            num_blocks=view.num_blocks,
            num_steps=view.num_steps,
            held=held,
            num_running=sum(h.num_running for h in held),
            num_waiting=sum(h.num_waiting for h in held),
            num_evictions=view.num_evictions,
            num_preemptions=view.num_preemptions,
            num_prompt_tokens=view.num_prompt_tokens,
            num_generation_tokens=view.num_generation_tokens,
            num_drafts=view.num_drafts,
            num_draft_tokens=view.num_draft_tokens,
            num_accepted_tokens=view.num_accepted_tokens,
            num_prefix_queries=view.num_prefix_queries,
            num_prefix_hits=view.num_prefix_hits,
            num_live_tokens=view.num_live_tokens,
            most_blocks_used=view.most_blocks_used,
            most_running=view.most_running,
            num_padded_rows=view.num_padded_rows,
            block_size=view.block_size,
            free_swap_blocks=view.free_swap_blocks,
            num_swapped_out=view.num_swapped_out,
            num_swapped_in=view.num_swapped_in,
            num_swap_preemptions=view.num_swap_preemptions,
            block_copy_s=view.block_copy_s,
            token_s=view.token_s,
            prefixes_here=prefixes_here,
            prefixes_gone=prefixes_gone,
            is_draining=mine.is_draining,
        )

"""What this worker writes about its requests: commits, releases, failures and the name of the suspect.

One loop does one thing at a time, so there is one commit in flight and a release never overtakes the tokens before it.
It holds nothing itself: each pass does what the ledger says is to be done, so a refused write or a lost reply needs
only another pass, after a pause that grows. Tokens of several steps that wait meanwhile go in one commit.
"""

from __future__ import annotations

import asyncio

from gpu_worker.engine_thread import Drop
from gpu_worker.incarnation import Incarnation
from gpu_worker.ledger import Held, Release, Unlogged
from shared.bus import CommitAnswer, CommitItem, CommitOutcome, WorkItem
from shared.errors import BusError
from shared.failpoints import failpoint
from shared.logs import get_log

MIN_RETRY_S = 0.02
MAX_RETRY_S = 1.0

_log = get_log("outbox")


class Outbox:
    """Makes Redis agree with the ledger."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation

    async def run(self) -> None:
        """Until cancelled."""
        retry_s = MIN_RETRY_S
        while True:
            await self._incarnation.outbox_due.wait()
            self._incarnation.outbox_due.clear()
            try:
                await self._pass()
                retry_s = MIN_RETRY_S
            except BusError as error:
                _log.recurring("write.failed", error=error, after_s=retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)
                self._incarnation.outbox_due.set()

    async def _pass(self) -> None:
        await self._commit()
        for held in self._incarnation.ledger.departing():
            await self._depart(held)
        await self._admit_suspect()

    async def _commit(self) -> None:
        """Log what the engine has drawn and what it cost, all in one script."""
        mine = self._incarnation
        number, batch = mine.ledger.round_number, mine.ledger.unlogged()
        work = mine.ledger.accounts.take_due()
        if batch:
            failpoint("worker.before_commit", ",".join(unlogged.held.request_id for unlogged in batch))
        if batch or work:
            outcomes = await self._write([unlogged.item for unlogged in batch], work)
            for unlogged, outcome in zip(batch, outcomes, strict=True):
                self._settle(unlogged, outcome)
            if any(outcome.answer is CommitAnswer.GAP for outcome in outcomes):
                mine.outbox_due.set()
                return
        mine.thread.settle(number)

    async def _write(self, items: list[CommitItem], work: list[WorkItem]) -> list[CommitOutcome]:
        accounts = self._incarnation.ledger.accounts
        try:
            outcomes = await self._incarnation.bus.commit(self._incarnation.worker_id, items, work)
        except BusError:
            accounts.give_back(work)
            raise
        accounts.settle(work)
        return outcomes

    def _settle(self, unlogged: Unlogged, outcome: CommitOutcome) -> None:
        mine, held = self._incarnation, unlogged.held
        match outcome.answer:
            case CommitAnswer.OK if unlogged.item.finish:
                failpoint("worker.after_finish", held.request_id)
                mine.ledger.settle(unlogged, outcome)
                self._note_end(held)
            case CommitAnswer.OK:
                mine.ledger.settle(unlogged, outcome)
            case CommitAnswer.GAP:
                _log.warning("log.shortened", request_id=held.request_id, length=outcome.length)
                mine.ledger.settle(unlogged, outcome)
            case CommitAnswer.STOP:
                failpoint("worker.before_free", held.request_id)
                mine.thread.submit(Drop(held.request_id, unlogged.item.choice))
                mine.ledger.close_choice(held, unlogged.choice)
                self._note_end(held)
            case CommitAnswer.LOST if mine.ledger.is_held(held):
                mine.drop(held, "lost")

    def _note_end(self, held: Held) -> None:
        if not held.choices:
            _log.info("request.left", request_id=held.request_id, attempt=held.attempt, why="ended")
            self._incarnation.note_departures()

    async def _depart(self, held: Held) -> None:
        """Give back or end a request that the engine does not hold any more."""
        mine, way = self._incarnation, held.exit
        if isinstance(way, Release):
            if way.is_preempted:
                failpoint("worker.after_preempt", held.request_id)
            await mine.bus.release(mine.worker_id, held.request_id, held.attempt, is_preempted=way.is_preempted)
            mine.let_go(held, "preempted" if way.is_preempted else "released")
        elif way is not None:
            if await mine.load_own(held.request_id, held.attempt) is not None:
                await mine.bus.end(held.request_id, way.reason, way.error_kind, way.message)
            mine.let_go(held, way.reason)

    async def _admit_suspect(self) -> None:
        """Let the next suspect into the engine once its name is in Redis, so that its crash is counted as its own."""
        mine = self._incarnation
        if not mine.ledger.is_suspect_cleared:
            return
        suspect = mine.ledger.next_suspect()
        if suspect is None and mine.ledger.suspect is None:
            return
        await mine.bus.mark_suspect(mine.worker_id, suspect.request_id if suspect is not None else None)
        mine.ledger.suspect = suspect
        if suspect is not None and mine.ledger.is_held(suspect) and suspect.exit is None:
            mine.start(suspect)

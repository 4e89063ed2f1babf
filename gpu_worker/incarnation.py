"""One incarnation of this worker: the identity under which it owns requests, and what its loops share.

A worker that was declared dead (its fields are gone from Redis, its requests are queued again) starts over as a new
incarnation with nothing in hand; only the loaded model lives on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.view import EngineView
from gpu_worker.engine_thread import Add, Drop, EngineThread, Round
from gpu_worker.ledger import Held, Ledger
from shared.bus import Bus, RequestRecord, RequestState
from shared.failpoints import failpoint
from shared.ids import EntryId, RequestId, WorkerId
from shared.logs import get_log
from shared.prefix_journal import PrefixJournal

REPORT_DELAY_S = 0.005
"""How much later a report tells of what was taken, so that it is not written to disk before a first token that comes
at once. What left is reported when its end is committed."""
GROWTH_REPORT_S = 0.1
"""How often growth is reported, at most; the scheduler's forecast goes as far as decisions take at that pace."""
REPORTED_GROWTH = 1 / 8
"""Share of the free blocks last reported that running sequences may take before that is reported."""

_log = get_log("worker")


class Incarnation:
    """Shared by inbox, outbox, heart and reporter; lives on the event loop.

    `outbox_due` and `report_due` wake those loops; `emptied` is set while nothing is held; `broken` gets the error that
    ended the engine. `applied` are entries of the inbox that have had their effect; the next report deletes them.
    """

    def __init__(
        self, worker_id: WorkerId, bus: Bus, engine: Engine, *, prepare_thread: Callable[[], None] | None = None
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self.worker_id = worker_id
        self.bus = bus
        self.ledger = Ledger()
        self.prefixes = PrefixJournal()
        self.view: EngineView = engine.view()
        self.inbox_id = EntryId("0-0")
        self.applied: list[EntryId] = []
        self.is_draining = False
        self.outbox_due = asyncio.Event()
        self.report_due = asyncio.Event()
        self._report_timer: asyncio.TimerHandle | None = None
        self._reported_at = 0.0
        self._reported_free = 0
        self.emptied = asyncio.Event()
        self.emptied.set()
        self.broken: asyncio.Future[None] = loop.create_future()
        self.thread = EngineThread(
            engine,
            post=lambda round_: _call(loop, self._on_round, round_),
            on_broken=lambda error: _call(loop, self._on_broken, error),
            prepare=prepare_thread,
        )

    async def load_own(self, request_id: RequestId, attempt: int) -> RequestRecord | None:
        """The record, if it says that this incarnation owns `attempt` of it."""
        record = await self.bus.load_record(request_id)
        if record is None or record.state is not RequestState.RUNNING:
            return None
        return record if (record.owner, record.attempt) == (self.worker_id, attempt) else None

    def hold(self, held: Held) -> None:
        """Take a request in; a suspect waits in the ledger, all others go to the engine now."""
        _log.info("request.taken", request_id=held.request_id, attempt=held.attempt, choices=len(held.choices))
        self.ledger.hold(held)
        self.emptied.clear()
        self._report_soon()
        if held.is_suspect or held.exit is not None:
            self.outbox_due.set()
        else:
            self.start(held)

    def start(self, held: Held) -> None:
        """Hand a request to the engine."""
        self.thread.submit(Add(held.sequences))
        held.sequences = ()

    def drop(self, held: Held, why: str) -> None:
        """Hold and compute a request no longer; what is not committed of it is void."""
        failpoint("worker.before_free", held.request_id)
        self.thread.submit(Drop(held.request_id))
        self.let_go(held, why)

    def let_go(self, held: Held, why: str) -> None:
        """Hold a request no longer that the engine has finished with."""
        _log.info("request.left", request_id=held.request_id, attempt=held.attempt, why=why)
        self.ledger.forget(held)
        self.note_departures()

    def note_departures(self) -> None:
        """Something has left the ledger: a suspect may have, a report is due, all may be gone."""
        self.outbox_due.set()
        self.report_due.set()
        if not self.ledger:
            self.emptied.set()

    def note_reported(self, free_blocks: int) -> None:
        """A report is on its way, which says that so many blocks are free."""
        self._reported_at, self._reported_free = self._loop.time(), free_blocks

    def _on_round(self, round_: Round) -> None:
        before, self.view, self.inbox_id = self.view, round_.view, round_.inbox_id
        self.ledger.take(round_)
        self.prefixes.note(round_.prefix_changes)
        if round_.entries or round_.failures or round_.withdrawn or self.ledger.accounts.has_due:
            self.outbox_due.set()
        if self._has_grown() or (before.num_running, before.num_waiting, before.num_held) != (
            round_.view.num_running, round_.view.num_waiting, round_.view.num_held,
        ):  # fmt: skip
            self._report_soon()

    def _has_grown(self) -> bool:
        """Whether running sequences have taken so much since the last report that the scheduler must know."""
        taken = self._reported_free - self.view.free_blocks
        is_much = taken > REPORTED_GROWTH * self._reported_free
        return is_much and self._loop.time() - self._reported_at >= GROWTH_REPORT_S

    def _report_soon(self) -> None:
        if self._report_timer is None:
            self._report_timer = self._loop.call_later(REPORT_DELAY_S, self._have_report)

    def _have_report(self) -> None:
        self._report_timer = None
        self.report_due.set()

    def _on_broken(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    loop.call_soon_threadsafe(function, argument)

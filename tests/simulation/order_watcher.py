"""What the order promises, checked on every batch of decisions from events and decisions alone.

Each rule is one method, so that a mutant of the policy can be told to break exactly one. The watcher keeps its own
picture: who waits (by what the policy was told), who was sent where and in which class, what workers last reported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc import decisions as d
from scheduler_svc.policy.state import EntryKey, entry_key
from scheduler_svc.simulator import Simulation
from shared.bus import RequestRecord, RequestState
from shared.ids import RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerReport


@dataclass
class Waiting:
    """A queued request: since when it waits without a break, and when a later one of its user first passed it."""

    summary: SubmitRequest
    order: tuple[int, int]
    since: float
    passed_at: float | None = None


@dataclass
class OrderWatcher:
    """Args: what the policy is configured with; `aging_s` and `passing_s` as there."""

    max_preemptions: int
    aging_s: float = 0.0
    passing_s: float = 0.0
    waiting: dict[RequestId, Waiting] = field(default_factory=dict)
    levels: dict[RequestId, int] = field(default_factory=dict)
    sent: dict[RequestId, WorkerId] = field(default_factory=dict)
    leaving: dict[RequestId, EntryKey | None] = field(default_factory=dict)
    reports: dict[WorkerId, WorkerReport] = field(default_factory=dict)
    waited_s: Counter[RequestId] = field(default_factory=Counter)
    num_kept: Counter[RequestId] = field(default_factory=Counter)
    promised: dict[RequestId, tuple[WorkerId, int]] = field(default_factory=dict)
    told: set[RequestId] = field(default_factory=set)
    policy: object = None

    def __call__(self, cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        if cell.policy is not self.policy:
            self._start_over(cell)
        self._note_event(cell, event)
        self.told = {x.request_id for x in decisions if isinstance(x, d.Preempt)}
        for index, decision in enumerate(decisions):
            match decision:
                case d.Dispatch():
                    self._check_dispatch(cell, decision)
                case d.Preempt():
                    heirs = _heirs(decisions, index)
                    self._check_preempt(cell, decision, heirs)
                    if not isinstance(event, d.Reported):
                        self.check_heir(cell, decision, heirs)
                case d.Abort() | d.Reject():
                    self._forget(decision.request_id)
                case d.Requeue(worker_id=worker_id):
                    self.reports.pop(worker_id, None)
        if isinstance(event, d.Submitted | d.Reported):
            self._check_nobody_better_waits(cell)

    def _start_over(self, cell: Simulation) -> None:
        self.policy = cell.policy
        for table in (self.waiting, self.sent, self.leaving, self.reports, self.waited_s, self.num_kept):
            table.clear()
        self.promised.clear()

    def _note_event(self, cell: Simulation, event: d.Event) -> None:
        match event:
            case d.Submitted():
                for summary, order in event.requests:
                    self.waiting.setdefault(summary.request_id, Waiting(summary, order, cell.now))
            case d.Observed():
                for record in event.records:
                    self._note_record(cell, record)
            case d.Reported() if event.report.worker_id in cell.cell.workers:
                self.reports[event.report.worker_id] = event.report
                self._note_void(event.report)
            case d.Ended():
                for request_id in event.request_ids:
                    self._forget(request_id)
            case d.PreemptSent() if event.request_id in self.leaving:
                self.leaving[event.request_id] = entry_key(event.entry_id)

    def _note_record(self, cell: Simulation, record: RequestRecord) -> None:
        request_id = record.summary.request_id
        if record.state is RequestState.QUEUED:
            for gone in (self.sent, self.leaving, self.promised):
                gone.pop(request_id, None)
            self.waiting.setdefault(request_id, Waiting(record.summary, record.order, cell.now))
        elif record.state is RequestState.RUNNING:
            self.waiting.pop(request_id, None)
            if record.owner is not None:
                self.sent[request_id] = record.owner

    def _note_void(self, report: WorkerReport) -> None:
        """A worker that has read a Preempt and still lists its request keeps it."""
        for held in report.held:
            entry = self.leaving.get(held.request_id)
            if entry is not None and entry <= entry_key(report.last_inbox_id):
                del self.leaving[held.request_id]
                self.promised.pop(held.request_id, None)

    def _forget(self, request_id: RequestId) -> None:
        for table in (self.waiting, self.sent, self.leaving, self.promised):
            table.pop(request_id, None)

    # The rules.

    def _check_dispatch(self, cell: Simulation, dispatch: d.Dispatch) -> None:
        own = self.waiting.pop(dispatch.request_id)
        self.waited_s[dispatch.request_id] += cell.now - own.since  # type: ignore[assignment]
        self.check_rise(cell, dispatch, own)
        for request_id, other in self.waiting.items():
            self.check_class(dispatch, request_id, other)
            self.check_arrival(cell, dispatch, own, other)
        self.levels[dispatch.request_id] = dispatch.priority
        self.sent[dispatch.request_id] = dispatch.worker_id

    def check_class(self, dispatch: d.Dispatch, request_id: RequestId, other: Waiting) -> None:
        """Nobody goes out while somebody of a better class waits."""
        assert other.summary.priority >= dispatch.priority, f"{dispatch} though {request_id} waits"

    def check_arrival(self, cell: Simulation, dispatch: d.Dispatch, own: Waiting, other: Waiting) -> None:
        """Of one user's requests the older goes first, however often it gave way; passing is bounded in time."""
        mine, its = own.summary, other.summary
        is_rival = (its.tenant, its.user) == (mine.tenant, mine.user) and its.priority <= dispatch.priority
        if not is_rival or other.order > own.order:
            return
        if other.passed_at is None:
            other.passed_at = cell.now
        assert self.passing_s > 0, f"{dispatch} passed {its.request_id}"
        assert cell.now <= other.passed_at + self.passing_s, f"{dispatch} passed {its.request_id} for too long"

    def check_rise(self, cell: Simulation, dispatch: d.Dispatch, own: Waiting) -> None:
        """Nobody goes out in a better class than its own before its windows are over, or than anybody's."""
        summary = own.summary
        if dispatch.priority == summary.priority:
            return
        classes = {record.summary.priority for record in cell.cell.records.values()}
        assert dispatch.priority in classes, f"{dispatch} in nobody's class"
        risen = sum(dispatch.priority <= c < summary.priority for c in classes)
        waited_s = self.waited_s[summary.request_id]
        assert self.aging_s > 0, f"{dispatch} rose without windows"
        assert waited_s >= self.aging_s or risen == 0, f"{dispatch} after {waited_s} s"

    def _check_preempt(self, cell: Simulation, preempt: d.Preempt, heirs: list[d.Dispatch]) -> None:
        report = self.reports[preempt.worker_id]
        own = next((h for h in report.held if h.request_id == preempt.request_id), None)
        self.leaving[preempt.request_id] = None
        self.check_bound(cell, preempt)
        if preempt.keeps:
            assert own is not None, f"{preempt} of nobody"
            self.check_room(preempt, report, own)
            self.check_return(cell, preempt, report, heirs)
            self.num_kept[preempt.request_id] += 1
        if own is None or own.num_running == 0:
            return
        heirs_levels = [x.priority for x in heirs if x.worker_id == preempt.worker_id] + [
            self._level(cell, h.request_id) for h in report.held if h.num_running == 0
        ]
        self.check_standing(cell, preempt, report)
        if len(report.held) == 1:
            level = self._level(cell, preempt.request_id)
            assert any(heir < level for heir in heirs_levels), f"{preempt} of the only one, for nobody better"

    def check_room(self, preempt: d.Preempt, report: WorkerReport, own: HeldRequest) -> None:
        """Nobody is kept for whom there is no room in host memory beside those who are on their way there."""
        taken = sum(count for worker_id, count in self.promised.values() if worker_id == preempt.worker_id)
        count = own.num_blocks - own.num_shared_blocks
        assert 0 < count <= report.free_swap_blocks - taken, f"{preempt} with {taken} taken of {report}"
        self.promised[preempt.request_id] = preempt.worker_id, count

    def check_return(self, cell: Simulation, preempt: d.Preempt, report: WorkerReport, heirs: list[d.Dispatch]) -> None:
        """But for somebody of a better class, nobody is kept who would be let in again at once."""
        level = self._level(cell, preempt.request_id)
        waiting = [self._level(cell, h.request_id) for h in report.held if h.num_running == 0]
        if any(other < level for other in [*waiting, *(x.priority for x in heirs)]):
            return
        gone = {i for i in self.leaving if i != preempt.request_id}
        own = (h.num_blocks - h.num_shared_blocks for h in report.held if h.request_id in gone)
        free = report.free_blocks + sum(own)
        others = [h for h in report.held if h.request_id not in {*gone, preempt.request_id}]
        assert free < sum(h.num_running for h in others), f"{preempt} would be back at once: {report}"

    def check_heir(self, cell: Simulation, preempt: d.Preempt, heirs: list[d.Dispatch]) -> None:
        """But for blocks that run out, which only a report shows, one gives way only to somebody of a better class."""
        heir = heirs[0]
        is_better = heir.priority < self._level(cell, preempt.request_id)
        assert heir.worker_id == preempt.worker_id and is_better, f"{preempt} for {heir}"  # noqa: PT018

    def check_bound(self, cell: Simulation, preempt: d.Preempt) -> None:
        """Nobody gives way more often than allowed."""
        assert self._num_given_way(cell, preempt.request_id) < self.max_preemptions, preempt

    def check_standing(self, cell: Simulation, preempt: d.Preempt, report: WorkerReport) -> None:
        """Nobody gives way while somebody of a lower class runs there that could, or a younger one of its own."""
        victim = cell.cell.records[preempt.request_id]
        standing = (self._level(cell, preempt.request_id), victim.order)
        for held in report.held:
            record = cell.cell.records[held.request_id]
            is_bounded = self._num_given_way(cell, held.request_id) >= self.max_preemptions
            may_go = not is_bounded and held.num_running > 0 and held.num_blocks > 0
            is_owner = cell.cell.is_owner(report.worker_id, held.request_id, held.attempt)
            if may_go and is_owner and held.request_id not in self.leaving and held.request_id not in self.told:
                other = (self._level(cell, held.request_id), record.order)
                assert other <= standing, f"{preempt} {standing} though {held.request_id} {other} could go"

    def _check_nobody_better_waits(self, cell: Simulation) -> None:
        """Nobody waits while a worker holds lower classes only, all of which may give way."""
        if not self.waiting:
            return
        request_id, best = min(self.waiting.items(), key=lambda item: item[1].summary.priority)
        owned: dict[WorkerId, set[RequestId]] = {}
        for sent_id, worker_id in self.sent.items():
            owned.setdefault(worker_id, set()).add(sent_id)
        for worker_id, ids in owned.items():
            report = self.reports.get(worker_id)
            if report is None or not all(self._is_lower(cell, i, best.summary.priority) for i in ids):
                continue
            is_current = {h.request_id for h in report.held} <= ids  # else blocks come back with the next report
            assert not is_current, f"{request_id} waits though {worker_id} holds only {ids}"

    def _is_lower(self, cell: Simulation, request_id: RequestId, level: int) -> bool:
        is_bounded = self._num_given_way(cell, request_id) >= self.max_preemptions or request_id in self.leaving
        return self._level(cell, request_id) > level and not is_bounded

    def _num_given_way(self, cell: Simulation, request_id: RequestId) -> int:
        return cell.cell.records[request_id].preemptions + self.num_kept[request_id]

    def _level(self, cell: Simulation, request_id: RequestId) -> int:
        return self.levels.get(request_id, cell.cell.records[request_id].summary.priority)


def _heirs(decisions: list[d.Decision], index: int) -> list[d.Dispatch]:
    """Whom the preempted one of that index may give way to, the nearest first: those that are sent after it, or, since
    it stays, before it."""
    preempt = decisions[index]
    assert isinstance(preempt, d.Preempt)
    near = reversed(decisions[:index]) if preempt.keeps else decisions[index + 1 :]
    return [x for x in near if isinstance(x, d.Dispatch)]

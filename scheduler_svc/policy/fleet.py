"""The workers of one model, in the orders in which placement looks at them, so that it need not look at all.

A worker whose load has changed is put into its new place when somebody asks next: O(log n) each. Workers that have not
reported to this leader, or drain, stand in no order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from scheduler_svc.policy import admission
from scheduler_svc.policy.state import News, Request, Worker
from shared.ids import WorkerId

_Place = tuple[int, int, str]
_Places = list[_Place]
TOKENS_PER_SEQUENCE = 32
"""So many tokens of a prompt less to compute make up for one sequence more in the worker's batch: a prefix of 512
outweighs 15 sequences. Of 0, 8, 32, 128 and no regard for prefixes it gave the shortest first tokens, or within 4 % of
them, over even, hot and many prefixes in simulated cells (docs/simulate.md)."""


class Fleet:
    """Workers of one model.

    Args:
        max_preemptions: a request preempted this often does not give way.
        tokens_per_sequence: what load weighs against prefixes (`placement.py`).
    """

    def __init__(self, max_preemptions: int, tokens_per_sequence: float = TOKENS_PER_SEQUENCE) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.news = News()
        self.tokens_per_sequence = tokens_per_sequence
        self._max_preemptions = max_preemptions
        self._open: _Places = []  # by (-free blocks, sequences): a sequence slot is free
        self._full: _Places = []  # the same; none is, and nobody was sent ahead of one
        self._yielding: _Places = []  # by (-class of the last request that may give way)
        self._places: dict[WorkerId, tuple[_Places, _Place]] = {}
        self._yields: dict[WorkerId, _Place] = {}
        self._unread: set[WorkerId] = set()  # changed since `_yielding` was last asked for
        self._largest: Worker | None = None
        self.prompt_latency_s = 0.0
        """From dispatch to first token, of the latest request whose first token was seen."""

    def add(self, worker: Worker) -> None:
        """Take in a worker that was made with `news` of this fleet."""
        self.workers[worker.worker_id] = worker
        if self._largest is None or _num_slots(worker) > _num_slots(self._largest):
            self._largest = worker

    def remove(self, worker: Worker) -> None:
        """A worker is gone."""
        del self.workers[worker.worker_id]
        self.news.changed.add(worker.worker_id)
        self.news.prefixes.forget(worker.worker_id)
        self._unread &= self.workers.keys() | self._yields.keys()
        if worker is self._largest:
            self._largest = max(self.workers.values(), key=_num_slots, default=None)

    @property
    def may_take_more(self) -> bool:
        """Whether any worker's load may have changed since they were last looked at, or any had a slot then."""
        return bool(self.news.changed or self._open)

    def is_closed(self, level: int) -> bool:
        """Whether all are full, and of those that run there nobody is of a lower class than `level`."""
        self._refresh()
        return not (self._open or self._full or max(self.news.levels, default=level) > level)

    @property
    def largest(self) -> Worker:
        """The worker with most room for one sequence; there must be one."""
        assert self._largest is not None
        return self._largest

    def can_ever_hold(self, request: Request) -> bool:
        """Whether the largest worker could hold `request` alone."""
        return self._largest is not None and admission.can_ever_hold(self._largest, request)

    def open(self) -> Iterator[Worker]:
        """Workers with a free sequence slot, most free blocks first."""
        return self._walk(self._open)

    def full(self) -> Iterator[Worker]:
        """Workers with none and nobody sent ahead of one, most free blocks first."""
        return self._walk(self._full)

    def yielding(self, level: int) -> Iterator[Worker]:
        """Workers that hold somebody of a lower class than `level` who may give way, the lowest class first."""
        if max(self.news.levels, default=level) <= level:
            return
        self._refresh()
        self._refresh_yielding()
        for place in self._yielding:
            if -place[0] <= level:
                return
            yield self.workers[WorkerId(place[2])]

    def _walk(self, places: _Places) -> Iterator[Worker]:
        self._refresh()
        return (self.workers[WorkerId(place[2])] for place in places)

    def _refresh(self) -> None:
        """Put those whose load has changed into their new places."""
        changed = self.news.changed
        if not changed:
            return
        for worker_id in changed:
            if worker_id in self._places:
                places, place = self._places.pop(worker_id)
                del places[bisect_left(places, place)]
            worker = self.workers.get(worker_id)
            if worker is not None and worker.is_accepting:
                self._enter(worker)
        self._unread |= changed
        changed.clear()

    def _enter(self, worker: Worker) -> None:
        load, max_num_seqs = admission.load(worker), worker.hello.max_num_seqs
        if load.num_seqs <= max_num_seqs:
            places = self._open if load.num_seqs < max_num_seqs else self._full
            place = (-load.free_blocks, load.num_seqs, str(worker.worker_id))
            insort(places, place)
            self._places[worker.worker_id] = places, place

    def _refresh_yielding(self) -> None:
        for worker_id in self._unread:
            if worker_id in self._yields:
                del self._yielding[bisect_left(self._yielding, self._yields.pop(worker_id))]
            worker = self.workers.get(worker_id)
            if worker is None or not worker.is_accepting:
                continue
            level = self._yielding_level(worker)
            if level is not None:
                place = self._yields[worker_id] = (-level, 0, str(worker_id))
                insort(self._yielding, place)
        self._unread.clear()

    def _yielding_level(self, worker: Worker) -> int | None:
        """The last class of those that have, or will have, something to give on `worker` and may give it: those that
        run or are on their way, and, where a slot is free, those that wait there, too."""
        has_slot = worker.num_running < worker.hello.max_num_seqs
        levels = []
        for request in worker.assigned.values():
            is_waiting = request.held is not None and request.held.num_running == 0
            if not request.is_preempting and (has_slot if is_waiting else request.preemptions < self._max_preemptions):
                levels.append(request.level)
        return max(levels, default=None)


def _num_slots(worker: Worker) -> int:
    """Tokens for which it has memory."""
    return worker.hello.num_blocks * worker.hello.block_size

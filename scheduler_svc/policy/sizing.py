"""How many workers to ask for, and who should go: `autoscale.wish` on what the policy knows.

* There are as many workers as were asked for last, or more: who was asked for and has not come yet is starting, and who
  came without being asked (started by hand, or for a leader before this one) is there all the same.
* A report shows first tokens some time after they came. The report of that worker before did not show them, so they
  came after it: a first token counts as if it had come right then. It may have been later, never earlier, so that slow
  reports alone bring no workers.
* Who was sent to a worker ahead of a free slot waits as those in the queue do.
* Who is to go stays named until it drains, or more workers are wanted: two that read the wish at different times must
  not stop two workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler_svc import decisions as d
from scheduler_svc.policy.autoscale import AutoscaleConfig, Memory, Picture, wish
from scheduler_svc.policy.state import Request, Worker
from shared.ids import WorkerId

SLOTS_UNTIL_KNOWN = 16
"""Of a worker, before the first one has said how many it has."""


class Sizing:
    """What one leader remembers of it; a new one begins afresh."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._memory = Memory()
        self._asked: d.WantWorkers | None = None
        self._slots_per_worker = SLOTS_UNTIL_KNOWN
        self._ttfts_s: list[float] = []

    def note_first_token(self, request: Request, worker: Worker) -> None:
        """`worker` has shown a token of `request`; to be called before its `reported_at` moves on. Only the first call
        for a request counts."""
        if request.arrived_at is not None and worker.reported_at is not None:
            self._ttfts_s.append(max(0.0, worker.reported_at - request.arrived_at))
        request.arrived_at = None

    def look(
        self, workers: Iterable[Worker], requests: Iterable[Request], num_queued: int, now: float
    ) -> list[d.Decision]:
        """What to ask for at `now`, if it is not what was asked for last.

        Args:
            requests: all that live, in order of coming; `num_queued` of them have no worker.
        """
        staying = [worker for worker in workers if not worker.is_leaving]
        oldest_wait_s = self._oldest_wait_s(staying, requests, now)
        picture = self._picture(staying, num_queued, oldest_wait_s, now)
        wanted, self._memory = wish(picture, self._memory, self._config)
        ask = d.WantWorkers(num_workers=wanted, leaving=self._choose_leaving(staying, wanted))
        if ask == self._asked:
            return []
        self._asked = ask
        return [ask]

    def _choose_leaving(self, staying: Sequence[Worker], wanted: int) -> tuple[WorkerId, ...]:
        """Those who were to go before, then those who hold least; of equals who came last."""
        num_leaving = len(staying) - wanted
        if num_leaving <= 0:
            return ()
        before = () if self._asked is None else self._asked.leaving
        newest_first = staying[::-1]
        order = sorted(newest_first, key=lambda w: (w.worker_id not in before, _num_sequences(w)))
        return tuple(worker.worker_id for worker in order[:num_leaving])

    def _picture(self, staying: Sequence[Worker], num_queued: int, oldest_wait_s: float, now: float) -> Picture:
        serving = [worker for worker in staying if worker.is_accepting]
        num_slots = sum(worker.hello.max_num_seqs for worker in serving)
        num_blocks = sum(worker.hello.num_blocks for worker in serving)
        num_free = sum(worker.report.free_blocks for worker in serving if worker.report is not None)
        num_ahead = sum(max(0, _num_sequences(worker) - worker.hello.max_num_seqs) for worker in serving)
        num_used = sum(map(_num_sequences, serving)) - num_ahead
        if serving:
            self._slots_per_worker = max(1, num_slots // len(serving))
        ttfts_s, self._ttfts_s = self._ttfts_s, []
        return Picture(
            now=now,
            num_workers=max(len(staying), 0 if self._asked is None else self._asked.num_workers),
            num_serving=len(serving),
            slots_per_worker=self._slots_per_worker,
            num_queued=num_queued + num_ahead,
            oldest_wait_s=oldest_wait_s,
            slot_share=num_used / num_slots if num_slots else 1.0,
            block_share=1 - num_free / num_blocks if num_blocks else 1.0,
            ttft_s=sum(ttfts_s) / len(ttfts_s) if ttfts_s else 0.0,
        )

    def _oldest_wait_s(self, staying: Sequence[Worker], requests: Iterable[Request], now: float) -> float:
        """Of those that have had no token; where they run, until the last report that showed none."""
        reported_at = {worker.worker_id: worker.reported_at for worker in staying}
        longest_s = 0.0
        for request in requests:
            if request.arrived_at is None:
                continue
            if request.worker_id is None:
                return max(longest_s, now - request.arrived_at)  # who came later has waited for less
            until = reported_at.get(request.worker_id)
            longest_s = max(longest_s, 0.0 if until is None else until - request.arrived_at)
        return longest_s


def _num_sequences(worker: Worker) -> int:
    return sum(request.num_open for request in worker.assigned.values())

"""The scheduler's policy with full workers and a long queue, and what one event costs it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from quire.bench.statistics import percentile
from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from shared.bus import WorkerPulse
from shared.ids import EntryId, RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerHello, WorkerReport

BLOCK_SIZE = 16
PROMPT_LEN = 16
MAX_TOKENS = 1024
MAX_NUM_SEQS = 8
NUM_TENANTS = 8


class QueuedPolicy:
    """`num_workers` whose slots are all taken, and `num_waiting` requests of several tenants behind them."""

    def __init__(self, num_waiting: int, num_workers: int = 1) -> None:
        self._policy = Policy(PolicyConfig())
        self._num_submitted = 0
        self._num_entries = 0
        self._seq = 0
        self._workers = deque(_hello(number) for number in range(num_workers))
        self._running: dict[WorkerId, deque[RequestId]] = {hello.worker_id: deque() for hello in self._workers}
        pulses = (WorkerPulse(hello=hello, beat=1, num_steps=0, has_work=False) for hello in self._workers)
        self._feed(d.WorkersSeen(pulses=tuple(pulses)))
        self._report_all()
        self._submit((MAX_NUM_SEQS + 1) * num_workers + num_waiting)
        self._report_all()

    @property
    def num_queued(self) -> int:
        return self._policy.num_queued

    def time_events(self, count: int) -> dict[str, float]:
        """Median seconds of one event of each kind: a worker's report, a new request, an end with the dispatch that
        follows, a tick; each of the workers in turn. The queue keeps its length."""
        times: dict[str, list[float]] = {"report": [], "submit": [], "end and dispatch": [], "tick": []}
        for _ in range(count):
            self._workers.rotate()
            times["report"].append(_clock(self._report))
            times["submit"].append(_clock(self._submit))
            times["end and dispatch"].append(_clock(self._end))
            times["tick"].append(_clock(lambda: self._feed(d.Tick())))
        return {kind: percentile(seconds, 50) for kind, seconds in times.items()}

    def _submit(self, count: int = 1) -> None:
        first, self._num_submitted = self._num_submitted, self._num_submitted + count
        numbers = range(first, self._num_submitted)
        self._feed(d.Submitted(requests=tuple((_summary(number), (number, 0)) for number in numbers)))

    def _report_all(self) -> None:
        for _ in range(len(self._workers)):
            self._workers.rotate()
            self._report()

    def _report(self) -> None:
        """The worker in front reports what it holds."""
        self._seq += 1
        hello = self._workers[0]
        held = tuple(_held(request_id) for request_id in self._running[hello.worker_id])
        report = WorkerReport(
            worker_id=hello.worker_id, seq=self._seq, last_inbox_id=f"{self._num_entries}-0", num_steps=self._seq,
            free_blocks=hello.num_blocks - sum(h.num_blocks for h in held), num_blocks=hello.num_blocks, held=held,
        )  # fmt: skip
        self._feed(d.Reported(report=report))

    def _end(self) -> None:
        """The oldest request of the worker in front ends; its next report no longer lists it."""
        self._feed(d.Ended(request_ids=(self._running[self._workers[0].worker_id].popleft(),)))

    def _feed(self, event: d.Event) -> None:
        for decision in self._policy.on_event(event, 0.0):
            if isinstance(decision, d.Dispatch):
                self._num_entries += 1
                self._running[decision.worker_id].append(decision.request_id)
                entry_id = EntryId(f"{self._num_entries}-0")
                self._feed(d.DispatchDone(request_id=decision.request_id, attempt=1, entry_id=entry_id))


def _hello(number: int) -> WorkerHello:
    return WorkerHello(
        worker_id=WorkerId(f"w{number}:1"), model="m", fingerprint="f", dtype="bfloat16", device="cpu",
        max_model_len=4096, block_size=BLOCK_SIZE, num_blocks=100_000, max_num_seqs=MAX_NUM_SEQS, pid=1, host="h",
    )  # fmt: skip


def _summary(number: int) -> SubmitRequest:
    return SubmitRequest(
        request_id=RequestId(f"bench-{number:07}"), tenant=f"t{number % NUM_TENANTS}", model="m", fingerprint="f",
        prompt_lens=(PROMPT_LEN,), n=1, max_tokens=MAX_TOKENS,
    )  # fmt: skip


def _held(request_id: RequestId) -> HeldRequest:
    return HeldRequest(
        request_id=request_id, attempt=1, num_blocks=2, num_tokens=PROMPT_LEN + 1, num_running=1, num_waiting=0
    )


def _clock(action: Callable[[], None]) -> float:
    since = time.perf_counter()
    action()
    return time.perf_counter() - since

"""The scheduler's policy with a full cell and a long queue, and what one event costs it."""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.bench.statistics import percentile
from scheduler_svc import decisions as d
from scheduler_svc.policy.scheduler import Policy, PolicyConfig
from shared.bus import ChoiceState, RequestRecord, RequestState, WorkerPulse
from shared.ids import ConnectionId, EntryId, GatewayId, RequestId, WorkerId
from shared.messages import HeldRequest, SubmitRequest, WorkerHello, WorkerReport

BLOCK_SIZE = 16
PROMPT_LEN = 16
MAX_TOKENS = 1024

_HELLO = WorkerHello(
    worker_id=WorkerId("w:1"), model="m", fingerprint="f", dtype="bfloat16", device="cpu", max_model_len=4096,
    block_size=BLOCK_SIZE, num_blocks=100_000, max_num_seqs=8, pid=1, host="h",
)  # fmt: skip


class QueuedPolicy:
    """One worker whose slots are all taken, and `num_waiting` requests behind it."""

    def __init__(self, num_waiting: int) -> None:
        self._policy = Policy(PolicyConfig())
        self._num_submitted = 0
        self._num_entries = 0
        self._seq = 0
        self._running: list[RequestId] = []
        self._feed(d.WorkersSeen(pulses=(WorkerPulse(hello=_HELLO, beat=1, num_steps=0, has_work=False),)))
        self._report()
        while self._policy.num_queued < max(1, num_waiting):
            self._submit()
        self._report()

    @property
    def num_queued(self) -> int:
        return self._policy.num_queued

    def time_events(self, count: int) -> dict[str, float]:
        """Median seconds of one event of each kind: a worker's report, a new request, an end with the dispatch that
        follows, a tick. The queue keeps its length."""
        times: dict[str, list[float]] = {"report": [], "submit": [], "end and dispatch": [], "tick": []}
        for _ in range(count):
            times["report"].append(_clock(self._report))
            times["submit"].append(_clock(self._submit))
            times["end and dispatch"].append(_clock(self._end))
            times["tick"].append(_clock(lambda: self._feed(d.Tick())))
        return {kind: percentile(seconds, 50) for kind, seconds in times.items()}

    def _submit(self) -> None:
        self._num_submitted += 1
        self._feed(d.Observed(records=(_record(self._num_submitted),)))

    def _report(self) -> None:
        self._seq += 1
        held = tuple(_held(request_id) for request_id in self._running)
        report = WorkerReport(
            worker_id=_HELLO.worker_id, seq=self._seq, last_inbox_id=f"{self._num_entries}-0", num_steps=self._seq,
            free_blocks=_HELLO.num_blocks - sum(h.num_blocks for h in held), num_blocks=_HELLO.num_blocks, held=held,
        )  # fmt: skip
        self._feed(d.Reported(report=report))

    def _end(self) -> None:
        """The oldest running request ends, and the worker's report no longer lists it."""
        self._feed(d.Ended(request_ids=(self._running.pop(0),)))

    def _feed(self, event: d.Event) -> None:
        for decision in self._policy.on_event(event, 0.0):
            if isinstance(decision, d.Dispatch):
                self._num_entries += 1
                self._running.append(decision.request_id)
                entry_id = EntryId(f"{self._num_entries}-0")
                self._feed(d.DispatchDone(request_id=decision.request_id, attempt=1, entry_id=entry_id))


def _record(number: int) -> RequestRecord:
    summary = SubmitRequest(
        request_id=RequestId(f"bench-{number:06}"), tenant="t", model="m", fingerprint="f", prompt_lens=(PROMPT_LEN,),
        n=1, max_tokens=MAX_TOKENS,
    )  # fmt: skip
    return RequestRecord(
        summary=summary, state=RequestState.QUEUED, order=(number, 0), attempt=0, owner=None,
        listeners=((GatewayId("g:1"), ConnectionId("c")),), orphan_ttl_s=0.0, preemptions=0, crashes=0,
        choices=(ChoiceState(),),
    )  # fmt: skip


def _held(request_id: RequestId) -> HeldRequest:
    return HeldRequest(
        request_id=request_id, attempt=1, num_blocks=2, num_tokens=PROMPT_LEN + 1, num_running=1, num_waiting=0
    )


def _clock(action: Callable[[], None]) -> float:
    since = time.perf_counter()
    action()
    return time.perf_counter() - since

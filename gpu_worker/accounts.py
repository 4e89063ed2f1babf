"""What this worker has computed for each request it was given, and what of that Redis does not know yet.

Design note. An account belongs to one attempt and only grows. What is written is always its whole, so writing it again
counts nothing twice, and what a dead worker had written stays. It is written with a commit (`outbox.py`):

* with every commit of a request whose client wants to know its cost;
* when a choice ends or the request leaves, before the end or the release is;
* when `MAX_UNWRITTEN_US` of it have come together. A worker has a second a second, so that is ten times a second in
  all, however many requests share it; and that much of each request, with its uncommitted steps, is what a worker that
  is killed takes with it.

A step in flight may still bring time for a request that has left, so the accounts of the last ones to leave are kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from gpu_worker.engine.step_work import StepWork
from shared.bus import WorkItem
from shared.ids import RequestId

MAX_UNWRITTEN_US = 100_000
NUM_KEPT = 4096
"""Requests that left, whose accounts are kept: as many as can run in one step."""

Attempt = tuple[RequestId, int]


class _Account:
    __slots__ = ("decode_us", "has_left", "is_exact", "num_written_us", "prefill_us")

    def __init__(self) -> None:
        self.prefill_us = 0
        self.decode_us = 0
        self.num_written_us = 0
        self.is_exact = False
        self.has_left = False

    @property
    def num_unwritten_us(self) -> int:
        return self.prefill_us + self.decode_us - self.num_written_us


class Accounts:
    """See the module."""

    def __init__(self) -> None:
        self._accounts: dict[Attempt, _Account] = {}
        self._left: dict[Attempt, None] = {}
        self._due: dict[Attempt, None] = {}

    @property
    def has_due(self) -> bool:
        """Whether something is to be written, even if nothing else is."""
        return bool(self._due)

    def open(self, request_id: RequestId, attempt: int, *, is_exact: bool) -> None:
        """A request was taken; `is_exact`: each of its commits is to say what it cost so far."""
        account = self._accounts.setdefault((request_id, attempt), _Account())
        account.is_exact = is_exact

    def add(self, work: Iterable[StepWork]) -> None:
        """Note whose a step's time was."""
        for request_id, attempt, prefill_us, decode_us in work:
            account = self._accounts.get((request_id, attempt))
            if account is None:
                continue
            account.prefill_us += prefill_us
            account.decode_us += decode_us
            if account.is_exact or account.has_left or account.num_unwritten_us >= MAX_UNWRITTEN_US:
                self._due[request_id, attempt] = None

    def close_soon(self, request_id: RequestId, attempt: int) -> None:
        """A choice of it has ended, or it is to leave: the next commit says what it cost."""
        account = self._accounts.get((request_id, attempt))
        if account is not None and account.num_unwritten_us:
            self._due[request_id, attempt] = None

    def leave(self, request_id: RequestId, attempt: int) -> None:
        """It is held no longer; what is not written yet is due."""
        account = self._accounts.get((request_id, attempt))
        if account is None:
            return
        account.has_left = True
        self._left[request_id, attempt] = None
        self.close_soon(request_id, attempt)
        if len(self._left) > NUM_KEPT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._accounts.pop(oldest, None)
            self._due.pop(oldest, None)

    def take_due(self) -> list[WorkItem]:
        """What is to be written now; `settle` it or `give_back`."""
        taken = [self._to_item(key) for key in self._due]
        self._due.clear()
        return taken

    def settle(self, items: Iterable[WorkItem]) -> None:
        """These are in Redis."""
        for item in items:
            account = self._accounts.get((item.request_id, item.attempt))
            if account is not None:
                account.num_written_us = item.prefill_us + item.decode_us

    def give_back(self, items: Iterable[WorkItem]) -> None:
        """These may not have been written."""
        for item in items:
            self.close_soon(item.request_id, item.attempt)

    def _to_item(self, key: Attempt) -> WorkItem:
        account = self._accounts[key]
        return WorkItem(*key, account.prefill_us, account.decode_us)

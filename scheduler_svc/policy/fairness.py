"""Whose turn it is among those who share: a counter of served tokens for each, the smallest one is next.

    counter += tokens / weight

A name is *active* while it has somebody queued. When it becomes active its counter is lifted to the smallest active
one, so nobody saves up turns while away; what one was served beyond its share it keeps as a debt. With everybody
always active, shares of tokens are as weights, to within what one quantum and the requests that run can hold.

Counters are compared in quanta: names that are as good as even go by `due`, the time at which the first token (or the
next one) of their first request is due, so that targets reorder without changing what each gets over time.

Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the virtual token counter.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

QUANTUM_TOKENS = 256
"""Counters within the same quantum are even: less than one ordinary request, so of no weight in anybody's share."""

MAX_IDLE = 1024
"""Names that are not active and still have a debt; beyond that the oldest debts are forgotten."""

_Entry = tuple[int, float, int, str]


class Account:
    """One name's counter; `entry` is its only valid place in the heap, None when it has none."""

    __slots__ = ("counter", "due", "entry", "is_active", "number", "weight")

    def __init__(self, number: int, weight: float) -> None:
        self.counter = 0.0
        self.number = number
        self.weight = weight
        self.due = 0.0
        self.is_active = False
        self.entry: _Entry | None = None


class Turns:
    """Names by counter; every operation is O(log n) in active names.

    Args:
        weights: of those whose weight is not 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._accounts: dict[str, Account] = {}
        self._idle: dict[str, None] = {}
        self._heap: list[_Entry] = []
        self._num_active = 0
        self._num_entered = 0
        self._floor = 0.0

    def __len__(self) -> int:
        """Names it keeps a counter of."""
        return len(self._accounts)

    def enter(self, name: str, due: float) -> None:
        """`name` has somebody queued; the first of them is due at `due`. May be called again as that changes."""
        account = self._accounts.get(name)
        if account is None:
            account = self._open(name)
        if not account.is_active:
            account.counter = max(account.counter, self._lowest())
            account.is_active, account.entry = True, None
            self._num_active += 1
            self._idle.pop(name, None)
        account.due = due
        self._place(name, account)

    def leave(self, name: str) -> None:
        """`name` has nobody queued any more."""
        account = self._accounts[name]
        account.is_active, account.entry = False, None
        self._num_active -= 1
        if self._num_active == 0:
            self._floor = max(self._floor, account.counter)
            self._heap.clear()
        if account.counter <= self._lowest():
            del self._accounts[name]
        else:
            self._keep_idle(name)

    def charge(self, name: str, tokens: float) -> None:
        """Count served tokens; negative ones take back what was counted and not served."""
        account = self._accounts.get(name)
        if account is None:
            account = self._open(name)
            account.counter = self._lowest()
            self._keep_idle(name)
        account.counter += tokens / account.weight
        if tokens < 0:
            account.counter = max(0.0, account.counter)
            if account.is_active:
                self._place(name, account)

    def next(self) -> str | None:
        """The active name whose turn it is, None if there is none."""
        while self._heap:
            entry = self._heap[0]
            account = self._accounts.get(entry[3])
            if account is None or account.entry != entry:
                heapq.heappop(self._heap)
            elif (fresh := _entry(entry[3], account)) != entry:
                account.entry = fresh
                heapq.heapreplace(self._heap, fresh)
            else:
                return entry[3]
        return None

    def counter(self, name: str) -> float:
        """Tokens over weight that `name` stands at; 0 if it has no counter."""
        account = self._accounts.get(name)
        return 0.0 if account is None else account.counter

    def _open(self, name: str) -> Account:
        self._num_entered += 1
        account = self._accounts[name] = Account(self._num_entered, self._weights.get(name, 1.0))
        return account

    def _keep_idle(self, name: str) -> None:
        self._idle[name] = None
        if len(self._idle) > MAX_IDLE:
            oldest = next(iter(self._idle))
            del self._idle[oldest], self._accounts[oldest]

    def _lowest(self) -> float:
        """What a newcomer is lifted to: the smallest active counter, to a quantum; without any, that of the last to
        leave."""
        if self._num_active and self.next() is not None:
            self._floor = max(self._floor, float(self._heap[0][0] * QUANTUM_TOKENS))
        return self._floor

    def _place(self, name: str, account: Account) -> None:
        """Enter it into the heap where it may have moved forward; what has moved back is found at the top."""
        fresh = _entry(name, account)
        if account.entry is None or fresh < account.entry:
            account.entry = fresh
            heapq.heappush(self._heap, fresh)
        if len(self._heap) > 2 * self._num_active + 64:
            self._heap = [a.entry for a in self._accounts.values() if a.entry is not None]
            heapq.heapify(self._heap)


def _entry(name: str, account: Account) -> _Entry:
    return int(account.counter // QUANTUM_TOKENS), account.due, account.number, name

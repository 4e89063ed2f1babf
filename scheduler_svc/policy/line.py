"""The line of one class: tenants in turn by tokens, each tenant's users in turn, each user's requests by arrival."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from scheduler_svc.policy.fairness import Turns
from scheduler_svc.policy.state import Request

_Place = tuple[tuple[int, int], str]
_NO_WEIGHTS: Mapping[str, float] = {}


class Heap:
    """Requests by a key that was true when they came; who has left is skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], str]] = []
        self._members: dict[str, tuple[tuple[int, ...], Request]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def add(self, request: Request, *key: int) -> None:
        self._members[request.request_id] = (key, request)
        heapq.heappush(self._heap, (key, request.request_id))

    def remove(self, request: Request) -> None:
        del self._members[request.request_id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(key, request_id) for request_id, (key, _) in self._members.items()]
            heapq.heapify(self._heap)

    def first(self) -> Request | None:
        """The one with the smallest key."""
        while self._heap:
            key, request_id = self._heap[0]
            member = self._members.get(request_id)
            if member is not None and member[0] == key:
                return member[1]
            heapq.heappop(self._heap)
        return None


class _TenantLine:
    """One tenant's queued requests."""

    def __init__(self) -> None:
        self.users = Turns(_NO_WEIGHTS)
        self._by_user: dict[str, Heap] = {}

    def __len__(self) -> int:
        return len(self._by_user)

    def add(self, request: Request) -> None:
        user = request.summary.user
        own = self._by_user.setdefault(user, Heap())
        own.add(request, *request.order)
        self._enter(user, own)

    def remove(self, request: Request) -> None:
        user = request.summary.user
        own = self._by_user[user]
        own.remove(request)
        if len(own):
            self._enter(user, own)
        else:
            del self._by_user[user]
            self.users.leave(user)

    def first(self) -> Request:
        user = self.users.next()
        assert user is not None
        return self.first_of(user)

    def first_of(self, user: str) -> Request:
        return _first_of(self._by_user[user])

    def _enter(self, user: str, own: Heap) -> None:
        self.users.enter(user, _first_of(own).due)


class Line:
    """All queued requests of one class of one model; and its counters, which live as long as anybody of the class does.

    Args:
        weights: of tenants.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._tenants = Turns(weights)
        self._by_tenant: dict[str, _TenantLine] = {}
        self._by_size = Heap()
        self._holder: Request | None = None
        self._first: Request | None = None  # as found last, None when anything has changed since
        self.num_live = 0

    def __len__(self) -> int:
        return len(self._by_size)

    def add(self, request: Request) -> None:
        """Let `request` wait."""
        self._first = None
        tenant = request.summary.tenant
        own = self._line_of(tenant)
        own.add(request)
        self._by_size.add(request, request.num_known, *request.order)
        self._tenants.enter(tenant, own.first().due)

    def remove(self, request: Request) -> None:
        """Let it wait no longer."""
        self._first = None
        tenant = request.summary.tenant
        own = self._by_tenant[tenant]
        own.remove(request)
        self._by_size.remove(request)
        if self._holder is request:
            self._holder = None
        if len(own):
            self._tenants.enter(tenant, own.first().due)
        else:
            self._tenants.leave(tenant)

    def first(self) -> Request | None:
        """Who is next."""
        if self._first is None:
            self._first = self._find_first()
        return self._first

    def smallest(self) -> Request | None:
        """Who knows fewest tokens; the oldest of those."""
        return self._by_size.first()

    def hold(self, request: Request) -> None:
        """Keep `request` first, whatever is served meanwhile, until it has left the line; but for older ones of its own
        user that come back."""
        self._holder, self._first = request, None

    def charge(self, tenant: str, user: str, num_tokens: int) -> None:
        """Count tokens that a user of a tenant was served."""
        self._first = None
        self._tenants.charge(tenant, num_tokens)
        self._line_of(tenant).users.charge(user, num_tokens)

    def _line_of(self, tenant: str) -> _TenantLine:
        own = self._by_tenant.get(tenant)
        if own is None:
            own = self._by_tenant[tenant] = _TenantLine()
        return own

    def _find_first(self) -> Request | None:
        if self._holder is not None:
            summary = self._holder.summary
            return self._by_tenant[summary.tenant].first_of(summary.user)
        tenant = self._tenants.next()
        return None if tenant is None else self._by_tenant[tenant].first()


def _first_of(heap: Heap) -> Request:
    request = heap.first()
    assert request is not None
    return request

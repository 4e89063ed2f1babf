"""Tenants' buckets and the cell's clock on plain Python objects: what the scripts keep in `spent` and `leader`."""

from __future__ import annotations

from dataclasses import dataclass

from shared.limits import MINUTE_MS, RefusalReason, TenantBudget, TenantLimits
from shared.messages import SubmitRequest


@dataclass(slots=True)
class _Spent:
    """In 1/`MINUTE_MS` of requests and of tokens, as it stood at `at_ms` of the cell's clock."""

    requests: int = 0
    tokens: int = 0
    at_ms: int = 0


class MemoryTenants:
    """See `shared/limits.py`."""

    def __init__(self) -> None:
        self.clock_ms = 0
        self._leader_ms: int | None = None
        self._spent: dict[str, _Spent] = {}

    def restart_clock(self) -> None:
        """Another leader: its clock has nothing to do with the last one's."""
        self._leader_ms = None

    def advance_clock(self, leader_ms: int) -> None:
        """Add what has passed on the leader's clock."""
        passed = 0 if self._leader_ms is None else max(0, leader_ms - self._leader_ms)
        self._leader_ms, self.clock_ms = leader_ms, self.clock_ms + passed

    def find_lack(self, summary: SubmitRequest, limits: TenantLimits) -> tuple[RefusalReason, str, float] | None:
        """Which bucket does not hold enough: reason, text, and seconds until it does."""
        spent = self._now(summary.tenant, limits)
        buckets = (
            (RefusalReason.TENANT_REQUESTS, "requests", limits.requests_per_minute, spent.requests, 1),
            (RefusalReason.TENANT_TOKENS, "tokens", limits.tokens_per_minute, spent.tokens, _cost(summary)),
        )
        for reason, what, limit, used, cost in buckets:
            over = 0 if limit is None else used + (cost - limit) * MINUTE_MS
            if limit is not None and over > 0:
                return reason, f"{what} per minute: at most {limit}", -(-over // limit) / 1000
        return None

    def charge(self, summary: SubmitRequest, limits: TenantLimits) -> int:
        """Take a request's share out of its tenant's buckets; the tokens that it paid for."""
        if limits.requests_per_minute is None and limits.tokens_per_minute is None:
            return 0
        spent = self._now(summary.tenant, limits)
        spent.requests += 0 if limits.requests_per_minute is None else MINUTE_MS
        spent.tokens += 0 if limits.tokens_per_minute is None else _cost(summary) * MINUTE_MS
        self._spent[summary.tenant] = spent
        return 0 if limits.tokens_per_minute is None else _cost(summary)

    def refund(self, tenant: str, num_tokens: int) -> None:
        """Give tokens back that were paid for and never came to be."""
        if num_tokens > 0 and tenant in self._spent:
            spent = self._spent[tenant]
            spent.tokens = max(0, spent.tokens - num_tokens * MINUTE_MS)

    def budget(self, tenant: str, limits: TenantLimits) -> TenantBudget:
        """What is left."""
        spent = self._now(tenant, limits)
        return TenantBudget(
            num_requests=_left(limits.requests_per_minute, spent.requests),
            num_tokens=_left(limits.tokens_per_minute, spent.tokens),
        )

    def _now(self, tenant: str, limits: TenantLimits) -> _Spent:
        spent = self._spent.get(tenant, _Spent(at_ms=self.clock_ms))
        passed = min(MINUTE_MS, max(0, self.clock_ms - spent.at_ms))
        return _Spent(
            _drain(spent.requests, passed, limits.requests_per_minute),
            _drain(spent.tokens, passed, limits.tokens_per_minute),
            self.clock_ms,
        )


def _cost(summary: SubmitRequest) -> int:
    return summary.num_reserved_tokens


def _drain(spent: int, passed_ms: int, limit: int | None) -> int:
    return 0 if limit is None else max(0, spent - passed_ms * limit)


def _left(limit: int | None, spent: int) -> int | None:
    return None if limit is None else max(0, limit - -(-spent // MINUTE_MS))

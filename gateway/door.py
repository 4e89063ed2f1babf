"""What is let in, and what those hear who are not: limits of each tenant, refusals as errors, and how long to wait.

The counting is done by the submit script (`shared/limits.py`); here are the settings it is called with, and its answer
in HTTP's terms: 503 for limits of the cell, 429 for those of a tenant, both with `Retry-After`.
"""

from __future__ import annotations

import math

from gateway.pace import Pace
from shared.bus import SubmitAnswer, SubmitOutcome
from shared.config import DoorConfig
from shared.errors import InvalidRequest, Overloaded, RateLimited, RequestError
from shared.limits import MINUTE_MS, RefusalReason, TenantBudget, TenantLimits
from shared.messages import SubmitRequest

MAX_RETRY_S = 60
"""Who comes back later than this might as well come back now and again: what waits may be cancelled meanwhile."""
UNKNOWN_RETRY_S = 5
"""When nothing has ended of late, so that nobody knows how fast the queue moves."""


class Door:
    """See the module. `pace`: prompt tokens of requests that end."""

    def __init__(self, config: DoorConfig, pace: Pace) -> None:
        self._default = config.default_limits()
        self._tenants = config.limits_by_tenant()
        self._pace = pace

    def limits_of(self, tenant: str) -> TenantLimits:
        """What `tenant` may have."""
        return self._tenants.get(tenant, self._default)

    def check(self, summary: SubmitRequest) -> None:
        """Raise `InvalidRequest` for a request that is larger than its tenant's bucket ever is."""
        most, needed = self.limits_of(summary.tenant).tokens_per_minute, summary.num_reserved_tokens
        if most is not None and needed > most:
            raise InvalidRequest(f"max_tokens: prompt and max_tokens of all choices are {needed} tokens, more than the "
                                 f"{most} that this API key may use in a minute; ask for less", param="max_tokens",
                                 code="request_too_large")  # fmt: skip

    def to_error(self, outcome: SubmitOutcome, tenant: str) -> RequestError:
        """Why a submit that was answered `full` or `limited` is refused."""
        assert outcome.reason is not None
        if outcome.answer is SubmitAnswer.LIMITED:
            kind = "tokens" if outcome.reason is RefusalReason.TENANT_TOKENS else "requests"
            wait_s = max(1, math.ceil(outcome.wait_s))
            headers = self.headers(tenant, outcome.budget)
            return RateLimited(f"Rate limit reached ({outcome.detail}); try again in {wait_s} s", kind=kind,
                               retry_after_s=wait_s, reason=outcome.reason, headers=headers)  # fmt: skip
        text = f"too much work is queued ({outcome.detail}); try again"
        return Overloaded(text, retry_after_s=self._queue_wait_s(outcome.queued.num_tokens), reason=outcome.reason)

    def headers(self, tenant: str, budget: TenantBudget) -> dict[str, str]:
        """OpenAI's `x-ratelimit-…` headers; none where there is no limit."""
        limits = self.limits_of(tenant)
        return _bucket_headers("requests", limits.requests_per_minute, budget.num_requests) | _bucket_headers(
            "tokens", limits.tokens_per_minute, budget.num_tokens
        )

    def _queue_wait_s(self, num_tokens: int) -> int:
        """How long until what waits now has been worked off, at the pace of late."""
        per_s = self._pace.per_s()
        return min(MAX_RETRY_S, max(1, math.ceil(num_tokens / per_s))) if per_s else UNKNOWN_RETRY_S


def _bucket_headers(what: str, limit: int | None, left: int | None) -> dict[str, str]:
    if limit is None or left is None:
        return {}
    full_in_s = (limit - left) / limit * MINUTE_MS / 1000
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(left),
        f"x-ratelimit-reset-{what}": f"{full_in_s:.3f}s",
    }

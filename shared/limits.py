"""What the submit script holds to: how much may wait, and what one tenant may have and spend.

Design note. A tenant's minute is a bucket: it holds a minute's limit, each request takes its share out at once (itself,
and the tokens that it may come to hold), and it fills again evenly. What a request reserved and did not use comes back
at its end. So a tenant that was idle may spend a minute's worth at once, and over any longer time gets its rate. A
request that is refused takes nothing.

The time by which buckets fill is the **cell's clock**: milliseconds in Redis that the leader adds as they pass on its
own monotonic clock (`Bus.raise_lead`). No gateway's clock is asked, so gateways whose clocks differ, or are set, share
one limit all the same; the clock never runs backwards. It stands still while nobody leads: no bucket fills then, and no
request would be scheduled.

What is *queued* is submitted and not with a worker: new, or given back. Counted are sequences (`n` choices are `n`) and
prompt tokens, each prompt once, by the same scripts that change a request's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.errors import ConfigError, shorten

MINUTE_MS = 60_000
MAX_LIMIT = 10**9
"""Buckets count in 1/`MINUTE_MS`, and Lua's numbers are exact up to 2**53."""
ANYONE = "anyone"
"""The one tenant of a cell without API keys."""
TENANT_NAME_CHARS = 16
_FLAG = "--tenant-limits"
_FIELDS = {"rpm": "requests_per_minute", "tpm": "tokens_per_minute", "in-flight": "max_in_flight"}


class RefusalReason(StrEnum):
    """Why the submit script stored nothing. The first five are the cell's (503), the rest the tenant's (429)."""

    MEMORY = "memory"
    LIVE_REQUESTS = "live_requests"
    LIVE_TOKENS = "live_tokens"
    QUEUED_REQUESTS = "queued_requests"
    QUEUED_TOKENS = "queued_tokens"
    TENANT_REQUESTS = "tenant_requests"
    TENANT_TOKENS = "tenant_tokens"
    TENANT_IN_FLIGHT = "tenant_in_flight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have; None: as much as it likes. Tokens are prompt tokens and `max_tokens` of each choice."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_in_flight: int | None = None


UNLIMITED = TenantLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantBudget:
    """What a tenant has left of its minute after this submit; None where it has no limit."""

    num_requests: int | None = None
    num_tokens: int | None = None


NO_BUDGET = TenantBudget()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """What waits for a worker: sequences, and prompt tokens (each prompt once)."""

    num_sequences: int = 0
    num_tokens: int = 0


EMPTY_QUEUE = QueueDepth()


def parse_tenant_limits(texts: Sequence[str], default: TenantLimits) -> dict[str, TenantLimits]:
    """Limits by tenant from texts like `NAME:rpm=60:tpm=9000:in-flight=4`; what one does not name is `default`'s.

    Raises:
        ConfigError: not of that form, or a tenant twice; names the text and what to do.
    """
    found: dict[str, TenantLimits] = {}
    for text in texts:
        name, *settings = text.split(":")
        if not _is_tenant(name):
            raise ConfigError(f"{_FLAG} {shorten(text)}: name the tenant by the first {TENANT_NAME_CHARS} hex digits "
                              f"of its API key's SHA-256, or {ANYONE}")  # fmt: skip
        if name in found:
            raise ConfigError(f"{_FLAG} {shorten(text)}: the tenant is named twice; give all its limits at once")
        found[name] = replace(default, **dict(_parse_limit(text, setting) for setting in settings))
    return found


def _is_tenant(name: str) -> bool:
    return name == ANYONE or (len(name) == TENANT_NAME_CHARS and not set(name) - set("0123456789abcdef"))


def _parse_limit(text: str, setting: str) -> tuple[str, int | None]:
    key, _, value = setting.partition("=")
    is_number = value.isascii() and value.isdigit() and len(value) < 11 and 1 <= int(value) <= MAX_LIMIT
    if key not in _FIELDS or not (value == "none" or is_number):
        raise ConfigError(f"{_FLAG} {shorten(text)}: {shorten(setting)!r} must be one of {', '.join(_FIELDS)} with = "
                          f"and 1 to {MAX_LIMIT}, or none")  # fmt: skip
    return _FIELDS[key], None if value == "none" else int(value)

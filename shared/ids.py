"""Identities: all are made by servers, never taken from a client.

An *incarnation* (`name:random`) names one start of one process. A restarted worker is a new worker, so that nothing
the old one wrote late can be taken for the new one's.
"""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
ConnectionId = NewType("ConnectionId", str)
EntryId = NewType("EntryId", str)

_REQUEST_PREFIX = {"completion": "cmpl-", "chat": "chatcmpl-", "embedding": "embd-"}


def new_request_id(kind: str) -> RequestId:
    """A request id that cannot be guessed: `cmpl-`, `chatcmpl-` or `embd-` and 32 hex digits."""
    return RequestId(_REQUEST_PREFIX[kind] + secrets.token_hex(16))


def is_request_id(text: str) -> bool:
    """Whether `text` has the exact form of an id that `new_request_id` makes."""
    for prefix in _REQUEST_PREFIX.values():
        digits = text.removeprefix(prefix)
        if digits != text and len(digits) == 32 and set(digits) <= set("0123456789abcdef"):
            return True
    return False


def new_incarnation(name: str) -> str:
    """`name:random`, the identity of this start of this process."""
    return f"{name}:{secrets.token_hex(6)}"


def worker_name(worker_id: WorkerId) -> str:
    """What all incarnations of one worker share."""
    return worker_id.rpartition(":")[0]


def new_connection_id() -> ConnectionId:
    """Identity of one listener (one HTTP response being written)."""
    return ConnectionId(secrets.token_hex(6))


def new_leader_token() -> str:
    """Random; compared for equality only, never ordered."""
    return secrets.token_hex(12)


def new_seed() -> int:
    """A seed for a request that brought none: 0 .. 2**63 - 1."""
    return secrets.randbits(63)

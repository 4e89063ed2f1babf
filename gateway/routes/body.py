"""Reading a request's body and the headers that we obey, within their limits."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import limits
from gateway.fold import EventId
from gateway.sse import parse_event_id
from gateway.state import GATEWAY
from shared.errors import InvalidRequest


async def read_body(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        InvalidRequest: it is too large (413), comes too slowly (408) or breaks HTTP's rules.
    """
    http = request.app[GATEWAY].http
    if (request.content_length or 0) > http.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(max_size=http.max_body_bytes, actual_size=request.content_length or 0)
    try:
        async with asyncio.timeout(http.body_timeout_s):
            return await request.read()
    except TimeoutError:
        raise InvalidRequest("the body came too slowly", code="request_timeout") from None
    except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError):
        raise InvalidRequest("the body is not what its headers say", code="bad_request") from None


def idempotency_key(request: web.Request) -> str | None:
    """The `Idempotency-Key` header. Raises `InvalidRequest` when it is no short printable text."""
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not (0 < len(key) <= limits.MAX_IDEMPOTENCY_KEY_CHARS and key.isascii() and key.isprintable()):
        raise InvalidRequest(f"Idempotency-Key: must be 1 to {limits.MAX_IDEMPOTENCY_KEY_CHARS} printable characters",
                             param="Idempotency-Key")  # fmt: skip
    return key


def last_event_id(request: web.Request) -> EventId | None:
    """The `Last-Event-ID` header; absent or empty: from the start."""
    text = request.headers.get("Last-Event-ID", "")
    return parse_event_id(text) if text else None

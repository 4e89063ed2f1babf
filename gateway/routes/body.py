"""Reading a request's body and the headers that we obey, within their limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway import limits
from gateway.body_budget import Share
from gateway.fold import EventId
from gateway.sse import parse_event_id
from gateway.state import GATEWAY
from shared.errors import InvalidRequest


@asynccontextmanager
async def body_of(request: web.Request) -> AsyncIterator[bytes]:
    """The whole body, which counts against the gateway's budget for large bodies until the block is left.

    Raises:
        InvalidRequest: it is too large (413), comes too slowly (408), is compressed, or breaks HTTP's rules.
        Overloaded: too many large bodies are being taken in.
    """
    gateway = request.app[GATEWAY]
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise InvalidRequest("compressed bodies are not taken", code="unsupported_encoding")
    _check_size(request.content_length or 0, gateway.http.max_body_bytes)
    with gateway.bodies.share() as share:
        try:
            async with asyncio.timeout(gateway.http.body_timeout_s):
                data = await _read(request, share, gateway.http.max_body_bytes)
        except TimeoutError:
            raise InvalidRequest("the body came too slowly", code="request_timeout") from None
        except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError):
            raise InvalidRequest("the body is not what its headers say", code="bad_request") from None
        yield data


async def _read(request: web.Request, share: Share, max_bytes: int) -> bytes:
    data = bytearray()
    while piece := await request.content.readany():
        _check_size(len(data) + len(piece), max_bytes)
        share.add(len(piece))
        data += piece
    return bytes(data)


def _check_size(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidRequest("the body is larger than --max-body-bytes allows", code="body_too_large")


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

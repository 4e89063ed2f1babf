"""POST /v1/completions, /v1/chat/completions and /v1/embeddings, GET /v1/streams/{id}: all that workers compute."""

from __future__ import annotations

import time

from aiohttp import web

from gateway.exchange import Exchange
from gateway.routes.body import body_of, idempotency_key, last_event_id
from gateway.state import GATEWAY, REQUEST_ID, TENANT
from gateway.submission import join, submit
from gateway.watch import ResponseWatch


async def post_completion(request: web.Request) -> web.StreamResponse:
    """Text for prompts."""
    return await _generate(request, "completion")


async def post_chat(request: web.Request) -> web.StreamResponse:
    """The next message of a conversation."""
    return await _generate(request, "chat")


async def post_embedding(request: web.Request) -> web.StreamResponse:
    """A vector for each input."""
    return await _generate(request, "embedding")


async def get_stream(request: web.Request) -> web.StreamResponse:
    """A stream again, from the event after `Last-Event-ID`; by any gateway, for the tenant that began it. What
    `best_of` chooses from cannot be streamed, nor can embeddings: their answer comes whole."""
    gateway, started = request.app[GATEWAY], time.monotonic()
    gateway.drain.check()
    after = last_event_id(request)
    with gateway.drain.tracked():
        delivery = await join(gateway, request.match_info["request_id"], request[TENANT])
        watch = ResponseWatch(gateway.metrics, delivery.request_id, is_counted=False, started=started)
        exchange = Exchange(gateway=gateway, request=request, delivery=delivery, watch=watch, ignored=[], after=after)
        is_stream = delivery.body.num_returned is None and delivery.body.kind != "embedding"
        return await exchange.respond(is_stream=is_stream)


async def _generate(request: web.Request, kind: str) -> web.StreamResponse:
    """Take a POST in, store it, and write its response."""
    gateway, started = request.app[GATEWAY], time.monotonic()
    gateway.drain.check()
    key, after = idempotency_key(request), last_event_id(request)
    with gateway.drain.tracked():
        async with body_of(request) as data:
            taken = gateway.embeddings.take(data) if kind == "embedding" else gateway.desk.take(kind, data)
            intake, worker = await taken
        request[REQUEST_ID] = intake.request_id
        sent = await submit(gateway, intake, worker=worker, tenant=request[TENANT], idempotency_key=key)
        delivery = sent.delivery
        watch = ResponseWatch(gateway.metrics, delivery.request_id, is_counted=sent.is_new, started=started)
        exchange = Exchange(
            gateway=gateway,
            request=request,
            delivery=delivery,
            watch=watch,
            ignored=intake.ignored,
            after=None if sent.is_new else after,
            headers=sent.headers,
        )
        return await exchange.respond(is_stream=delivery.body.stream)

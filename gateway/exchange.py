"""Writing one response to one client: a stream of events, or one JSON answer.

No status line goes out before the first event or the failure that replaces it, so that an early failure is still a
plain HTTP error (`--sse-keep-alive-s` gives that up for proxies that need bytes). After it, a failure is an error event
and no `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from gateway.delivery import Delivery
from gateway.embedding import embedding_answer
from gateway.fold import Batch, Event, EventId
from gateway.live import go_live
from gateway.sse import KEEP_ALIVE, Renderer, error_frame
from gateway.state import REQUEST_ID, Gateway
from gateway.watch import ResponseWatch
from shared.errors import Overloaded, QuireError, RequestError, RequestFailed
from shared.failpoints import failpoint
from shared.logs import get_log

DEADLINE_GRACE_S = 3.0
"""The leader ends a request at its deadline; a gateway that hears nothing of it gives up this much later."""
LAST_WRITE_S = 1.0
"""How long a client that reads nothing is given to take the error event."""

_log = get_log("gateway.exchange")


class Exchange:
    """One response; `respond` once.

    Args:
        after: the client has everything up to this event.
        ignored: names of request fields for the warning header.
        headers: further ones of the response.
    """

    def __init__(
        self,
        *,
        gateway: Gateway,
        request: web.Request,
        delivery: Delivery,
        watch: ResponseWatch,
        ignored: list[str],
        after: EventId | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._delivery = delivery
        self._watch = watch
        self._ignored = ignored
        self._after = after
        self._extra_headers = headers or {}
        self._started: web.StreamResponse | None = None
        self._is_over = False

    async def respond(self, *, is_stream: bool) -> web.StreamResponse:
        """Write the response, and tell bus and metrics how it went.

        Raises:
            RequestError, BusError: it failed before its first byte.
        """
        self._request[REQUEST_ID] = self._delivery.request_id
        self._gateway.metrics.open_responses.inc()
        try:
            async with asyncio.timeout(self._gateway.http.request_timeout_s + DEADLINE_GRACE_S):
                return await (self._stream() if is_stream else self._collect())
        except TimeoutError:
            return await self._fail(RequestFailed("the request's deadline has passed", code="deadline_exceeded"))
        except QuireError as error:
            return await self._fail(error)
        except ConnectionError:
            self._end_early("cancelled")
            return self._started or web.Response()  # nobody reads it
        except asyncio.CancelledError:
            self._end_cancelled(is_stream=is_stream)
            raise
        finally:
            self._gateway.metrics.open_responses.dec()
            if not self._is_over:
                self._end_early("failed")
                self._cut()

    async def _collect(self) -> web.StreamResponse:
        events: list[Event] = []
        async for batch in self._delivery.batches():
            events += [event for _, event in batch]
            self._watch.note(batch)
        failpoint("gateway.before_write", self._delivery.request_id)
        if self._delivery.body.kind == "embedding":
            body = embedding_answer(self._delivery.request_id, self._delivery.body, events, self._delivery.usage)
        else:
            body = self._renderer().answer(events, self._delivery.usage, self._delivery.fold.shown_choices())
        self._end_complete()
        return web.Response(body=body, content_type="application/json", headers=self._headers())

    async def _stream(self) -> web.StreamResponse:
        renderer = self._renderer()
        response: web.StreamResponse | None = None
        is_live = bool(self._gateway.http.sse_keep_alive_s)  # keep-alive counts silence where the short way is not seen
        async for batch in self._batches():
            response = await self._start()
            failpoint("gateway.before_write", self._delivery.request_id)
            await response.write(renderer.frames(batch) if batch else KEEP_ALIVE)
            self._watch.note(batch)
            if not is_live:
                is_live = True
                go_live(self._request, self._delivery, renderer, self._watch)
        response = response or await self._start()  # nothing to send: the client has had everything
        self._end_complete()
        with contextlib.suppress(ConnectionError):  # a client may leave once it has seen the last event
            await response.write_eof()
        return response

    async def _start(self) -> web.StreamResponse:
        """The response with its status line and headers out."""
        if self._started is None:
            response = web.StreamResponse(headers=self._headers() | _STREAM_HEADERS)
            await response.prepare(self._request)
            self._started = response
        return self._started

    async def _fail(self, error: QuireError) -> web.StreamResponse:
        """Raise `error` if nothing went out yet; else end the stream with an error event."""
        self._end_early("failed")
        if self._started is None:
            raise error
        shown = error if isinstance(error, RequestError) else RequestFailed("internal error")
        _log.warning("stream.failed", request_id=self._delivery.request_id, code=shown.code)
        try:
            async with asyncio.timeout(LAST_WRITE_S):
                await self._started.write(error_frame(shown))
                await self._started.write_eof()
        except TimeoutError:
            self._cut()
        return self._started

    def _batches(self) -> AsyncIterator[Batch]:
        """The delivery's batches; with keep-alive on, an empty one at once and after each silence."""
        silence_s = self._gateway.http.sse_keep_alive_s
        batches = self._delivery.batches(self._after)
        return _with_keep_alive(batches, silence_s) if silence_s else batches

    def _end_complete(self) -> None:
        self._is_over = True
        self._delivery.complete()
        self._watch.end("finished", self._delivery.usage)

    def _end_early(self, outcome: str) -> None:
        self._is_over = True
        self._delivery.leave()
        self._watch.end(outcome, self._delivery.usage)

    def _end_cancelled(self, *, is_stream: bool) -> None:
        """The client left, or a draining gateway cuts the response: then a stream's request runs on."""
        if not self._gateway.drain.is_closing:
            self._end_early("cancelled")
        elif is_stream:
            self._is_over = True
            self._delivery.complete()
            self._cut()
        else:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            self._end_early("cancelled")
            raise Overloaded("this gateway is shutting down; try again", code="draining")

    def _cut(self) -> None:
        """Close a stream that has begun, so that its client cannot take it for complete."""
        if self._started is not None and self._request.transport is not None:
            self._request.transport.abort()

    def _renderer(self) -> Renderer:
        price = self._gateway.http.price_per_hour
        return Renderer(self._delivery.request_id, self._delivery.body, self._delivery.token_text, price)

    def _headers(self) -> dict[str, str]:
        headers = {"X-Request-Id": str(self._delivery.request_id)} | self._extra_headers
        return headers | ({"X-Quire-Ignored-Fields": ", ".join(self._ignored)} if self._ignored else {})


_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


async def _with_keep_alive(batches: AsyncIterator[Batch], silence_s: float) -> AsyncIterator[Batch]:
    """`batches`, and an empty one at once and after each `silence_s` without any."""
    yield []
    while True:
        coming = asyncio.ensure_future(anext(batches, None))
        try:
            while not (await asyncio.wait({coming}, timeout=silence_s))[0]:
                yield []
        finally:
            coming.cancel()
        coming_batch = await coming
        if coming_batch is None:
            return
        yield coming_batch

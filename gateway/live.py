"""The short way of a token: from a publication straight into the client's connection.

Design note. A response is a task that waits for log entries, folds them and writes (`exchange.py`). Waking a task for
each token costs more than all that is then done for it, so while such a task waits, and has nothing left to send, the
relay hands it the next bytes of the log by a plain call instead. That call does what the task would do, and only if it
is as simple as nearly always: one token in the midst of a choice, of a request without stop strings and logprobs, and a
client that has taken everything so far. It does all of it or nothing: then the bytes go the long way, where ends, gaps,
failures and slow clients are dealt with, and where several tokens that wait go out in one write.

The response is aiohttp's; its own writer would add a coroutine and four calls around the one that matters here. Writing
past it is sound since it holds nothing back once it has written the first event.
"""

from __future__ import annotations

import asyncio

from aiohttp import HttpVersion11, web

from gateway.delivery import Delivery
from gateway.fold import ResponseFold
from gateway.sse import Renderer
from gateway.watch import ResponseWatch
from shared.failpoints import is_armed
from shared.log import decode_token


class LiveStream:
    """Writes the plain tokens of one response; call it with the next bytes of its log."""

    def __init__(
        self, transport: asyncio.Transport, fold: ResponseFold, renderer: Renderer, watch: ResponseWatch
    ) -> None:
        self._transport = transport
        self._fold = fold
        self._renderer = renderer
        self._watch = watch

    def __call__(self, data: bytes) -> bool:
        """Whether `data` was folded and written; if not, nothing was done."""
        transport, fold = self._transport, self._fold
        if transport.is_closing() or transport.get_write_buffer_size() > 0:
            return False
        entry = decode_token(data)
        text = None if entry is None else fold.feed_token(*entry)
        if entry is None or text is None:
            return False
        if text:
            frame = self._renderer.text_frame(fold.num_entries, 0, entry[0], text)
            transport.write(b"%x\r\n%b\r\n" % (len(frame), frame))
            self._watch.note_text()
        return True


def go_live(request: web.Request, delivery: Delivery, renderer: Renderer, watch: ResponseWatch) -> None:
    """Let the plain tokens of a response that has begun take the short way, if its connection is of the usual kind."""
    transport = request.transport
    if transport is not None and request.version == HttpVersion11 and not is_armed("gateway.before_write"):
        delivery.go_live(LiveStream(transport, delivery.fold, renderer, watch))

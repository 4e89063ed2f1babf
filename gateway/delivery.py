"""One response being delivered: log entries in, events out, and what the bus is told about it.

What a request cost is not in its log: workers write it into the record, with each commit of a request that asks, so
the record is read when the last choice has ended. What a worker computed past a stop string, before it heard of it, is
in the record and in the metrics, not in the answer.

A delivery owns one listener. It ends in one of four ways: complete (the fold saw every choice end), failed (an error is
raised), left (its client went: detach, and end the request if nobody is left and nobody may come back), or closed by a
draining gateway (nothing is told: the listener goes with the gateway, so that anyone can resume the stream).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

from gateway.background import Background, insist
from gateway.detokenize import TokenText
from gateway.errors import from_ended
from gateway.fold import Batch, EventId, ResponseFold, Usage
from gateway.relay import Listener
from shared.bus import Bus
from shared.errors import InvalidRequest, RequestFailed
from shared.failpoints import failpoint
from shared.ids import GatewayId
from shared.messages import RequestBody
from shared.work_time import WorkTime

SLICE = 256
"""Log entries folded at a time, so that one long log does not hold up the event loop."""


class Delivery:
    """See the module. `body` is the one in the record, `token_text` that of its model.

    Args:
        timeout_s: how long the bus is asked again to take a stop or a departure.
    """

    def __init__(
        self,
        *,
        bus: Bus,
        gateway_id: GatewayId,
        listener: Listener,
        body: RequestBody,
        token_text: TokenText,
        background: Background,
        timeout_s: float,
    ) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._listener = listener
        self.fold = ResponseFold(body, token_text)
        self._background = background
        self._timeout_s = timeout_s
        self.body = body
        self.token_text = token_text
        self.request_id = listener.request_id
        self._worked: WorkTime | None = None
        self.connection_id = listener.connection_id

    @property
    def usage(self) -> Usage:
        """Tokens so far; final when complete, and with the worker time then if it was asked for."""
        usage = self.fold.usage
        return usage if self._worked is None else replace(usage, worked=self._worked)

    async def batches(self, after: EventId | None = None) -> AsyncIterator[Batch]:
        """Events past `after`, in order, as they come; lists are never empty. Ends when the response is complete.

        Raises:
            RequestError: the request ended otherwise; or `after` lies beyond the end of an ended log.
        """
        while not self.fold.is_complete:
            entries = await self._listener.read()
            for start in range(0, len(entries), SLICE):
                events = self.fold.feed(entries[start : start + SLICE])
                self._tell_stops()
                if self.body.include_cost:
                    events = await self._add_cost(events)
                if after is not None:
                    events = [pair for pair in events if pair[0] > after]
                if events:
                    yield events
                if start + SLICE < len(entries):
                    await asyncio.sleep(0)
            if not entries:
                raise self._why_incomplete(after)
        if after is not None and after.entries > self.fold.num_entries:
            raise _beyond_end(after)

    def go_live(self, live: Callable[[bytes], bool]) -> None:
        """From now on offer `live` the next bytes of the log first, whenever `batches` waits for some."""
        self._listener.live = live

    def complete(self) -> None:
        """The client has everything."""
        self._listener.close()

    def leave(self) -> None:
        """The client is gone."""
        self._listener.close()
        if self._listener.ended is None:
            self._background.spawn(insist(self._tell_departure, request_id=self.request_id, timeout_s=self._timeout_s))

    async def _tell_departure(self) -> None:
        failpoint("gateway.before_end", self.request_id)
        left = await self._bus.detach(self.request_id, self._gateway_id, self._listener.connection_id)
        if left == 0 and not self.body.has_idempotency_key:
            await self._bus.end(self.request_id, "cancelled")

    def _tell_stops(self) -> None:
        for choice, index in self.fold.take_stops():
            stop = partial(self._bus.stop_choice, self.request_id, choice, index)
            self._background.spawn(insist(stop, request_id=self.request_id, timeout_s=self._timeout_s))

    async def _add_cost(self, events: Batch) -> Batch:
        """`events`; with what the request cost in its usage if they are the last ones."""
        if not self.fold.is_complete:
            return events
        self._worked = await self._listener.read_worked()
        return [(event_id, self.usage) if isinstance(event, Usage) else (event_id, event) for event_id, event in events]

    def _why_incomplete(self, after: EventId | None) -> Exception:
        """The log is at its end and choices are open."""
        ended = self._listener.ended
        if ended is None or ended.reason == "finished":
            return RequestFailed("the log of the request is not whole", code="log_not_whole")
        if after is not None and after.entries > self.fold.num_entries:
            return _beyond_end(after)
        return from_ended(ended)


def _beyond_end(after: EventId) -> InvalidRequest:
    shown = f"{after.entries}.{after.number}"
    return InvalidRequest(f"Last-Event-ID: {shown} lies beyond the end of this stream", param="Last-Event-ID")

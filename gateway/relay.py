"""From the bus to the HTTP responses of this gateway: publications are the fast path, the log is the truth.

One subscription a gateway; each response has a `Listener` that gives its log entries in order, each once:

* chunks are ordered by byte offset; what lies before the position is dropped, a gap is read from the log;
* after a (re-)subscription, and after a second of silence, the log is read from the position on, since the last
  publication may be the lost one;
* a listener buffers a bounded number of bytes; when its client is slow it drops them and reads the log later;
* the end is known from `RequestEnded` or from the record, and the log is read once more before it is believed;
* a record that is gone (expired, FLUSHALL) is an error, as is a bus that stays away until the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway import limits
from shared.bus import Bus, ChannelMessage, RequestRecord, Subscribed
from shared.errors import BusError, RequestFailed
from shared.ids import ConnectionId, GatewayId, RequestId, new_connection_id
from shared.log import LogEntry, decode_entries
from shared.logs import get_log
from shared.messages import RequestEnded, TokenChunk
from shared.work_time import WorkTime

RETRY_S = 0.2

_log = get_log("gateway.relay")


class Relay:
    """Hands publications to listeners. `run` is a task for the life of the gateway."""

    def __init__(self, bus: Bus, gateway_id: GatewayId) -> None:
        self._bus = bus
        self.gateway_id = gateway_id
        self._listeners: dict[RequestId, set[Listener]] = {}
        self.is_subscribed = asyncio.Event()

    async def run(self) -> None:
        """Read the subscription until cancelled."""
        subscription = self._bus.subscribe(self.gateway_id)
        subscription.deliver = self._hand_out
        try:
            while True:
                heard = await subscription.next(limits.SILENCE_S)
                if isinstance(heard, Subscribed):
                    self.is_subscribed.set()
                    self._refill_all()
                else:
                    self._hand_out(heard or [])
        finally:
            await subscription.close()

    def listen(self, request_id: RequestId) -> Listener:
        """A new listener for `request_id`, from the start of its log. Close it."""
        listener = Listener(self._bus, self, request_id)
        self._listeners.setdefault(request_id, set()).add(listener)
        return listener

    def forget(self, listener: Listener) -> None:
        """Hand nothing more to `listener`."""
        others = self._listeners.get(listener.request_id, set())
        others.discard(listener)
        if not others:
            self._listeners.pop(listener.request_id, None)

    @property
    def num_listeners(self) -> int:
        """Responses that are being written."""
        return sum(len(listeners) for listeners in self._listeners.values())

    def _hand_out(self, messages: list[ChannelMessage]) -> None:
        for message in messages:
            for listener in self._listeners.get(message.request_id, ()):
                listener.offer(message)

    def _refill_all(self) -> None:
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.refill()


class Listener:
    """The log entries of one request, for one response."""

    def __init__(self, bus: Bus, relay: Relay, request_id: RequestId) -> None:
        self._bus = bus
        self._relay = relay
        self.request_id = request_id
        self.connection_id: ConnectionId = new_connection_id()
        self._position = 0
        self._buffer = bytearray()
        self._buffer_start = 0
        self._must_refill = False
        self._must_check = False
        self._is_woken = False
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.ended: RequestEnded | None = None
        self.live: Callable[[bytes], bool] | None = None
        """Called with the next bytes of the log while the reader waits; True: it has dealt with them."""

    def offer(self, message: ChannelMessage) -> None:
        """Take a publication; never blocks, never grows beyond its bound."""
        if isinstance(message, TokenChunk):
            if self._is_passed_on(message):
                return
            self._keep(message)
        else:
            self._must_check = True
        self._wake()

    def refill(self) -> None:
        """Publications may be lost: look at log and record next."""
        self._must_refill = self._must_check = True
        self._wake()

    async def read(self) -> list[LogEntry]:
        """The next entries, at least one; empty when the request has ended and its whole log was read (`ended` says
        how).

        Raises:
            RequestFailed: the record is gone.
        """
        while True:
            data = self._from_buffer()
            if not data and self._must_refill:
                data = await self._from_log()
            if not data and self._must_check:
                await self._check_ended()
            if not data and self.ended is not None:
                data = await self._from_log()
            if data or self.ended is not None:
                self._position += len(data)
                return decode_entries(data)
            await self._wait()

    @property
    def num_buffered(self) -> int:
        """Bytes that wait to be read."""
        return len(self._buffer)

    def close(self) -> None:
        """Stop listening in this process."""
        self._relay.forget(self)
        self._buffer.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _is_passed_on(self, chunk: TokenChunk) -> bool:
        """Whether `live` took `chunk`. A reader that waits has read all before; it goes on waiting."""
        if self.live is None or self._waiting is None or self._waiting.done() or chunk.offset != self._position:
            return False
        if not self.live(chunk.data):
            return False
        self._position += len(chunk.data)
        self._waits_since = self._loop.time()
        return True

    def _keep(self, chunk: TokenChunk) -> None:
        """Put `chunk` behind the buffer, which is one unbroken run of the log: after a gap it begins anew."""
        end = self._buffer_start + len(self._buffer)
        if not self._buffer or chunk.offset > end:
            self._must_refill |= bool(self._buffer)
            self._buffer_start, self._buffer = chunk.offset, bytearray(chunk.data)
        else:
            self._buffer += chunk.data[end - chunk.offset :]
        if len(self._buffer) > limits.MAX_BUFFERED_BYTES:
            self._buffer.clear()
            self._must_refill = True

    def _from_buffer(self) -> bytes:
        """What the buffer holds from the position on; a gap before it asks for a refill."""
        if self._buffer and self._buffer_start > self._position:
            self._must_refill = True
        if self._must_refill:
            return b""
        data = bytes(self._buffer[self._position - self._buffer_start :])
        self._buffer.clear()
        return data

    async def _from_log(self) -> bytes:
        """The log from the position on. The flag falls first: what is published meanwhile raises it again."""
        self._must_refill = False
        while True:
            try:
                return await self._bus.read_log(self.request_id, self._position)
            except BusError as error:
                await self._pause(error)

    async def read_worked(self) -> WorkTime:
        """What workers have computed for the request so far. Raises `RequestFailed`: the record is gone."""
        return (await self._load_record()).worked

    async def _check_ended(self) -> None:
        """Look at the record: has the request ended?"""
        self._must_check = False
        self.ended = (await self._load_record()).ended

    async def _load_record(self) -> RequestRecord:
        while True:
            try:
                record = await self._bus.load_record(self.request_id)
                break
            except BusError as error:
                await self._pause(error)
        if record is None:
            raise RequestFailed("the request's record is lost", code="request_lost")
        return record

    async def _wait(self) -> None:
        """Until something is offered; after a second of silence look at log and record. Called for every token, so the
        timer is not set anew each time: it finds out itself, about once a second, whether there was silence."""
        if not self._is_woken:
            self._waiting, self._waits_since = self._loop.create_future(), self._loop.time()
            if self._timer is None:
                self._timer = self._loop.call_later(limits.SILENCE_S, self._notice_silence)
            await self._waiting
        self._is_woken = False

    def _wake(self) -> None:
        self._is_woken = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _notice_silence(self) -> None:
        """The timer: refill when the reader has waited long enough, else come back when it will have."""
        self._timer = None
        if self._waiting is None or self._waiting.done():
            return
        left_s = self._waits_since + limits.SILENCE_S - self._loop.time()
        if left_s <= 0:
            self.refill()
        else:
            self._timer = self._loop.call_later(left_s, self._notice_silence)

    async def _pause(self, error: BusError) -> None:
        _log.recurring("read.failed", request_id=self.request_id, error=error)
        await asyncio.sleep(RETRY_S)

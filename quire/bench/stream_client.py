"""A streaming client that costs next to nothing, so that on few cores it does not crowd out what it measures.

It speaks just enough HTTP/1.1 to send one POST on a new connection and to take a chunked answer in; the bytes are kept
and looked at when all is over.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class StreamAnswer(asyncio.Protocol):
    """One request and its answer. Times are `time.perf_counter` seconds; `first_at` is when the first event came.

    Args:
        request: the whole HTTP request.
    """

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = 0.0
        self.first_at = 0.0
        self.num_reads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_reads += 1
        if not self.first_at and b"data: " in data:
            self.first_at = time.perf_counter()
        self._received += data
        if self._received.endswith(_LAST_CHUNK):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    async def wait(self) -> None:
        """Until the answer has come, or the connection is lost."""
        await self._done

    def events(self) -> list[dict[str, Any]]:
        """The answer's events without `[DONE]`.

        Raises:
            ValueError: it was no whole stream with status 200.
        """
        head, _, body = bytes(self._received).partition(_HEAD_END)
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"not a stream: {bytes(self._received[:300])!r}")
        frames = _join_chunks(body).decode().split("\n\n")
        texts = [line[6:] for frame in frames for line in frame.split("\n") if line.startswith("data: ")]
        if not texts or texts[-1] != "[DONE]":
            raise ValueError("the stream is not whole")
        return [json.loads(text) for text in texts[:-1]]

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)
        if self._transport is not None:
            self._transport.close()


@contextmanager
def as_background() -> Iterator[None]:
    """Within, this process does not push another one off its core by waking up (SCHED_BATCH). A client on another
    machine could not, either; here each event that the gateway writes wakes the client."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


async def send(port: int, path: str, body: dict[str, Any]) -> StreamAnswer:
    """The answer of 127.0.0.1:`port` to one POST, once it is all there. Raises `OSError`."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    request = head.encode() + _HEAD_END + data
    loop = asyncio.get_running_loop()
    _, answer = await loop.create_connection(lambda: StreamAnswer(request), "127.0.0.1", port)
    await answer.wait()
    return answer


def _join_chunks(body: bytes) -> bytes:
    """What a chunked body says."""
    parts: list[bytes] = []
    at = 0
    while True:
        line_end = body.index(b"\r\n", at)
        size = int(body[at:line_end], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2

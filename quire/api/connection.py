"""HTTP to one deployment: requests that are sent again where that is right, streams that go on after a cut.

Design note. What a server refuses for now (429, 503) is asked again after its `Retry-After`. A connection that fails
before the answer is there is made anew; the request is sent again, since nobody has seen anything of the first one. A
stream that is cut is taken up at the event where it ended, under its id, at whichever gateway answers: no token is lost
or doubled. All this goes on while the server answers. When it has said nothing, or known of no worker, for its
`patience_s`, the caller gets an exception, and at once when the services are our own and have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import aiohttp
import orjson

from shared.errors import ArgumentError, DeploymentError, QuireError, RequestFailed, shorten

RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0
CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 64 << 20
"""The first event of a stream holds the prompt's token ids."""

_BUSY = (429, 503)
_CALLERS_FAULT = range(400, 500)
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)


class Server(Protocol):
    """Where the requests go."""

    @property
    def url(self) -> str:
        """Without /v1."""
        ...

    @property
    def api_key(self) -> str | None:
        """What it wants as a bearer token."""
        ...

    @property
    def patience_s(self) -> float:
        """How long it may say nothing, or know of no worker, before a request is given up."""
        ...

    def check(self) -> None:
        """Raise `DeploymentError` when it is known to have ended."""
        ...


class Connection:
    """Requests to `server`, from one event loop; `close` at the end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> bytes:
        """What a GET answers. Raises `QuireError`."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a POST answers. Raises `QuireError`."""
        answer: dict[str, Any] = orjson.loads(await self._ask("POST", path, _encode(body)))
        return answer

    async def order(self, path: str, body: dict[str, Any], key: str) -> None:
        """A POST for those who have `key`, which only answers that it is done. Raises `QuireError`."""
        await self._ask("POST", path, _encode(body), {"Authorization": f"Bearer {key}"})

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, each once, until it is complete. Raises `QuireError`."""
        stream = _Stream(path, _encode(body | {"stream": True}))
        patience = _Patience(self._server)
        while not stream.is_complete:
            try:
                async with self._open().request(
                    *stream.request(), data=stream.data, headers=stream.headers()
                ) as answer:
                    if answer.status != 200:
                        await patience.wait(answer, _to_error(answer.status, await answer.read()))
                        continue
                    patience.renew()
                    stream.request_id = answer.headers["X-Request-Id"]
                    async for event in stream.read(answer):
                        yield event
            except _LOST as error:
                await patience.wait(None, _lost(error))
            else:
                if not stream.is_complete:
                    await patience.wait(None, DeploymentError("a stream ended too soon"))

    async def close(self) -> None:
        """Drop all connections; what is in flight ends at the server."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, data: bytes | None, more_headers: Mapping[str, str] = {}) -> bytes:
        patience = _Patience(self._server)
        headers = {"Content-Type": "application/json", **more_headers}
        while True:
            try:
                async with self._open().request(method, path, data=data, headers=headers) as answer:
                    content = await answer.read()
            except _LOST as error:
                await patience.wait(None, _lost(error))
                continue
            if answer.status == 200:
                return content
            await patience.wait(answer, _to_error(answer.status, content))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            key = self._server.api_key
            self._session = aiohttp.ClientSession(
                base_url=self._server.url,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                read_bufsize=MAX_LINE_BYTES,
            )
        return self._session


class _Patience:
    """How long one request goes on trying."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.renew()

    def renew(self) -> None:
        """The server does answer."""
        self._deadline = time.monotonic() + self._server.patience_s
        self._pause_s = RETRY_FIRST_S

    async def wait(self, answer: aiohttp.ClientResponse | None, error: QuireError) -> None:
        """Until it is time to try again. Raises `error` when that would not help; `answer` None: there was none."""
        self._server.check()
        pause_s = self._pause_s
        if answer is not None:
            if answer.status not in _BUSY:
                raise error
            pause_s = float(answer.headers.get("Retry-After", 1))
            if getattr(error, "code", None) not in ("no_worker", "draining"):
                self.renew()
        if time.monotonic() + pause_s > self._deadline:
            raise error
        await asyncio.sleep(pause_s)
        self._server.check()
        self._pause_s = min(2 * self._pause_s, RETRY_MAX_S)


class _Stream:
    """One stream over several connections."""

    def __init__(self, path: str, data: bytes) -> None:
        self._path = path
        self._data = data
        self._last_id = ""
        self.request_id = ""
        self.is_complete = False

    @property
    def data(self) -> bytes | None:
        return None if self.request_id else self._data

    def request(self) -> tuple[str, str]:
        """Method and path: of a new stream, or of one that the server has begun."""
        return ("GET", f"/v1/streams/{self.request_id}") if self.request_id else ("POST", self._path)

    def headers(self) -> dict[str, str]:
        if not self.request_id:
            return {"Content-Type": "application/json"}
        return {"Last-Event-ID": self._last_id} if self._last_id else {}

    async def read(self, answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """The events in `answer`. Raises `QuireError` for one that says so."""
        event_id = ""
        async for line in answer.content:
            if line.startswith(b"id: "):
                event_id = line[4:].strip().decode()
            elif line.startswith(b"data: "):
                if line.startswith(b"data: [DONE]"):
                    self.is_complete = True
                    return
                event = orjson.loads(line[6:])
                if "error" in event:
                    raise _error_of(500, event)
                self._last_id = event_id
                yield event


def _encode(body: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise ArgumentError(f"a request cannot be written as JSON: {error}") from None


def _lost(error: Exception) -> DeploymentError:
    return DeploymentError(f"the server does not answer: {shorten(str(error) or type(error).__name__)}")


def _to_error(status: int, content: bytes) -> QuireError:
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get("error"), dict):
        return DeploymentError(f"HTTP {status}: {shorten(content.decode(errors='replace'))}")
    return _error_of(status, answer)


def _error_of(status: int, answer: dict[str, Any]) -> QuireError:
    """The error object of an answer, or of an event in a stream."""
    error = answer["error"]
    message = str(error.get("message"))
    if status == 401:
        return ArgumentError(f"api_key: {message}")
    if status in _CALLERS_FAULT and status not in _BUSY:
        return ArgumentError(message)
    return RequestFailed(message, code=error.get("code"))

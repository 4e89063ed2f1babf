"""The HTTP server: aiohttp with limits on headers and connections, and our error object where its parser refuses."""

from __future__ import annotations

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from gateway import limits
from gateway.middleware import error_response
from shared.errors import InvalidRequest


class _Connection(web.RequestHandler):
    """One connection. A request that cannot be parsed never reaches a handler, so its answer is made here."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        if isinstance(exc, LineTooLong) or "Too many headers" in (message or ""):
            most = f"{limits.MAX_HEADERS} headers of {limits.MAX_HEADER_BYTES} bytes"
            error = InvalidRequest(f"the headers are too large: at most {most}", code="headers_too_large")
        else:
            error = InvalidRequest("the request is not valid HTTP", code="bad_request")
        response = error_response(error)
        response.headers["Server"] = "quire"  # no `on_response_prepare` here; aiohttp would name its version
        response.force_close()
        return response


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    """aiohttp has no setting for the class of its connections, so the server that it made gets ours."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Server
        return server


class HttpServer:
    """Serves `app`. A handler is cancelled when its client goes."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._runner = _Runner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            keepalive_timeout=limits.IDLE_TIMEOUT_S,
            lingering_time=1.0,
            auto_decompress=False,  # a few kB can be 300 MB; `routes/body.py` refuses what is compressed
            max_line_size=limits.MAX_HEADER_BYTES,
            max_field_size=limits.MAX_HEADER_BYTES,
            max_headers=limits.MAX_HEADERS,
        )

    async def start(self) -> int:
        """Listen; the port. Raises `OSError` when the address cannot be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening and close every connection."""
        await self._runner.cleanup()

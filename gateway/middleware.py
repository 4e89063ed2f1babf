"""Around every handler: the key check, one error shape for everything, and the headers of every answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.auth import ADMIN_ROUTES, OPEN_ROUTES
from gateway.errors import refusal_reason, to_answer
from gateway.state import GATEWAY, REQUEST_ID, TENANT
from shared.errors import InvalidRequest, NotFound, QuireError, RequestFailed
from shared.logs import get_log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_log("gateway.http")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Decide on the routed path who may pass, and turn whatever fails into OpenAI's error object."""
    gateway = request.app[GATEWAY]
    try:
        resource = request.match_info.route.resource
        if resource is not None and resource.canonical in ADMIN_ROUTES and gateway.adapters.keys is not None:
            gateway.adapters.keys.tenant(request.headers.getall("Authorization", []))
        elif resource is None or resource.canonical not in OPEN_ROUTES:
            request[TENANT] = gateway.keys.tenant(request.headers.getall("Authorization", []))
        return await handler(request)
    except QuireError as error:
        gateway.metrics.error_answers.inc()
        gateway.metrics.note_refusal(refusal_reason(error))
        return error_response(error)
    except web.HTTPException as error:
        gateway.metrics.error_answers.inc()
        return error_response(_from_http(error))
    except Exception:
        gateway.metrics.crashes.inc()
        request_id = request.get(REQUEST_ID, "")
        _log.error("handler.failed", exc_info=True, method=request.method, request_id=request_id)
        return error_response(RequestFailed("internal error"))


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every answer, streams included (an `on_response_prepare` signal)."""
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.pop("Server", None)


def error_response(error: QuireError) -> web.Response:
    """The whole answer for `error`."""
    answer = to_answer(error)
    headers = answer.headers | {"X-Content-Type-Options": "nosniff"}
    return web.Response(status=answer.status, body=answer.body, headers=headers, content_type="application/json")


def _from_http(error: web.HTTPException) -> QuireError:
    """aiohttp's own refusals, as ours."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return InvalidRequest("the body is larger than --max-body-bytes allows", code="body_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        return InvalidRequest(f"the method is not allowed here, use {', '.join(sorted(error.allowed_methods))}",
                              code="method_not_allowed")  # fmt: skip
    if error.status == 404:
        return NotFound("no such route")
    return InvalidRequest("the request is malformed", code="bad_request")

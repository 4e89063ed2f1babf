"""From an error to an HTTP answer: the only place that knows status codes."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

from shared.errors import (
    BusError,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuireError,
    RateLimited,
    RequestError,
    RequestFailed,
    Unauthorized,
)
from shared.limits import RefusalReason
from shared.messages import RequestEnded

_STATUS: dict[type[RequestError], int] = {
    InvalidRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    IdempotencyConflict: 409,
    RateLimited: 429,
    Overloaded: 503,
    RequestFailed: 500,
}
_STATUS_OF_CODE = {
    "method_not_allowed": 405,
    "request_timeout": 408,
    "body_too_large": 413,
    "headers_too_large": 431,
    "deadline_exceeded": 504,
}
REFUSAL_REASONS = (*RefusalReason, "no_worker", "draining", "store", "busy")
"""`store`: Redis takes no writes now. `busy`: this gateway has too many large bodies or prompts at once."""
_INVALID_KINDS = frozenset(
    {"invalid_adapter", "never_fits", "context_length_exceeded", "invalid_value", "invalid_request"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """Status, body (JSON bytes of OpenAI's error object) and extra headers."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def to_answer(error: QuireError) -> ErrorAnswer:
    """The answer to a client whose request met `error`."""
    if isinstance(error, BusError):
        error = Overloaded("the service cannot store requests now; try again")
    if not isinstance(error, RequestError):
        error = RequestFailed("internal error")
    status = _STATUS_OF_CODE.get(error.code or "") or _status_of_class(error)
    headers: dict[str, str] = {}
    if isinstance(error, Overloaded | RateLimited):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, RateLimited):
        headers |= error.headers
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorAnswer(status=status, body=orjson.dumps(to_object(error)), headers=headers)


def to_object(error: RequestError) -> dict[str, object]:
    """OpenAI's error object; also what an error event of a stream holds."""
    status = _STATUS_OF_CODE.get(error.code or "") or _status_of_class(error)
    kind = "invalid_request_error" if status < 500 else "server_error"
    if isinstance(error, RateLimited):
        kind = error.kind
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def refusal_reason(error: QuireError) -> str | None:
    """The reason by which metrics count a request that was turned away; None for an error of another kind."""
    if isinstance(error, BusError):
        return "store"
    if not isinstance(error, Overloaded | RateLimited):
        return None
    return error.reason if error.reason in REFUSAL_REASONS else "busy"


def from_ended(ended: RequestEnded) -> RequestError:
    """Why a request ended without all of its choices finished."""
    message = ended.error_message or f"the request ended early: {ended.reason}"
    if ended.reason == "rejected" and ended.error_kind in _INVALID_KINDS:
        return InvalidRequest(message, code=ended.error_kind)
    if ended.reason == "rejected":
        return Overloaded(message, code=ended.error_kind or None)
    if ended.reason == "deadline":
        return RequestFailed(message, code="deadline_exceeded")
    if ended.reason == "cancelled":
        return RequestFailed(message, code="cancelled")
    return RequestFailed(message, code=ended.error_kind or None)


def _status_of_class(error: RequestError) -> int:
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)

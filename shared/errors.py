"""The error tree: every failure that a user, a peer or the machine can cause.

    QuireError
    ├── ConfigError             a flag, variable or folder is wrong; the process does not start
    ├── WireError               bytes on the bus that are not a message of ours
    ├── BusError                Redis cannot be used now
    │   ├── BusUnavailable      no connection, a time-out, a failover
    │   ├── BusRefused          Redis refuses writes (memory or disk full)
    │   └── BusBroken           Redis holds what is none of ours under a name of ours
    ├── LeaderLost              another scheduler holds the leader token
    ├── ArgumentError           Python API: an argument is wrong, or asks for what is not built; also a ValueError
    ├── DeploymentError         Python API: the services cannot be reached, or have ended; also a RuntimeError
    └── RequestError            one request is refused or failed; carries `code` and `param`
        ├── InvalidRequest      the request itself is wrong (400)
        ├── Unauthorized        no key or a wrong one (401)
        ├── NotFound            no such model, stream or route (404)
        ├── IdempotencyConflict the key was used with another body (409)
        ├── RateLimited         its tenant has used up what it may have (429); `retry_after_s`
        ├── Overloaded          a limit of ours is reached, or nothing serves now (503); `retry_after_s`
        └── RequestFailed       accepted, then failed (500)

HTTP status codes live in `gateway/errors.py` only.
"""

from __future__ import annotations

MAX_SHOWN_CHARS = 200
_NUM_LAST_CHARS = 40


def shorten(value: object, most: int = MAX_SHOWN_CHARS) -> str:
    """What a user or a file gave, as an error's text should hold it: whole while it has at most `most` characters, else
    its beginning and its end."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most - _NUM_LAST_CHARS - 3]}...{text[-_NUM_LAST_CHARS:]}"


class QuireError(Exception):
    """Root of all errors raised on purpose."""


class ConfigError(QuireError):
    """A setting is wrong; the text names it, its value and the remedy."""


class WireError(QuireError):
    """Bytes that do not decode to a known message."""


class BusError(QuireError):
    """The bus cannot do what was asked now; trying again later is right."""


class BusUnavailable(BusError):
    """No connection to Redis, or no answer in time. The effect may or may not have happened."""


class BusRefused(BusError):
    """Redis refused a write (maxmemory, disk). The effect has not happened."""


class BusBroken(BusError):
    """Redis answered an error that only foreign data explains, such as a key of another type. It has to be repaired, by
    us where a reader knows how, else by its owner; until then everybody keeps trying."""


class LeaderLost(QuireError):
    """This scheduler's leader token is no longer the one in Redis."""


class ArgumentError(QuireError, ValueError):
    """An argument of the Python API is wrong, or asks for what is not built; the text names it."""


class DeploymentError(QuireError, RuntimeError):
    """The services behind the Python API cannot be started or reached, or have ended."""


class RequestError(QuireError):
    """One request is refused or failed.

    Args:
        message: for the client; names field, value and range where there is one.
        param: name of the request field at fault, None if none is.
        code: short machine-readable reason.
    """

    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code


class InvalidRequest(RequestError):
    """The request can never be served as it stands."""

    default_code = "invalid_value"


class Unauthorized(RequestError):
    """No API key, or one that is not known."""

    default_code = "invalid_api_key"


class NotFound(RequestError):
    """The named model, stream or route does not exist."""

    default_code = "not_found"


class IdempotencyConflict(RequestError):
    """The idempotency key belongs to a request with another body."""

    default_code = "idempotency_conflict"


class RateLimited(RequestError):
    """The tenant has used up what it may have for now. `kind` as in OpenAI's error object: requests or tokens;
    `headers` say what is left; `reason` as the metrics count it."""

    default_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, retry_after_s: int, reason: str, headers: dict[str, str]) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.reason = reason
        self.headers = headers


class Overloaded(RequestError):
    """Nothing is wrong with the request; there is no room, or no worker, for it now. `reason` as the metrics count
    it; none: by `code`."""

    default_code = "overloaded"

    def __init__(
        self, message: str, *, retry_after_s: int = 1, code: str | None = None, reason: str | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s
        self.reason = reason or self.code


class RequestFailed(RequestError):
    """The request was accepted and could not be finished."""

    default_code = "internal_error"

"""What becomes of bytes on the bus that no message of ours can be made of.

They are kept in the capped stream `dead` for people to read, and the request they name, if they name one, is ended as
failed: whoever waits for it must not wait for a message that nobody could read.
"""

from __future__ import annotations

import msgspec

from shared.ids import RequestId, is_request_id

MAX_BURIED_BYTES = 64 * 1024
"""What is kept of one bad message; enough to see what it was."""

END_REASON = "failed"
ERROR_KIND = "internal_error"
ERROR_MESSAGE = "a message about this request could not be read"


def named_request(data: bytes) -> RequestId | None:
    """The request id inside bytes that did not decode as a message, None when there is no well-formed one."""
    try:
        raw = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    name = raw.get("request_id") if isinstance(raw, dict) else None
    return RequestId(name) if isinstance(name, str) and is_request_id(name) else None

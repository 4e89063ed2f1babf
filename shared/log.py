"""The token log of one request: self-delimiting msgpack entries, one after another in commit order.

An entry is `[choice, token_id]`, `[choice, token_id, logprobs]` or, as the last one of a choice, `[choice, reason]`
with reason "stop" or "length"; of an embedding the only one, `[choice, reason, vector]`, the vector's numbers as
little-endian float32. `logprobs` is `[chosen, [[token_id, logprob], ...]]`, natural logarithms of the raw
model's probabilities, best first. A choice's first entry is `[choice, token_id, logprobs or nil, num_cached]` where
that many tokens of its prompt were found in the prefix cache. The log is one byte string, so a position in it is a byte
offset; text, usage and SSE ids are all a fold over its entries from 0 and never depend on how it was cut into packets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import msgspec

from shared.errors import WireError

FINISH_REASONS = ("stop", "length")

_encoder = msgspec.msgpack.Encoder()
_decode_one = msgspec.msgpack.Decoder().decode
_decode_pair = msgspec.msgpack.Decoder(tuple[int, int]).decode


@dataclass(frozen=True, slots=True)
class Logprobs:
    """`chosen`: log-probability of the token that was drawn. `top`: (token id, log-probability), best first."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


class TokenEntry(NamedTuple):
    """`choice` drew `token_id`. `num_cached`: see the module."""

    choice: int
    token_id: int
    logprobs: Logprobs | None = None
    num_cached: int = 0


class FinishEntry(NamedTuple):
    """`choice` has ended; nothing of it follows. `embedding`: see the module."""

    choice: int
    reason: str
    embedding: bytes = b""


LogEntry = TokenEntry | FinishEntry


def encode_entry(entry: LogEntry) -> bytes:
    """One entry's bytes."""
    if isinstance(entry, FinishEntry):
        return _encoder.encode(entry if entry.embedding else entry[:2])
    if entry.logprobs is None and not entry.num_cached:
        return _encoder.encode((entry.choice, entry.token_id))
    logprobs = None if entry.logprobs is None else (entry.logprobs.chosen, entry.logprobs.top)
    return _encoder.encode((entry.choice, entry.token_id, logprobs, entry.num_cached)[: 4 if entry.num_cached else 3])


def decode_entries(data: bytes) -> list[LogEntry]:
    """All entries in `data`, which must hold whole ones.

    Raises:
        WireError: `data` is not a run of whole entries.
    """
    try:
        return [_to_entry(_decode_one(data))]  # nearly always there is one
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return [_to_entry(item) for item in _split(data)]


def decode_token(data: bytes) -> tuple[int, int] | None:
    """Choice and token id when `data` is exactly one token entry without logprobs, as nearly every publication of a
    choice is; else None."""
    try:
        return _decode_pair(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _split(data: bytes) -> list[object]:
    """Decode a run of msgpack values."""
    unpacker = msgpack.Unpacker(max_buffer_size=0, strict_map_key=True, use_list=True)
    unpacker.feed(data)
    items: list[object] = []
    try:
        while unpacker.tell() < len(data):
            items.append(unpacker.unpack())
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"not a run of whole entries: {str(error) or type(error).__name__}") from None
    return items


def _to_entry(item: object) -> LogEntry:
    match item:
        case [choice, token_id] if type(choice) is int and type(token_id) is int:
            return TokenEntry(choice, token_id)
        case [choice, str(reason)] if type(choice) is int and reason in FINISH_REASONS:
            return FinishEntry(choice, reason)
        case [choice, str(reason), bytes(vector)] if type(choice) is int and reason in FINISH_REASONS and vector:
            return FinishEntry(choice, reason, vector)
        case [choice, token_id, logprobs] if type(choice) is int and type(token_id) is int:
            return TokenEntry(choice, token_id, _to_logprobs(logprobs))
        case [choice, token_id, logprobs, num_cached] if (
            type(choice) is int and type(token_id) is int and type(num_cached) is int and num_cached > 0
        ):
            return TokenEntry(choice, token_id, None if logprobs is None else _to_logprobs(logprobs), num_cached)
    raise WireError(f"not a log entry: {item!r}")


def _to_logprobs(value: object) -> Logprobs:
    try:
        chosen, top = msgspec.convert(value, tuple[float, tuple[tuple[int, float], ...]], strict=True)
    except msgspec.ValidationError as error:
        raise WireError(f"not logprobs: {error}") from None
    return Logprobs(chosen, top)

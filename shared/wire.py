"""Messages to bytes and back: a msgpack map with a short tag `t` and a version `v`.

Decoding is strict: unknown tags, ill-typed or missing fields, extension types and, in a message of our own version,
unknown fields are a `WireError`. Unknown fields of a *higher* version are ignored, so that services of two versions
can run side by side during an upgrade. There is no pickle anywhere: the reader picks the class from `TAGS`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, cast

import msgspec

from shared.errors import WireError
from shared.ids import RequestId
from shared.messages import TAGS, WIRE_VERSION, Message, RequestEnded, TokenChunk

M = TypeVar("M")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_TAG_OF = {cls: tag for tag, cls in TAGS.items()}
_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in TAGS.values()}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class _Chunk(msgspec.Struct, tag_field="t", tag=_TAG_OF[TokenChunk], forbid_unknown_fields=True):
    v: int
    request_id: str
    offset: int
    data: bytes


_chunks = msgspec.msgpack.Decoder(list[_Chunk])


def encode(message: Message) -> bytes:
    """The bytes of `message`."""
    cls = type(message)
    fields: dict[str, Any] = {"t": _TAG_OF[cls], "v": WIRE_VERSION}
    for name in _FIELDS[cls]:
        fields[name] = getattr(message, name)
    return _encoder.encode(fields)


def decode(data: bytes, *expected: type[M]) -> M:
    """The message in `data`, which must be one of the `expected`.

    Raises:
        WireError: not msgpack, not a message, another class, or a field is missing, unknown or ill-typed.
    """
    return _require(decode_any(data), expected)


def decode_any(data: bytes) -> Message:
    """The message in `data`, whichever it is. Raises `WireError` as `decode` does."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        raw = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not msgpack: {error}") from None
    return _decode_map(raw)


def decode_batch(data: bytes, *expected: type[M]) -> list[M]:
    """The messages of one publication: a msgpack array of maps, each one of the `expected`. Raises `WireError`."""
    try:
        items = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(items, list):
        raise WireError("a publication is an array of messages")
    return [_require(_decode_map(item), expected) for item in items]


def decode_publication(data: bytes) -> list[TokenChunk | RequestEnded]:
    """As `decode_batch` for what commits and ends publish. Nearly every publication is chunks of our own version only;
    those are decoded by their type in one go, and whatever is not takes the long way."""
    try:
        chunks = _chunks.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return decode_batch(data, TokenChunk, RequestEnded)
    if any(chunk.v != WIRE_VERSION for chunk in chunks):
        return decode_batch(data, TokenChunk, RequestEnded)
    return [TokenChunk(request_id=RequestId(c.request_id), offset=c.offset, data=c.data) for c in chunks]


def encode_batch(messages: list[Message]) -> bytes:
    """The bytes of one publication; `decode_batch` reads them."""
    head = len(messages)
    prefix = bytes([0x90 | head]) if head < 16 else b"\xdd" + head.to_bytes(4, "big")
    return prefix + b"".join(encode(message) for message in messages)


def _require(message: Message, expected: tuple[type[M], ...]) -> M:
    if not isinstance(message, expected):
        wanted = " or ".join(cls.__name__ for cls in expected)
        raise WireError(f"expected a {wanted}, got a {type(message).__name__}")
    return message


def _decode_map(raw: object) -> Message:
    if not isinstance(raw, dict):
        raise WireError(f"a message is a map, got {type(raw).__name__}")
    tag, version = raw.pop("t", None), raw.pop("v", None)
    cls = TAGS.get(tag) if isinstance(tag, str) else None
    if cls is None or type(version) is not int or version < 1:
        raise WireError(f"unknown message tag {tag!r} version {version!r}")
    if version <= WIRE_VERSION and not raw.keys() <= set(_FIELDS[cls]):
        raise WireError(f"{cls.__name__} has unknown fields")
    try:
        return cast(Message, msgspec.convert(raw, cls, strict=True))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"{cls.__name__}: {error}") from None

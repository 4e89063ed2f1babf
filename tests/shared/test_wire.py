"""Messages as bytes: what we write we read, and what we did not write we refuse."""

from __future__ import annotations

import math
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import wire
from shared.errors import WireError
from shared.ids import RequestId
from shared.messages import (
    TAGS,
    WIRE_VERSION,
    AbortRequest,
    HeldRequest,
    PreemptRequest,
    RequestEnded,
    RunRequest,
    TokenChunk,
)

ROOT = Path(__file__).resolve().parents[2]

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(min_value=0, max_value=2**63 - 1),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=300),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a message field's type."""
    supertype = getattr(hint, "__supertype__", None)
    if supertype is not None:
        return _values(supertype)
    if hint in VALUES:
        return VALUES[hint]
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments[-1] is ...:
        return st.lists(_values(arguments[0]), max_size=4).map(tuple)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*map(_values, arguments))
    if arguments:
        return st.one_of(*(st.none() if a is type(None) else _values(a) for a in arguments))
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{field.name: _values(hints[field.name]) for field in fields(hint)})


MESSAGES = st.one_of(*map(_values, TAGS.values()))
RUN = RunRequest(request_id="r", attempt=1, choices=(0, 1), rank=3)


def _raw(message: Any = RUN, **changes: Any) -> bytes:
    """The bytes of a message with some fields changed."""
    packed: bytes = msgpack.packb({**msgpack.unpackb(wire.encode(message)), **changes})
    return packed


@settings(deadline=None)
@given(MESSAGES)
def test_what_is_written_is_read(message: Any) -> None:
    """Every message should come back equal, as its own class and as whichever it is."""
    data = wire.encode(message)
    assert wire.decode(data, type(message)) == message
    assert wire.decode_any(data) == message


@settings(deadline=None)
@given(st.lists(MESSAGES, max_size=20))
def test_batches_keep_their_order(messages: list[Any]) -> None:
    """A publication should give its messages in the order they were put in."""
    assert wire.decode_batch(wire.encode_batch(messages), *TAGS.values()) == messages


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_cut_bytes_are_refused(message: Any, data: st.DataObject) -> None:
    """No beginning of a message should pass for one."""
    whole = wire.encode(message)
    with pytest.raises(WireError):
        wire.decode_any(whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused_and_nothing_else_happens(data: bytes) -> None:
    """Any bytes should either decode or be a `WireError`; no other exception may come out."""
    for decode in (wire.decode_any, wire.decode_batch):
        try:
            decode(data)
        except WireError:
            continue


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
STRUCTURES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


@settings(deadline=None)
@given(STRUCTURES)
def test_any_structure_is_refused(value: Any) -> None:
    """Valid msgpack that is not a message should be a `WireError`, whatever it holds."""
    with pytest.raises(WireError):
        wire.decode_any(msgpack.packb({"t": "run", "v": 1, "request_id": value}))


@pytest.mark.parametrize("name", [field.name for field in fields(RunRequest) if field.default is MISSING])
def test_a_missing_field_is_refused(name: str) -> None:
    """A field without a default must be there."""
    raw = msgpack.unpackb(wire.encode(RUN))
    del raw[name]
    with pytest.raises(WireError, match=name):
        wire.decode(msgpack.packb(raw), RunRequest)


def test_a_missing_default_is_filled_in() -> None:
    """A field with a default may be missing: that is how fields are added."""
    raw = msgpack.unpackb(wire.encode(RUN))
    del raw["crashes"]
    assert wire.decode(msgpack.packb(raw), RunRequest) == RUN


def test_unknown_fields_of_our_version_are_refused() -> None:
    """Nobody of our version writes them, so the message is not what it says."""
    with pytest.raises(WireError, match="unknown fields"):
        wire.decode_any(_raw(surprise=1))


def test_unknown_fields_of_a_higher_version_are_ignored() -> None:
    """During an upgrade newer processes talk to older ones."""
    assert wire.decode(_raw(v=WIRE_VERSION + 1, surprise={"a": [1]}), RunRequest) == RUN


@pytest.mark.parametrize("version", [0, -1, None, "1", 1.0, True])
def test_a_version_is_a_positive_int(version: Any) -> None:
    """Anything else should be refused."""
    with pytest.raises(WireError, match="version"):
        wire.decode_any(_raw(v=version))


@pytest.mark.parametrize("tag", [None, "", "nobody", 7, ["run"]])
def test_an_unknown_tag_is_refused(tag: Any) -> None:
    """Only the tags in `TAGS` name messages."""
    with pytest.raises(WireError, match="tag"):
        wire.decode_any(_raw(t=tag))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attempt", "1"),
        ("attempt", 1.5),
        ("attempt", None),
        ("attempt", True),
        ("attempt", math.nan),
        ("request_id", 5),
        ("request_id", b"r"),
        ("request_id", None),
        ("choices", 3),
        ("choices", ["0"]),
        ("choices", {"0": 1}),
    ],
)
def test_ill_typed_fields_are_refused(name: str, value: Any) -> None:
    """No value should be bent into another type."""
    with pytest.raises(WireError):
        wire.decode_any(_raw(**{name: value}))


def test_nested_messages_are_checked() -> None:
    """A message inside a message should be as strict."""
    held = {"request_id": "r", "attempt": 1, "num_blocks": 1, "num_tokens": 1, "num_running": 1}
    with pytest.raises(WireError, match="num_waiting"):
        wire.decode_any(msgpack.packb({"t": "report", "v": 1, "worker_id": "w", "seq": 1, "last_inbox_id": "0-0",
                                       "free_blocks": 1, "num_blocks": 1, "num_steps": 1, "held": [held]}))  # fmt: skip
    assert HeldRequest.__slots__


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"t": "abort", "v": 1, "request_id": msgpack.ExtType(5, b"x")}),
        b"\xd6\xff\x00\x00\x00\x00",
        msgpack.packb({b"t": "abort", "v": 1, "request_id": "r"}),
        msgpack.packb({1: "abort"}),
        b"\x91" * 100_000,
        b"\x81\xa1t" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xffx",
        b"\xa3\xff\xfe\xfd",
        msgpack.packb({"t": "abort", "v": 1, "request_id": "r"}) + b"\x00",
        b"",
    ],
    ids=["ext", "timestamp", "bytes key", "int key", "nested arrays", "nested maps", "huge array", "huge map",
         "huge bin", "bad utf-8", "rest", "nothing"],
)  # fmt: skip
def test_hostile_bytes_are_refused(data: bytes) -> None:
    """Extension types, bombs, lying lengths and rests should be a `WireError`, at once and for both decoders."""
    with pytest.raises(WireError):
        wire.decode_any(data)
    with pytest.raises(WireError):
        wire.decode_batch(data)


def test_ints_beyond_64_bits_cannot_arrive() -> None:
    """What is no msgpack int should be refused on the way out too."""
    with pytest.raises((WireError, OverflowError)):
        wire.decode_any(wire.encode(RunRequest(request_id="r", attempt=2**64, choices=(), rank=0)))


def test_the_expected_class_is_required() -> None:
    """A well-formed message of another class should be refused by name."""
    with pytest.raises(WireError, match="expected a PreemptRequest, got a AbortRequest"):
        wire.decode(wire.encode(AbortRequest(request_id="r")), PreemptRequest)


def test_an_oversized_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Size should be checked before anything is unpacked."""
    data = wire.encode(TokenChunk(request_id="r", offset=0, data=b"x" * 100))
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 99)
    with pytest.raises(WireError, match="limit"):
        wire.decode_any(data)


def test_each_message_has_one_tag() -> None:
    """Tags should be unique and cover every message class once."""
    assert len(set(TAGS.values())) == len(TAGS)


@pytest.mark.case(109)
def test_pickles_are_noise() -> None:
    """A pickle in a message's place should be refused, and no source of ours should load one."""
    for data in (b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00}\x94."):
        with pytest.raises(WireError):
            wire.decode_any(data)
    for package in ("shared", "gateway", "scheduler_svc", "gpu_worker", "quire", "kernels"):
        for path in (ROOT / package).rglob("*.py"):
            assert "import pickle" not in path.read_text(), path


CHUNKS = st.lists(st.builds(TokenChunk, request_id=st.text(max_size=20), offset=st.integers(0, 2**40),
                            data=st.binary(max_size=300)), max_size=20)  # fmt: skip
ENDED = RequestEnded(request_id=RequestId("r"), reason="finished", prompt_tokens=3)


@settings(deadline=None)
@given(CHUNKS, st.booleans())
def test_publications_come_back(chunks: list[TokenChunk], has_end: bool) -> None:
    """What commits and ends publish should be read as it was written, in its order."""
    messages: list[TokenChunk | RequestEnded] = [*chunks, *([ENDED] if has_end else [])]
    assert wire.decode_publication(wire.encode_batch(list(messages))) == messages


@pytest.mark.parametrize(
    "change",
    [{"v": 0}, {"v": "1"}, {"v": WIRE_VERSION, "more": 1}, {"t": "run"}, {"offset": "3"}, {"data": [1]},
     {"request_id": 7}, {"offset": None}],
    ids=str,
)  # fmt: skip
def test_publications_are_read_strictly(change: dict[str, Any]) -> None:
    """A publication with one bad message should be refused."""
    good = {"t": "chunk", "v": WIRE_VERSION, "request_id": "r", "offset": 3, "data": b"\x92\x00\x07"}
    with pytest.raises(WireError):
        wire.decode_publication(msgpack.packb([good, good | change]))


def test_publications_of_a_later_version_are_read() -> None:
    """Fields that a later version adds should be passed over, as in every message."""
    later = {"t": "chunk", "v": WIRE_VERSION + 1, "request_id": "r", "offset": 3, "data": b"\x92\x00\x07", "more": [1]}
    (chunk,) = wire.decode_publication(msgpack.packb([later]))
    assert chunk == TokenChunk(request_id=RequestId("r"), offset=3, data=b"\x92\x00\x07")

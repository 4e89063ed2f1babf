"""The token log: one string of self-delimiting entries."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import WireError
from shared.log import (
    FINISH_REASONS,
    FinishEntry,
    LogEntry,
    Logprobs,
    TokenEntry,
    decode_entries,
    decode_token,
    encode_entry,
)

IDS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False)
LOGPROBS = st.builds(Logprobs, FLOATS, st.lists(st.tuples(IDS, FLOATS), max_size=5).map(tuple))
ENTRIES: st.SearchStrategy[LogEntry] = st.one_of(
    st.builds(TokenEntry, IDS, IDS, st.none() | LOGPROBS, st.just(0) | st.integers(1, 2**31)),
    st.builds(FinishEntry, IDS, st.sampled_from(FINISH_REASONS), st.binary(max_size=40)),
)


@settings(deadline=None)
@given(st.lists(ENTRIES, max_size=20))
def test_entries_come_back(entries: list[LogEntry]) -> None:
    """A log should decode to the entries it was made of."""
    assert decode_entries(b"".join(map(encode_entry, entries))) == entries


@settings(deadline=None)
@given(st.lists(ENTRIES, min_size=1, max_size=10), st.data())
def test_any_cut_between_entries_is_the_same(entries: list[LogEntry], data: st.DataObject) -> None:
    """Decoding two parts, cut at an entry, should give the same as the whole; a cut inside one is refused."""
    parts = [encode_entry(entry) for entry in entries]
    cut = data.draw(st.integers(0, len(parts)))
    assert decode_entries(b"".join(parts[:cut])) + decode_entries(b"".join(parts[cut:])) == entries
    with pytest.raises(WireError):
        decode_entries(b"".join(parts)[: -data.draw(st.integers(1, len(parts[-1]) - 1))])


def test_a_token_costs_few_bytes() -> None:
    """The common entry should stay as small as it is: logs are kept in memory."""
    assert len(encode_entry(TokenEntry(0, 49_151))) == 5


@pytest.mark.parametrize(
    "item",
    [
        None,
        [],
        [0],
        [0, "because"],
        [0, None],
        ["0", 1],
        [0, 1, 2],
        [0, 1, [-1.0]],
        [0, 1, None],
        [0, 1.0],
        {"choice": 0},
        [0, 1, [-1.0, []], 4, 5],
        [0, 1, None, 0],
        [0, 1, None, -1],
        [0, 1, None, True],
        [0, 1, 2, 3],
        [0, 1, [-1.0, [5]]],
        [0, 1, [-1.0, [[1]]]],
        [0, 1, [-1.0, [["a", "b"]]]],
        [0, 1, [-1.0, [[1, None]]]],
        [True, 1],
        [0, False],
    ],
    ids=repr,
)
def test_other_values_are_refused(item: object) -> None:
    """What is not an entry should be a `WireError`."""
    with pytest.raises(WireError):
        decode_entries(msgpack.packb(item))


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_noise_is_refused_and_nothing_else_happens(data: bytes) -> None:
    """Any bytes should either decode or be a `WireError`."""
    try:
        decode_entries(data)
    except WireError:
        return


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xc1", b"\xd4\x05x", b"\xa2\xff\xfe"])
def test_hostile_bytes_are_refused(data: bytes) -> None:
    """Bombs, lying lengths, extension types and bad text should be a `WireError`."""
    with pytest.raises(WireError):
        decode_entries(data)


@settings(deadline=None)
@given(st.lists(ENTRIES, max_size=3))
def test_one_plain_token_is_known(entries: list[LogEntry]) -> None:
    """Choice and token should be given for one token entry without logprobs, and nothing for anything else."""
    match entries:
        case [TokenEntry(choice, token_id, None, 0)]:
            expected = (choice, token_id)
        case _:
            expected = None
    assert decode_token(b"".join(map(encode_entry, entries))) == expected


@pytest.mark.parametrize(
    "data", [b"", b"\x92\x00", b"\x92\x00\xc3", b"\x92\xa1a\x01", b"\x82\x00\x01\x02\x03", b"\x01"]
)
def test_what_is_no_token_is_none(data: bytes) -> None:
    """Bytes that are no whole token entry should be left to the reader that says what is wrong with them."""
    assert decode_token(data) is None

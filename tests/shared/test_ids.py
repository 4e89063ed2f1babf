"""Ids: made by servers, recognized exactly."""

from __future__ import annotations

import pytest

from shared import ids


@pytest.mark.parametrize(("kind", "prefix"), [("completion", "cmpl-"), ("chat", "chatcmpl-")])
def test_a_request_id_says_its_kind(kind: str, prefix: str) -> None:
    """An id should carry OpenAI's prefix and be recognized as ours."""
    made = ids.new_request_id(kind)
    assert made.startswith(prefix)
    assert ids.is_request_id(made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cmpl-",
        "cmpl-" + "0" * 31,
        "cmpl-" + "0" * 33,
        "cmpl-" + "G" * 32,
        "CMPL-" + "0" * 32,
        "x" + "0" * 32,
        "0" * 32,
        " cmpl-" + "0" * 32,
        "cmpl-" + "0" * 32 + "\n",
        "cmpl-" + "٠" * 32,
        "cmpl-*" + "0" * 31,
        "chatcmpl-cmpl-" + "0" * 32,
    ],
)
def test_a_clients_text_is_no_request_id(text: str) -> None:
    """Only the exact form that we make may ever become part of a key."""
    assert not ids.is_request_id(text)


def test_ids_do_not_repeat() -> None:
    """Each start, request, connection and token should be new."""
    makers = (
        lambda: ids.new_request_id("chat"),
        lambda: ids.new_incarnation("w"),
        ids.new_connection_id,
        ids.new_leader_token,
    )
    for make in makers:
        assert len({make() for _ in range(1000)}) == 1000


def test_an_incarnation_keeps_its_name() -> None:
    """The name should be what stands before the last colon."""
    assert ids.new_incarnation("host:3").rpartition(":")[0] == "host:3"


def test_a_seed_fits_its_message() -> None:
    """Seeds should be non-negative and below 2**63."""
    assert all(0 <= ids.new_seed() < 2**63 for _ in range(1000))

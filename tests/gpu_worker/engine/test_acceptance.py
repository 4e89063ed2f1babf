"""When a draft pays, and how long it should be."""

from __future__ import annotations

import pytest

from gpu_worker.engine.acceptance import MIN_PRICE, Acceptance


def settled(num_right: int, *, is_wrong_then: bool, times: int = 60) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(times):
        acceptance.note(num_right, is_wrong_then=is_wrong_then)
    return acceptance


def test_a_new_sequence_is_tried_where_drafts_are_cheap_only() -> None:
    """A sequence that nothing is known of should get a draft when it costs little, and none when it costs a token."""
    assert Acceptance().worthwhile(0.1, 5) == 5
    assert 1 <= Acceptance().worthwhile(0.5, 5) < 5
    assert Acceptance().worthwhile(1.0, 5) == 0


def test_length_follows_rate_and_price() -> None:
    """Each token of the draft should pay for itself: with two right guesses of three, the k-th is right in (2/3)^k."""
    acceptance = settled(2, is_wrong_then=True)
    assert acceptance.rate == pytest.approx(2 / 3, abs=0.08)
    for price in (0.15, 0.3, 0.5):
        length = acceptance.worthwhile(price, 20)
        assert acceptance.rate**length > price >= acceptance.rate ** (length + 1)
    assert acceptance.worthwhile(0.15, 3) == 3
    assert acceptance.worthwhile(0.15, -1) == 0


def test_failing_drafts_stop_and_come_back() -> None:
    """After a dozen wrong guesses there should be no draft at any price; right ones should bring them back."""
    acceptance = settled(0, is_wrong_then=True, times=14)
    assert acceptance.worthwhile(0.0, 5) == 0
    for _ in range(3):
        acceptance.note(1, is_wrong_then=False)
    assert acceptance.worthwhile(0.0, 5) >= 1


def test_nothing_is_free() -> None:
    """Even where a token more takes no time, drafts that are nearly always wrong should end."""
    acceptance = settled(0, is_wrong_then=True)
    assert acceptance.rate < MIN_PRICE
    assert acceptance.worthwhile(0.0, 5) == 0

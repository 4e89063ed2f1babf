"""Swap or recompute: the cheaper one, where there is a choice."""

from __future__ import annotations

import pytest

from shared.preemption import is_swapped


def choose(mode: str = "auto", *, free: int = 100, copy_s: float = 0.001, token_s: float = 0.001) -> bool:
    """For a victim of 10 blocks with 155 computed tokens."""
    return is_swapped(mode, num_blocks=10, num_tokens=155, free_swap_blocks=free, block_copy_s=copy_s, token_s=token_s)


@pytest.mark.parametrize(("copy_s", "is_cheaper"), [(0.0001, True), (0.00774, True), (0.00776, False), (1.0, False)])
def test_auto_takes_the_cheaper_one(copy_s: float, is_cheaper: bool) -> None:
    """Both ways of the copy against once through the model."""
    assert choose(copy_s=copy_s) is is_cheaper


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_without_room_it_is_computed_again(mode: str) -> None:
    """All of a victim's blocks go, or none."""
    assert choose(mode, free=10)
    assert not choose(mode, free=9)


def test_a_mode_holds_whatever_the_rates() -> None:
    """The user said so."""
    assert choose("swap", copy_s=1.0)
    assert not choose("recompute", copy_s=0.0)


def test_what_is_not_known_is_tried() -> None:
    """A rate becomes known by copying once."""
    assert choose(copy_s=0.0)
    assert choose(copy_s=1.0, token_s=0.0)


def test_nothing_computed_is_not_copied() -> None:
    """A victim without blocks of its own has nothing to save."""
    assert not is_swapped("swap", num_blocks=0, num_tokens=0, free_swap_blocks=9, block_copy_s=0.0, token_s=0.0)

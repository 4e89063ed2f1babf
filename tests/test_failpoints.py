"""Failpoints: what a spec arms, and how often it acts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shared import failpoints
from shared.errors import BusUnavailable, ConfigError
from shared.failpoints import failpoint


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def test_an_unarmed_failpoint_does_nothing() -> None:
    """Passing a place should have no effect by default."""
    failpoint("worker.before_commit")


def test_acts_at_the_nth_pass_only() -> None:
    """`@2` should act at the second pass and never again."""
    failpoints.arm("bus.commit.reply=drop@2")
    failpoint("bus.commit.reply")
    with pytest.raises(BusUnavailable):
        failpoint("bus.commit.reply")
    failpoint("bus.commit.reply")


def test_acts_on_a_matching_detail_only() -> None:
    """`?PATTERN` should let other details pass."""
    failpoints.arm("worker.in_prefill?tok=7.7=raise")
    failpoint("worker.in_prefill", "cmpl-1 tok=1.2")
    with pytest.raises(RuntimeError):
        failpoint("worker.in_prefill", "cmpl-2 tok=7.7")


def test_acts_once_over_all_that_share_a_latch(tmp_path: Path) -> None:
    """`#PATH` should act for the first comer only."""
    spec = f"worker.before_commit=raise#{tmp_path}/latch"
    failpoints.arm(spec)
    with pytest.raises(RuntimeError):
        failpoint("worker.before_commit")
    failpoints.arm(spec)
    failpoint("worker.before_commit")


@pytest.mark.parametrize("spec", ["nowhere=kill", "worker.before_commit=explode", "worker.before_commit=kill@x"])
def test_refuses_a_bad_spec(spec: str) -> None:
    """An unknown place, action or count should be a ConfigError that shows the part."""
    with pytest.raises(ConfigError, match=spec.split("=", maxsplit=1)[0]):
        failpoints.arm(spec)

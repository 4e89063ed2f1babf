"""The processes of a worker's ranks: how they begin, and that none of them is missed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpu_worker.parallel.ranks import Ranks
from gpu_worker.parallel.team import Team
from tests.waiting import wait_until


class _Started:
    """Ranks that note in `codes` that they would have left this process."""

    def __init__(self, *argv: str) -> None:
        self.codes: list[int] = []
        self.ranks = Ranks(2, argv, self.codes.append)

    @property
    def pid(self) -> int:
        (child,) = self.ranks._children
        return child.pid

    def wait_left(self) -> list[int]:
        wait_until(lambda: bool(self.codes), description="the end of a rank to be noticed", timeout_s=60)
        self.close()
        return self.codes

    def close(self) -> None:
        (child,) = self.ranks._children
        assert child.stdin is not None
        child.stdin.close()
        os.close(self.ranks.meeting)


def test_a_setting_that_only_a_rank_refuses_is_a_wrong_setting(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that can't load should say why, and the worker end as for a setting of its own."""
    started = _Started("--device=cpu", "--model=/nowhere")
    seat = started.ranks.begin(())
    assert (seat.rank, seat.size, seat.card) == (0, 2, None)
    Team(0, 2, seat.meeting, is_cuda=False)
    assert started.wait_left() == [2]
    assert "gpu_worker: rank 1: error: " in capfd.readouterr().err


def test_a_rank_that_dies_before_it_begins_is_noticed() -> None:
    """Stop signals, which a terminal sends to the whole group, should not end a rank; SIGKILL should, noticed."""
    started = _Started("--device=cpu")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        assert not started.codes
        os.kill(started.pid, number)
    assert started.wait_left() == [1]


def test_a_rank_without_a_place_ends_by_itself(tmp_path: Path) -> None:
    """When the first rank's end of the pipe closes before it has said anything, a rank should end with 0."""
    started = _Started("--device=cpu", f"--model={tmp_path}")
    (child,) = started.ranks._children
    started.ranks._is_ending = True
    started.close()
    assert child.wait(60) == 0
    assert started.codes == []

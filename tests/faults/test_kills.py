"""kill -9 at each failpoint of worker and scheduler, and lost replies: each stream goes on to its undisturbed end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.cell import Cell
from tests.faults.checker import check_at_rest, check_stream
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow_all

StartCell = Callable[..., Cell]

WORKER_POINTS = (
    "worker.after_inbox=kill@2",
    "worker.in_prefill=kill@2",
    "worker.before_commit=kill@1",
    "worker.before_commit=kill@9",
    "bus.commit.reply=kill@9",
    "worker.after_finish=kill@1",
    "worker.before_free=kill@1",
)
SCHEDULER_POINTS = (
    "scheduler.after_read=kill@1",
    "scheduler.after_dispatch=kill@2",
    "scheduler.before_ack=kill@1",
)
LOST_REPLIES = ("bus.commit.reply=drop@5", "bus.submit.reply=drop@3")


async def _check_all(cell: Cell, undisturbed: dict[str, StreamRecord]) -> None:
    records = await follow_all(cell.url, KINDS)
    for kind, record in records.items():
        assert record.ending == "done", (kind, record.error)
        check_stream(record, undisturbed[kind])
    await check_at_rest(cell.redis_url, cell.url)


def test_the_kinds_differ_and_finish(undisturbed: dict[str, StreamRecord]) -> None:
    """The undisturbed streams should be real work: text in each, different from each other."""
    texts = {kind: tuple(record.texts.values()) for kind, record in undisturbed.items()}
    assert all(record.ending == "done" for record in undisturbed.values())
    assert all(any(text) for text in texts.values())
    assert len(set(texts.values())) == len(texts)


@pytest.mark.parametrize("armed", WORKER_POINTS + SCHEDULER_POINTS + LOST_REPLIES)
async def test_streams_end_as_if_nothing_had_happened(
    three_workers: StartCell, undisturbed: dict[str, StreamRecord], armed: str, tmp_path: Path
) -> None:
    """Whatever step a worker or the scheduler dies in, or whose reply is lost, each token should come exactly once."""
    cell = three_workers(armed)
    await _check_all(cell, undisturbed)
    assert (tmp_path / "latch").exists(), "the failpoint never acted"
    assert ("SIGKILL" in cell.log()) == ("=kill" in armed)

"""Cells for fault tests, and what their streams look like when nothing happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cell import Cell
from tests.e2e.conftest import SMALL, cell, model_folder, start_cell
from tests.faults.kinds import KINDS
from tests.faults.streams import StreamRecord, follow_all

__all__ = ["cell", "model_folder", "start_cell"]


@pytest.fixture(scope="session")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StreamRecord]:
    """Kind → its stream from a cell of one worker to which nothing happens."""
    quiet = Cell(model_folder, tmp_path_factory.mktemp("undisturbed"), *SMALL)
    try:
        return asyncio.run(follow_all(quiet.url, KINDS))
    finally:
        quiet.close()


@pytest.fixture
def three_workers(start_cell: Callable[..., Cell], tmp_path: Path) -> Iterator[Callable[..., Cell]]:
    """Starts a cell of three workers; `armed` failpoints act in one process, once."""

    def start(armed: str = "", *flags: str) -> Cell:
        failpoints = f"--failpoints={armed}#{tmp_path}/latch" if armed else "--failpoints="
        return start_cell("--workers=3", "--worker-lease-s=1.5", failpoints, *flags)

    return start

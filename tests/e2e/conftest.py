"""Cells for end-to-end tests: started with flags, stopped whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.bench.random_model import write_random_model
from tests.e2e.cell import Cell

SMALL = ("--dtype=float32", "--kv-cache-memory-bytes=4000000", "--num-threads=1")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights: 2 layers, 512 tokens, context 4,096."""
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test-llama")


@pytest.fixture(scope="module")
def cell(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    """One gateway, one scheduler, one worker, for all tests of a module; they must not harm it."""
    running = Cell(model_folder, tmp_path_factory.mktemp("cell"), *SMALL)
    yield running
    running.close()


@pytest.fixture
def start_cell(model_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Cell]]:
    """Starts a cell with given flags (`model=` for another model); all are stopped at the end of the test."""
    started: list[Cell] = []

    def start(*flags: str, model: Path | None = model_folder) -> Cell:
        folder = tmp_path / f"cell-{len(started)}"
        folder.mkdir()
        started.append(Cell(model, folder, *SMALL, *flags))
        return started[-1]

    yield start
    for running in started:
        running.close()

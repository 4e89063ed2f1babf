"""Fixtures of the worker service tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared.memory_bus import MemoryBus
from tests.gpu_worker.service.cell import Cell


@pytest.fixture
async def cell(memory_bus: MemoryBus) -> AsyncIterator[Cell]:
    """A cell on the memory bus."""
    async with Cell(memory_bus) as cell:
        yield cell

"""The worker service on a real Redis: nothing in it may depend on what only the memory bus does."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from shared import failpoints
from shared.bus import Bus, RequestState
from tests.gpu_worker.service.cell import TOKEN, Cell, wait_until
from tests.scripted_runner import ScriptedRunner


@pytest.fixture
async def cell(redis_bus: Bus) -> AsyncIterator[Cell]:
    async with Cell(redis_bus) as cell:
        yield cell


async def test_should_serve_preempt_and_move(cell: Cell) -> None:
    """Lost replies, a preemption, a worker declared dead, and a drain should leave the tokens of an undisturbed run."""
    first = await cell.start_worker(ScriptedRunner(is_gated=True))
    old_id = first.worker_id
    failpoints.arm("bus.commit.reply=drop@2")
    request_id = await cell.run(first, (1, 2, 3), (4, 5), n=2, max_tokens=120)
    await cell.wait_for_tokens(request_id, 3, stepping=first)
    record = await cell.preempt(first, request_id)
    assert record.preemptions == 1
    await cell.dispatch(request_id, first)
    await cell.wait_for_tokens(request_id, len(await cell.logged(request_id)) + 2, stepping=first)
    assert await cell.bus.requeue(TOKEN, old_id) == [request_id]
    second = await cell.start_worker(drain_s=0.0)
    await cell.dispatch(request_id, second)
    await cell.wait_for_tokens(request_id, len(await cell.logged(request_id)) + 1)
    second.stop.set()
    await second.task
    first.runner.open()
    await wait_until(lambda: first.worker_id != old_id, description="the zombie to start over")
    if (await cell.record(request_id)).state is RequestState.QUEUED:
        await cell.dispatch(request_id, first)
    await cell.assert_as_solo(request_id)
    await wait_until(lambda: first.is_idle, description="an idle report")
    first.stop.set()
    await first.task
    assert await cell.bus.read_workers() == []

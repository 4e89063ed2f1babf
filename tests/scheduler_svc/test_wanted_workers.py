"""The service's wish for workers, on both buses: written for who starts and stops them, shown as a metric."""

from __future__ import annotations

from typing import Any

from scheduler_svc.metrics import SchedulerMetrics
from shared.bus import Bus
from shared.worker_wish import WorkerWish
from tests.scheduler_svc.service_cell import service_cell
from tests.waiting import wait_until_async

QUICK: dict[str, Any] = {"autoscale_grow_after_s": 0.2, "autoscale_shrink_after_s": 0.5, "ttft_target_ms": 50.0}


def wanted(metrics: SchedulerMetrics) -> float | None:
    return metrics.registry.get_sample_value("quire:wanted_workers")


async def wait_for_wish(bus: Bus, wish: WorkerWish) -> None:
    async def is_there() -> bool:
        return await bus.read_wish() == wish

    await wait_until_async(is_there, description=f"{wish}")


async def test_the_wish_follows_the_work(bus: Bus) -> None:
    """A queue that grows old should bring a second worker, its end name the idle one, its leaving clear the name."""
    async with service_cell(bus, autoscale="1:2", **QUICK) as cell:
        _, _, metrics = cell.start_scheduler()
        first, _ = cell.start_worker("a:1", max_num_seqs=1)
        await wait_for_wish(bus, WorkerWish(num_workers=1))
        request_ids = [await cell.submit() for _ in range(3)]
        await wait_for_wish(bus, WorkerWish(num_workers=2))
        second, task = cell.start_worker("b:1", max_num_seqs=1)
        for request_id in request_ids:

            async def is_over(request_id: Any = request_id) -> bool:
                for worker in (first, second):
                    if request_id in worker.held:
                        await worker.finish(request_id)
                return request_id not in await bus.list_live()

            await wait_until_async(is_over, description=f"{request_id} ends")
        await wait_for_wish(bus, WorkerWish(num_workers=1, leaving=(second.worker_id,)))
        assert wanted(metrics) == 1
        await cell.kill(task)
        await bus.bye(second.worker_id)
        await wait_for_wish(bus, WorkerWish(num_workers=1))


async def test_a_new_leader_begins_afresh(bus: Bus) -> None:
    """The wish should outlive its leader, and the next one replace it by what it finds; a standby shows none."""
    async with service_cell(bus, autoscale="1:3", **QUICK | {"autoscale_shrink_after_s": 60.0}) as cell:
        task, _, metrics = cell.start_scheduler()
        for name in ("a:1", "b:1"):
            cell.start_worker(name)
        await wait_for_wish(bus, WorkerWish(num_workers=2))
        assert wanted(metrics) == 2
        await cell.kill(task)
        assert wanted(metrics) == 0
        token = (await bus.read_leader()).token
        assert await bus.take_lead("between", await bus.read_leader()) or token == "between"
        await bus.want_workers("between", WorkerWish(num_workers=9))
        cell.start_scheduler()
        await wait_for_wish(bus, WorkerWish(num_workers=2))


async def test_without_limits_there_is_no_wish(bus: Bus) -> None:
    """A scheduler without --autoscale should write nothing of the kind."""
    async with service_cell(bus) as cell:
        _, _, metrics = cell.start_scheduler()
        worker, _ = cell.start_worker("a:1")
        request_id = await cell.submit()
        await cell.wait_for_attempt(worker, request_id, 1)
        await worker.finish(request_id)
        await cell.wait_for_end(request_id)
        assert await bus.read_wish() is None
        assert wanted(metrics) == 0

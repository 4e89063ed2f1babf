"""The autoscaler on a bus in memory and containers that are only a list: whom it starts, stops and leaves alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from autoscaler import service as module
from autoscaler.container import Container, EngineError
from autoscaler.metrics import AutoscalerMetrics
from autoscaler.service import AutoscalerService
from shared.ids import WorkerId
from shared.memory_bus import MemoryBus
from shared.worker_wish import WorkerLimits, WorkerWish
from tests.scheduler_svc.cell import make_hello
from tests.waiting import wait_until_async

TOKEN = "leader"


class ListedContainers:
    """Containers as entries of a list; a stop waits until `may_end` is set, as for one that drains."""

    def __init__(self, *numbers: int) -> None:
        self._lock = threading.Lock()
        self.all = {number: make_container(number) for number in numbers}
        self.may_end = threading.Event()
        self.calls: list[str] = []
        self.is_away = False

    def find(self) -> list[Container]:
        if self.is_away:
            raise EngineError("away")
        with self._lock:
            return sorted(self.all.values(), key=lambda container: container.number)

    def add(self, template: Container, number: int) -> bool:
        with self._lock:
            if number in self.all:
                return False
            self.calls.append(f"add {number} like {template.number}")
            self.all[number] = make_container(number, is_ours=True)
            return True

    def start(self, container: Container) -> None:
        self._put(container, "running")

    def stop(self, container: Container) -> None:
        with self._lock:
            self.calls.append(f"stop {container.number}")
        self.may_end.wait(20)
        self.remove(container)

    def remove(self, container: Container) -> None:
        with self._lock:
            self.all.pop(container.number, None)

    def _put(self, container: Container, state: str) -> None:
        with self._lock:
            self.all[container.number] = replace(container, state=state)


def make_container(number: int, state: str = "running", *, is_ours: bool = False) -> Container:
    return Container(
        id=f"{number:012d}ff", name=f"quire-gpu_worker-{number}", number=number, state=state, is_ours=is_ours
    )


def worker_id(number: int) -> WorkerId:
    return WorkerId(f"{number:012d}-7:{number}")


class Scene:
    """A leader's wish, workers, containers and any number of autoscalers."""

    def __init__(self, *numbers: int) -> None:
        self.bus = MemoryBus()
        self.containers = ListedContainers(*numbers)
        self.metrics = AutoscalerMetrics()
        self._tasks: list[asyncio.Task[None]] = []

    async def want(self, num_workers: int, *leaving: int) -> None:
        for number in self.containers.all:
            hello = make_hello(worker_id(number), host=f"{number:012d}")
            await self.bus.hello(hello)
        await self.bus.take_lead(TOKEN, await self.bus.read_leader())
        await self.bus.want_workers(TOKEN, WorkerWish(num_workers=num_workers, leaving=tuple(map(worker_id, leaving))))

    def start(self) -> asyncio.Task[None]:
        service = AutoscalerService(self.bus, self.containers, WorkerLimits(low=1, high=4), self.metrics)
        self._tasks.append(asyncio.create_task(service.run(asyncio.Event())))
        return self._tasks[-1]

    async def wait_for(self, condition: Callable[[], bool], description: str) -> None:
        async def holds() -> bool:
            return condition()

        await wait_until_async(holds, description=f"{description}, not {self.containers.all}")

    async def settle(self) -> None:
        """A few looks more."""
        await asyncio.sleep(10 * module.LOOK_S)

    def numbers(self) -> list[int]:
        return sorted(self.containers.all)

    async def close(self) -> None:
        self.containers.may_end.set()
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)


@asynccontextmanager
async def scene(*numbers: int) -> AsyncIterator[Scene]:
    made = Scene(*numbers)
    try:
        yield made
    finally:
        await made.close()


async def test_missing_ones_are_copied_with_free_numbers() -> None:
    """Up to the limit, new containers should be made like the first that runs, in the gaps of the numbers."""
    async with scene(2, 4) as seen:
        await seen.want(9)
        seen.start()
        await seen.wait_for(lambda: seen.numbers() == [1, 2, 3, 4], "four containers")
        assert sorted(seen.containers.calls) == ["add 1 like 2", "add 3 like 2"]
        await seen.settle()
        assert seen.numbers() == [1, 2, 3, 4]


async def test_two_do_no_more_than_one() -> None:
    """Two autoscalers should start as many as are missing, and stop whom the leader named, together once."""
    async with scene(1) as seen:
        seen.containers.may_end.set()
        await seen.want(3)
        seen.start()
        seen.start()
        await seen.wait_for(lambda: seen.numbers() == [1, 2, 3], "three containers")
        await seen.settle()
        assert seen.numbers() == [1, 2, 3]
        await seen.want(2, 2)
        await seen.wait_for(lambda: seen.numbers() == [1, 3], "the second one's end")
        await seen.settle()
        assert seen.numbers() == [1, 3]


async def test_nobody_goes_unnamed_and_one_goes_once() -> None:
    """Without a name all should stay; a named one be told once, however long it drains, and the rest go on."""
    async with scene(1, 2, 3) as seen:
        await seen.want(1)
        seen.start()
        await seen.settle()
        assert (seen.numbers(), seen.containers.calls) == ([1, 2, 3], [])
        await seen.want(2, 3, 2)
        await seen.wait_for(lambda: seen.containers.calls == ["stop 3"], "a stop")
        await seen.settle()
        assert seen.containers.calls == ["stop 3"]
        await seen.want(3)
        await seen.wait_for(lambda: seen.numbers() == [1, 2, 3, 4], "one in its place, with a number of its own")
        seen.containers.may_end.set()
        await seen.wait_for(lambda: seen.numbers() == [1, 2, 4], "its end")


async def test_a_new_one_goes_on_where_a_dead_one_was() -> None:
    """What was made and not started should be started, what has ended and is ours removed; what compose has stopped or
    is about to start be left alone."""
    async with scene(1) as seen:
        for number, state, is_ours in ((2, "created", True), (3, "exited", True), (5, "exited", False),
                                       (6, "created", False)):  # fmt: skip
            seen.containers.all[number] = make_container(number, state, is_ours=is_ours)
        seen.start()
        await seen.wait_for(lambda: seen.numbers() == [1, 2, 5, 6], "the removal of 3")
        assert [c.state for c in seen.containers.find()] == ["running", "running", "exited", "created"]


async def test_without_wish_or_engine_all_stays() -> None:
    """No leader has spoken, or Docker is away: nothing should happen, and all go on afterwards."""
    async with scene(1) as seen:
        seen.start()
        await seen.settle()
        assert seen.containers.calls == []
        seen.containers.is_away = True
        await seen.want(2)
        await seen.wait_for(lambda: seen.metrics.errors._value.get() > 1, "errors")
        seen.containers.is_away = False
        await seen.wait_for(lambda: seen.numbers() == [1, 2], "two containers")


async def test_one_that_keeps_crashing_goes_first() -> None:
    """Where one too many is there, it should be the one that Docker cannot keep running, without a name."""
    async with scene(1, 2) as seen:
        seen.containers.may_end.set()
        seen.containers.all[3] = make_container(3, "restarting")
        await seen.want(2, 1)
        seen.start()
        await seen.wait_for(lambda: seen.numbers() == [1, 2], "the end of 3")
        assert seen.containers.calls == ["stop 3"]

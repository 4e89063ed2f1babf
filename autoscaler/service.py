"""The autoscaler's shell: looks at the wish, the workers and the containers, and takes the steps that follow.

It remembers nothing but which containers it is stopping now, so that it may die and start again at any time; two of
them do no more than one. A container that is to go gets a thread of its own, which waits until it has drained: the
process ends without waiting for such threads, since Docker finishes a stop that has begun by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from autoscaler.container import Container, EngineError, WorkerContainers
from autoscaler.metrics import AutoscalerMetrics
from shared.bus import Bus, WorkerPulse
from shared.errors import BusError
from shared.logs import get_log
from shared.worker_wish import OwnWorker, WorkerLimits, next_steps

LOOK_S = 1.0

_log = get_log("autoscaler")


class AutoscalerService:
    """See the module."""

    def __init__(
        self, bus: Bus, containers: WorkerContainers, limits: WorkerLimits, metrics: AutoscalerMetrics
    ) -> None:
        self._bus = bus
        self._containers = containers
        self._limits = limits
        self._metrics = metrics
        self._stopping: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        """Look again and again until `stop` is set."""
        while not stop.is_set():
            try:
                await self._look()
            except (BusError, EngineError) as error:
                self._metrics.errors.inc()
                _log.recurring("look.failed", error=error)
            try:
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
            except TimeoutError:
                pass
        _log.info("autoscaler.stopped", leaving=len(self._stopping))

    async def _look(self) -> None:
        found = await asyncio.to_thread(self._containers.find)
        there = [c for c in found if not c.has_ended and c.id not in self._stopping]
        await asyncio.to_thread(self._tidy, found)
        self._metrics.containers.set(len(there))
        self._metrics.leaving.set(len(self._stopping))
        wish, pulses = await self._bus.read_wish(), await self._bus.read_workers()
        if wish is None:
            _log.recurring("wish.missing", remedy="start the scheduler with the same --autoscale")
            return
        steps = next_steps(as_own(there, pulses), wish, self._limits)
        if steps.num_to_start:
            await asyncio.to_thread(self._add, found, steps.num_to_start)
        for container in there:
            if container.name in steps.to_stop:
                self._let_go(container)

    def _tidy(self, found: Sequence[Container]) -> None:
        """Finish what one like this has left undone."""
        for container in found:
            if not container.is_ours or container.id in self._stopping:
                continue
            if container.state == "created":
                self._containers.start(container)
            elif container.has_ended:
                self._containers.remove(container)

    def _add(self, found: Sequence[Container], count: int) -> None:
        template = next((c for c in found if c.state == "running" and c.id not in self._stopping), None)
        if template is None:
            _log.recurring("template.missing", remedy="start one worker with docker compose: others are made like it")
            return
        taken = {container.number for container in found}
        free = [number for number in range(1, len(taken) + count + 1) if number not in taken]
        for number in free[:count]:
            if self._containers.add(template, number):
                self._metrics.started.inc()
                _log.info("container.started", number=number, like=template.name)
            else:
                _log.recurring("name.taken", number=number)  # by another autoscaler, or for good by a stranger

    # Leaving.

    def _let_go(self, container: Container) -> None:
        _log.info("container.stopping", container=container.name)
        self._stopping.add(container.id)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._stop, args=(container, loop), name=container.name, daemon=True).start()

    def _stop(self, container: Container, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        error: EngineError | None = None
        try:
            self._containers.stop(container)
        except EngineError as caught:
            error = caught
        loop.call_soon_threadsafe(self._note_stopped, container, error)

    def _note_stopped(self, container: Container, error: EngineError | None) -> None:
        self._stopping.discard(container.id)
        if error is None:
            self._metrics.stopped.inc()
            _log.info("container.removed", container=container.name)
        else:
            self._metrics.errors.inc()
            _log.warning("stop.failed", container=container.name, error=error)


def as_own(there: Sequence[Container], pulses: Sequence[WorkerPulse]) -> list[OwnWorker]:
    """The containers, each with what the worker in it calls itself. One that compose has yet to start is left alone."""
    ids = {pulse.hello.host: pulse.hello.worker_id for pulse in pulses}
    return [OwnWorker(name=c.name, worker_id=ids.get(c.host_name), is_running=c.state != "restarting") for c in there]

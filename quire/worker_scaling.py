"""`quire serve --autoscale`: starts and stops worker processes as the leader would like.

A look takes one short visit to Redis on a connection of its own (a millisecond or two, once in `LOOK_S`), so that the
launcher keeps its one thread and holds nothing that could break. While Redis or a leader is away everything stays as it
is. A worker that is told to leave finishes what it can in `--drain-s` and hands the rest over; the launcher does not
wait for it, but starts none in its place before it has gone. One that dies by itself is started again by the supervisor
and still counts.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection

from quire import services
from quire.supervisor import STOP_MARGIN_S, Supervisor
from shared.bus import WorkerPulse
from shared.config import ServeConfig
from shared.errors import BusError
from shared.redis_bus import open_bus
from shared.worker_wish import OwnWorker, WorkerLimits, WorkerWish, next_steps

LOOK_S = 0.5
VISIT_LIMIT_S = 1.0
"""The longest that a Redis that does not answer may keep the launcher from its signals."""


class WorkerScaling:
    """Keeps the workers of one launcher at the number that is wanted.

    Args:
        say: takes one line for the user.
    """

    def __init__(
        self,
        config: ServeConfig,
        limits: WorkerLimits,
        redis_url: str,
        supervisor: Supervisor,
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._limits = limits
        self._redis_url = redis_url
        self._supervisor = supervisor
        self._say = say
        self._next_look = time.monotonic()

    def wait_s(self) -> float:
        """Seconds until the next look is due."""
        return max(0.0, self._next_look - time.monotonic())

    def look(self) -> None:
        """Start or stop what the wish of now asks for; nothing when a look is not due yet."""
        if self.wait_s() > 0:
            return
        seen = asyncio.run(_visit(self._redis_url))
        self._next_look = time.monotonic() + LOOK_S
        if seen is None:
            return
        wish, pulses = seen
        steps = next_steps(self._own(pulses), wish, self._limits)
        for index in free_indexes(self._supervisor.names(), self._limits)[: steps.num_to_start]:
            self._say(f"starting {services.worker_name(index)}; workers wanted: {wish.num_workers}")
            self._supervisor.start(services.worker_spec(self._config, self._redis_url, index))
        for name in steps.to_stop:
            self._say(f"{name} is told to leave; workers wanted: {wish.num_workers}")
            self._supervisor.retire(name, self._config.process.drain_s + STOP_MARGIN_S)

    def _own(self, pulses: list[WorkerPulse]) -> list[OwnWorker]:
        """The workers that stay, with what each calls itself."""
        host, pids = socket.gethostname(), self._supervisor.pids()
        ids = {pulse.hello.pid: pulse.hello.worker_id for pulse in pulses if pulse.hello.host == host}
        names = [name for name in self._supervisor.staying() if name.startswith("worker-")]
        return [OwnWorker(name=name, worker_id=ids.get(pids.get(name, 0)), is_running=name in pids) for name in names]


def free_indexes(names: Collection[str], limits: WorkerLimits) -> list[int]:
    """Numbers that no child in `names` has. One that is about to leave still has its cores, memory and ports, so that
    there are never more processes than the most workers there may be."""
    return [index for index in range(limits.high) if services.worker_name(index) not in names]


async def _visit(url: str) -> tuple[WorkerWish, list[WorkerPulse]] | None:
    """The wish and the workers there are; None when Redis cannot be asked now, or there is no wish yet."""
    bus = open_bus(url)
    try:
        async with asyncio.timeout(VISIT_LIMIT_S):
            wish = await bus.read_wish()
            return None if wish is None else (wish, await bus.read_workers())
    except (BusError, TimeoutError):
        return None
    finally:
        await bus.close()

"""The worker service: a loaded model, and the loops that serve requests with it.

One life of a worker: say hello; then four loops beside the engine's thread (`inbox` takes requests, `outbox` commits
and gives back, the `Heart` beats, the `Reporter` reports) until SIGTERM; drain; say bye. A worker that was declared
dead meanwhile starts over under a new identity (`incarnation.py`), with the same model and nothing held.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gpu_worker.engine.batch_plan import ModelRunner
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.swap import HostMemory
from gpu_worker.engine_thread import Withdraw
from gpu_worker.inbox import Inbox
from gpu_worker.incarnation import Incarnation
from gpu_worker.ledger import Release
from gpu_worker.lora.modules import AdapterSource
from gpu_worker.outbox import Outbox
from gpu_worker.probed_runner import ProbedRunner
from gpu_worker.pulse import DeclaredDead, Heart, Reporter
from shared.bus import Bus
from shared.clock import Clock, MonotonicClock
from shared.config import EngineConfig, WorkerConfig
from shared.errors import BusError
from shared.ids import WorkerId, new_incarnation
from shared.logs import get_log
from shared.messages import AdapterCard, WorkerHello, WorkerReport
from shared.model_card import ModelCard, pack_card

SWITCH_INTERVAL_S = 0.0005
"""How soon the event loop gets the interpreter back from the engine thread; Python's 5 ms would sit in each token."""
RETRY_S = 0.2
HAND_OVER_S = 5.0
BYE_S = 2.0

_log = get_log("worker")


class LoadedModel(ModelRunner, Protocol):
    """A runner that knows what it runs (`gpu_worker/model/runner.py`)."""

    @property
    def fingerprint(self) -> str:
        """Names weights, dtypes and parallel size: equal ones continue each other's sequences."""
        ...

    @property
    def quantization(self) -> str:
        """Of weights; "none": they are floats."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        ...

    @property
    def dtype(self) -> str:
        """Of weights and KV."""
        ...

    @property
    def device(self) -> str:
        """Where it computes."""
        ...

    @property
    def host_memory(self) -> HostMemory | None:
        """For blocks of its cache."""
        ...

    @property
    def adapter_source(self) -> AdapterSource | None:
        """Where adapters come from; None: there are none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process runs: its first identity, and the devices it has claimed, if it had to (`device_ids`, `cards`
    by their CUDA numbers, one for each rank; `prepare_thread` makes the first one the current one of a thread)."""

    first_id: WorkerId
    device_ids: tuple[str, ...] = ()
    cards: tuple[int, ...] = ()
    prepare_thread: Callable[[], None] | None = None


def new_place() -> Place:
    """A place with no claimed device."""
    return Place(first_id=WorkerId(new_incarnation(f"{socket.gethostname()}-{os.getpid()}")))


def make_engine(
    runner: ModelRunner, limits: EngineConfig, *, max_model_len: int, clock: Clock, prefix_key: bytes,
    host_memory: HostMemory | None = None,
) -> Engine:  # fmt: skip
    """An engine over `runner` as `limits` want it; `quire bench step` times the same, without `host_memory`. Raises
    `ConfigError`."""
    return Engine(
        runner,
        max_model_len=max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.step_tokens(max_model_len),
        is_chunking=limits.enable_chunked_prefill,
        max_step_s=limits.max_step_ms / 1000,
        clock=clock,
        speculation=limits.speculation(),
        prefix_key=prefix_key,
        has_prefix_cache=limits.has_prefix_cache,
        reserved_tokens=limits.reserved_tokens(max_model_len),
        is_static=limits.batching == "static",
        host_memory=host_memory,
        preemption_mode=limits.preemption_mode,
        window=limits.kept_window(runner.window),
        max_adapters=limits.max_loras if limits.enable_lora else 0,
    )


class WorkerService:
    """See the module.

    Args:
        on_report: called with each report sent, for the metrics.
        card: of the model; None: gateways know it.
        adapters: to be registered.
    """

    def __init__(
        self,
        bus: Bus,
        config: WorkerConfig,
        model: LoadedModel,
        place: Place,
        on_report: Callable[[WorkerReport], None] = lambda _: None,
        *,
        card: ModelCard | None = None,
        adapters: tuple[AdapterCard, ...] = (),
    ) -> None:
        self._adapters = adapters
        self._card = card
        self._card_id = "" if card is None else card.card_id
        self._bus = bus
        self._config = config
        self._model = model
        self._place = place
        self._on_report = on_report

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        worker_id = self._place.first_id
        while not await self._live(worker_id, stop):
            # Named after its own first start: two containers may share host name and pid, and must not end each
            # other in turns.
            worker_id = WorkerId(new_incarnation(self._place.first_id))

    async def _live(self, worker_id: WorkerId, stop: asyncio.Event) -> bool:
        """One incarnation; False when it was declared dead and another should follow."""
        prefix_key = await self._ask_prefix_key(stop)
        if prefix_key is None:
            return True
        engine = make_engine(
            ProbedRunner(self._model),
            self._config.engine,
            max_model_len=self._model.max_model_len,
            clock=MonotonicClock(),
            prefix_key=prefix_key,
            host_memory=self._model.host_memory,
        )
        mine = Incarnation(worker_id, self._bus, engine, prepare_thread=self._place.prepare_thread)
        mine.thread.start()
        is_over = False
        try:
            await self._enter(mine, stop)
            await self._serve(mine, stop)
            await self._leave(mine)
            is_over = True
        except DeclaredDead:
            _log.warning("worker.restarting", worker=worker_id, why="declared dead")
        finally:
            await asyncio.to_thread(mine.thread.stop)
            engine.clear()
        return is_over or stop.is_set()

    async def _serve(self, mine: Incarnation, stop: asyncio.Event) -> None:
        """Run the loops until `stop`, and on until all is drained. Raises what ends one of them."""
        reporter = Reporter(mine, self._on_report)
        heart = Heart(mine, lease_s=self._config.process.worker_lease_s)
        loops = (
            Inbox(mine, reporter.evictions_at, self._model.adapter_source).run(),
            Outbox(mine).run(),
            heart.run(),
            reporter.run(),
            _watch(mine),
        )
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(loop) for loop in loops]
                await stop.wait()
                await self._drain(mine)
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            if (serving := asyncio.current_task()) is not None and serving.cancelling():
                raise asyncio.CancelledError from errors  # a group that fails as it is cancelled tells only the failure
            raise errors.exceptions[0] from errors

    async def _ask_prefix_key(self, stop: asyncio.Event) -> bytes | None:
        """The cell's, as often as it takes; None when it is time to stop."""
        while not stop.is_set():
            try:
                return await self._bus.prefix_key()
            except BusError as error:
                _log.recurring("prefixes.failed", error=error)
                await asyncio.sleep(RETRY_S)
        return None

    async def _enter(self, mine: Incarnation, stop: asyncio.Event) -> None:
        """Hello, as often as it takes."""
        while not stop.is_set():
            try:
                for device_id in self._place.device_ids:
                    await self._bus.claim_device(mine.worker_id, [device_id])
                if self._card is not None and not await self._bus.use_card(self._card_id):
                    await self._bus.put_card(self._card_id, await asyncio.to_thread(pack_card, self._card))
                for adapter in self._adapters:
                    await self._bus.put_adapter(adapter)
                await self._bus.hello(self._describe(mine.worker_id))
            except BusError as error:
                _log.recurring("hello.failed", error=error)
                await asyncio.sleep(RETRY_S)
            else:
                _log.info("worker.ready", worker=mine.worker_id)
                return

    async def _drain(self, mine: Incarnation) -> None:
        """Finish what can be finished in time, give the rest back; nothing new is taken meanwhile."""
        drain_s = self._config.process.drain_s
        _log.info("worker.draining", held=len(mine.ledger), at_most_s=drain_s)
        mine.is_draining = True
        mine.report_due.set()
        if await _is_set_within(mine.emptied, drain_s):
            return
        for held in mine.ledger:
            if held.sequences:
                held.exit, held.sequences = Release(is_preempted=False), ()
            else:
                mine.thread.submit(Withdraw(held.request_id, held.attempt))
        mine.outbox_due.set()
        await _is_set_within(mine.emptied, HAND_OVER_S)

    async def _leave(self, mine: Incarnation) -> None:
        """Bye, if it can be said: a worker that still holds something is better found dead and its requests moved."""
        if mine.ledger:
            _log.warning("requests.abandoned", held=len(mine.ledger))
            return
        try:
            async with asyncio.timeout(BYE_S):
                await self._bus.bye(mine.worker_id)
        except (BusError, TimeoutError) as error:
            _log.warning("bye.failed", error=error)
        _log.info("worker.left", worker=mine.worker_id)

    def _describe(self, worker_id: WorkerId) -> WorkerHello:
        names = self._config.model.served_model_name or (Path(self._config.model.model).name,)
        return WorkerHello(
            worker_id=worker_id,
            model=names[0],
            fingerprint=self._model.fingerprint,
            dtype=str(self._model.dtype),
            device=str(self._model.device),
            max_model_len=self._model.max_model_len,
            block_size=self._model.block_size,
            num_blocks=self._model.num_blocks,
            max_num_seqs=self._config.engine.max_num_seqs,
            pid=os.getpid(),
            host=socket.gethostname(),
            has_prefix_cache=self._config.engine.has_prefix_cache,
            reserved_tokens=self._config.engine.reserved_tokens(self._model.max_model_len),
            num_swap_blocks=0 if self._model.host_memory is None else self._model.host_memory.num_blocks,
            preemption_mode=self._config.engine.preemption_mode,
            settings=_shown_settings(self._config.engine, self._model.quantization),
            window=self._config.engine.kept_window(self._model.window),
            step_tokens=self._config.engine.step_tokens(self._model.max_model_len),
            names=names,
            card=self._card_id,
            max_loras=0 if self._model.adapter_source is None else self._config.engine.max_loras,
        )


def _shown_settings(engine: EngineConfig, quantization: str) -> tuple[tuple[str, str], ...]:
    """What else says how this worker runs."""
    names = ("batching", "kv_layout", "kv_cache_dtype", "gpu_memory_utilization", "max_num_batched_tokens",
             "enable_chunked_prefill", "max_step_ms", "num_threads", "tensor_parallel_size")  # fmt: skip
    shown = tuple((name, str(getattr(engine, name))) for name in names)
    return (*shown, ("quantization", quantization), ("speculative", str(bool(engine.speculative_config))))


async def _watch(mine: Incarnation) -> None:
    """Raise what ended the engine."""
    await mine.broken


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True

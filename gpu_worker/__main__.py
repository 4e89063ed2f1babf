"""`python -m gpu_worker`: one worker against a given Redis."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from gpu_worker.devices import claim_gpus
from gpu_worker.engine.engine import EngineBroken
from gpu_worker.lora.modules import read_modules
from gpu_worker.metrics import WorkerMetrics
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.service import LoadedModel, Place, WorkerService, new_place
from shared import failpoints, logs, process
from shared.bus import Bus
from shared.config import WorkerConfig, load, refuse_long_paths
from shared.errors import BusError, ConfigError, shorten
from shared.messages import AdapterCard
from shared.metrics import serve_metrics
from shared.model_card import ModelCard, read_card
from shared.redis_bus import open_bus

_DESCRIPTION = "Computes: paged attention and continuous batching over one model."

_log = logs.get_log("worker")


def main() -> int:
    """Run until SIGTERM or SIGINT; the exit code: 0, 1 when the model broke, or 2 for a wrong setting."""
    try:
        config = load(WorkerConfig, sys.argv[1:], program="python -m gpu_worker", description=_DESCRIPTION)
        _check(config)
        failpoints.arm(config.process.failpoints)
        if config.process.die_with_parent:
            process.die_with_parent()
        logs.set_up("gpu_worker", config.process.log_level)
        with refuse_long_paths():
            uvloop.run(_run(config, _start_ranks(config)))
    except ConfigError as error:
        print(f"gpu_worker: error: {error}", file=sys.stderr)
        return 2
    except EngineBroken as error:
        _log.error("model.broken", error=error)
        return 1
    except KeyboardInterrupt:  # while loading, before the loop takes the signals
        return 130
    return 0


def _check(config: WorkerConfig) -> None:
    if not config.process.redis_url:
        raise ConfigError("--redis-url: name a Redis (only `quire serve` starts one by itself)")
    if not config.model.model:
        raise ConfigError("--model: name a model folder")


def _start_ranks(config: WorkerConfig) -> Ranks | None:
    size = config.engine.tensor_parallel_size
    return None if size == 1 else Ranks(size, sys.argv[1:])


async def _run(config: WorkerConfig, ranks: Ranks | None) -> None:
    bus = open_bus(config.process.redis_url)
    metrics = WorkerMetrics()
    port = config.process.metrics_port
    server = None if port is None else serve_metrics(metrics.registry, host=config.process.metrics_host, port=port)
    try:
        place = await claim_gpus(bus, config.engine.device, new_place(), config.engine.tensor_parallel_size)
        model, adapters = await _load_model(bus, config, place, ranks)
        stop = asyncio.Event()
        process.install_stop_signals(stop)
        process.settle_memory()
        card = _read_card(config)
        await WorkerService(bus, config, model, place, metrics.take, card=card, adapters=adapters).run(stop)
        if ranks is not None:
            ranks.end()
    finally:
        await bus.close()
        if server is not None:
            server.close()


async def _load_model(
    bus: Bus, config: WorkerConfig, place: Place, ranks: Ranks | None
) -> tuple[LoadedModel, tuple[AdapterCard, ...]]:  # fmt: skip
    """The model, loaded in this very thread (the current CUDA device is a thread's), and the adapters it is served
    with; a failure frees the claim."""
    process.pause_garbage_collector()
    _log.info("model.loading", model=shorten(config.model.model))
    since = time.monotonic()
    adapters: tuple[AdapterCard, ...] | None = None
    try:
        model = _make_runner(config, place, ranks)
        source = model.adapter_source
        adapters = () if source is None else read_modules(config.model, source)
    finally:
        if adapters is None:
            await _give_claim_back(bus, place)
    _log.info(
        "model.loaded", seconds=time.monotonic() - since, device=model.device, dtype=model.dtype,
        fingerprint=model.fingerprint, max_model_len=model.max_model_len,
        kv_tokens=model.num_blocks * model.block_size,
    )  # fmt: skip
    return model, adapters


def _make_runner(config: WorkerConfig, place: Place, ranks: Ranks | None) -> LoadedModel:
    if ranks is None:
        from gpu_worker.model.assembly import load_runner

        return load_runner(config)
    from gpu_worker.parallel.leader import load_leading_runner

    return load_leading_runner(config, ranks, place.cards)


def _read_card(config: WorkerConfig) -> ModelCard | None:
    """The model's card; None, and a warning, for a folder that has none: only gateways with a folder can serve it."""
    try:
        return read_card(config.model.files())
    except ConfigError as error:
        _log.warning("card.missing", error=error)
        return None


async def _give_claim_back(bus: Bus, place: Place) -> None:
    if not place.device_ids:
        return
    try:
        await bus.bye(place.first_id)
    except BusError as error:
        _log.warning("claim.kept", error=error)


if __name__ == "__main__":
    process.leave(main())

"""Wiring of one gateway: its parts, its routes, its loops, its start and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway import limits
from gateway.adapters import AdapterDesk
from gateway.auth import KeyRing
from gateway.background import Background
from gateway.body_budget import BodyBudget
from gateway.cell import CellView
from gateway.directory import ModelDirectory
from gateway.door import Door
from gateway.drain import Drain
from gateway.embedding import EmbeddingDesk
from gateway.health import POLL_S, HealthSettings, HealthView
from gateway.intake import IntakeDesk
from gateway.library import ModelLibrary
from gateway.metrics import GatewayMetrics
from gateway.middleware import add_headers, guard
from gateway.model_folder import ModelFolder, read_model
from gateway.prefixes import PrefixNamer
from gateway.relay import Relay
from gateway.routes import adapters, generate, models, operations
from gateway.served_model import ModelText
from gateway.server import HttpServer
from gateway.state import GATEWAY, Gateway
from gateway.text_pool import TextPool
from shared.bus import Bus
from shared.clock import MonotonicClock, unix_now
from shared.config import GatewayConfig
from shared.errors import BusError, ConfigError
from shared.ids import GatewayId, new_incarnation
from shared.logs import get_log
from shared.model_card import read_card

BEAT_S = 1.0
PREFIX_PAUSE_S = 60.0
CELL_PAUSE_S = 1.0
"""Between two looks at the reports, which come several a request: only `/metrics` needs them, read in bunches."""
SUBSCRIBE_PATIENCE_S = 5.0
LOOP_RETRY_S = 0.5
FAREWELL_S = 2.0

_log = get_log("gateway.app")


class GatewayApp:
    """One gateway: `start`, then `drain` or `close`.

    Raises:
        ConfigError: the model folder or a setting is wrong.
    """

    def __init__(self, config: GatewayConfig, bus: Bus) -> None:
        self._config = config
        self._bus = bus
        self._pool = TextPool(config.http.tokenizer_threads)
        self.gateway = _make_gateway(config, bus, self._pool)
        self._server = HttpServer(_make_application(self.gateway), config.http.host, config.http.port)
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> int:
        """Run the loops and listen; the port."""
        gateway = self.gateway
        self._spawn("relay", gateway.relay.run, 0.0)
        self._spawn("cell", gateway.cell.read, CELL_PAUSE_S)
        self._spawn("beat", self._beat, BEAT_S)
        self._spawn("prefixes", gateway.prefixes.ask, PREFIX_PAUSE_S)
        await self._look()
        try:
            await gateway.directory.load_cards()
            await gateway.adapters.read()
        except BusError as error:
            _log.warning("cards.awaited", error=error)
        self._spawn("health", self._look, POLL_S)
        self._spawn("cards", gateway.directory.load_cards, POLL_S)
        self._spawn("adapters", gateway.adapters.read, POLL_S)
        try:
            async with asyncio.timeout(SUBSCRIBE_PATIENCE_S):
                await gateway.relay.is_subscribed.wait()
        except TimeoutError:
            _log.warning("bus.awaited")
        port = await self._server.start()
        _log.info("gateway.listening", host=self._config.http.host, port=port, gateway=gateway.gateway_id)
        return port

    async def drain(self) -> None:
        """Refuse new work, let open responses go on for a while, then `close`."""
        gateway = self.gateway
        gateway.health.is_draining = True
        _log.info("gateway.draining", open_responses=gateway.relay.num_listeners)
        await gateway.drain.run(self._config.process.drain_s)
        await self.close()

    async def close(self) -> None:
        """Cut what is still open, tell the bus, and free everything but the bus."""
        self.gateway.drain.is_closing = True
        await self._server.close()
        await self.gateway.background.close(FAREWELL_S)
        for task in self._loops:
            task.cancel()
        if self._loops:
            await asyncio.wait(self._loops, timeout=FAREWELL_S)
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._bus.gateway_bye(self.gateway.gateway_id)
        except (BusError, TimeoutError) as error:
            _log.warning("bye.failed", error=error)
        self._pool.close()
        self.gateway.directory.close()

    async def _look(self) -> None:
        """Which workers live now, and what they serve."""
        await self.gateway.health.poll()
        self.gateway.directory.look()

    async def _beat(self) -> None:
        await self._bus.gateway_beat(self.gateway.gateway_id)

    def _spawn(self, name: str, step: Callable[[], Awaitable[None]], pause_s: float) -> None:
        self._loops.append(asyncio.get_running_loop().create_task(_forever(name, step, pause_s), name=name))


async def _forever(name: str, step: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Do `step` again and again; a failure is logged and waits a little."""
    while True:
        try:
            await step()
            await asyncio.sleep(pause_s)
        except BusError as error:
            _log.debug("loop.paused", loop=name, error=error)
            await asyncio.sleep(LOOP_RETRY_S)
        except Exception:
            _log.error("loop.failed", exc_info=True, loop=name)
            await asyncio.sleep(LOOP_RETRY_S)


def _make_gateway(config: GatewayConfig, bus: Bus, pool: TextPool) -> Gateway:
    if not all(config.http.api_key):
        raise ConfigError("--api-key: an empty key would let everybody in")
    own = _load_own(config)
    names = config.model.served_model_name or (() if own is None else (own.folder.name,))
    cell = CellView(bus, clock := MonotonicClock(), config.process.worker_lease_s)
    gateway_id = GatewayId(new_incarnation("gateway"))
    process = config.process
    settings = HealthSettings(worker_lease_s=process.worker_lease_s, leader_lease_s=process.leader_lease_s)
    health = HealthView(bus, clock, settings)
    library = ModelLibrary(bus, clock, max_model_len=None if own else config.model.max_model_len, own=own)
    directory = ModelDirectory(health, library, clock, own=own, names=names)
    keys, price = KeyRing(config.http.api_key), config.http.price_per_hour
    return Gateway(
        gateway_id=gateway_id,
        adapters=AdapterDesk(bus, directory, config.http, config.model),
        http=config.http,
        bus=bus,
        started_at=unix_now(),
        keys=keys,
        bodies=BodyBudget(limits.MAX_LARGE_BODIES * config.http.max_body_bytes),
        directory=directory,
        pool=pool,
        desk=IntakeDesk(directory=directory, pool=pool, has_price=price > 0),
        embeddings=EmbeddingDesk(directory, pool),
        relay=Relay(bus, gateway_id),
        health=health,
        cell=cell,
        door=Door(config.door, cell.ended_tokens),
        metrics=GatewayMetrics(",".join(names[:1] if own else names) or "all", keys.tenants, price),
        prefixes=PrefixNamer(bus),
        drain=Drain(),
        background=Background(),
    )


def _load_own(config: GatewayConfig) -> ModelText | None:
    """The model whose folder was named, if one was."""
    if not config.model.model:
        return None
    card = read_card(config.model.files())
    folder = read_model(card)
    if folder.defaults:
        _log.info("defaults.taken", **folder.defaults)
    return ModelText(folder, _max_model_len(config, folder), card.card_id)


def _max_model_len(config: GatewayConfig, folder: ModelFolder) -> int:
    asked = config.model.max_model_len
    if asked is not None and asked > folder.longest_text:
        raise ConfigError(f"--max-model-len={asked}: the model was made for {folder.longest_text} tokens")
    return asked or folder.max_position


def _make_application(gateway: Gateway) -> web.Application:
    app = web.Application(middlewares=[guard], client_max_size=gateway.http.max_body_bytes)
    app[GATEWAY] = gateway
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.post("/v1/completions", generate.post_completion),
            web.post("/v1/chat/completions", generate.post_chat),
            web.post("/v1/embeddings", generate.post_embedding),
            web.get("/v1/streams/{request_id}", generate.get_stream),
            web.get("/v1/models", models.get_models),
            web.get("/v1/models/{model}", models.get_model),
            web.post("/tokenize", models.post_tokenize),
            web.post("/detokenize", models.post_detokenize),
            web.get("/health", operations.get_health),
            web.get("/ready", operations.get_ready),
            web.get("/version", operations.get_version),
            web.get("/metrics", operations.get_metrics),
        ]
    )
    if gateway.adapters.keys is not None:
        app.add_routes(
            [
                web.post("/v1/load_lora_adapter", adapters.post_load),
                web.post("/v1/unload_lora_adapter", adapters.post_unload),
            ]
        )
    return app

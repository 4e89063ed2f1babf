"""What the handlers share: the parts of one gateway, made in `app.py`."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.adapters import AdapterDesk
from gateway.auth import KeyRing
from gateway.background import Background
from gateway.body_budget import BodyBudget
from gateway.cell import CellView
from gateway.directory import ModelDirectory
from gateway.door import Door
from gateway.drain import Drain
from gateway.embedding import EmbeddingDesk
from gateway.health import HealthView
from gateway.intake import IntakeDesk
from gateway.metrics import GatewayMetrics
from gateway.prefixes import PrefixNamer
from gateway.relay import Relay
from gateway.text_pool import TextPool
from shared.bus import Bus
from shared.config import HttpConfig
from shared.ids import GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts."""

    gateway_id: GatewayId
    adapters: AdapterDesk
    http: HttpConfig
    bus: Bus
    started_at: int
    keys: KeyRing
    bodies: BodyBudget
    directory: ModelDirectory
    pool: TextPool
    desk: IntakeDesk
    embeddings: EmbeddingDesk
    relay: Relay
    health: HealthView
    cell: CellView
    door: Door
    metrics: GatewayMetrics
    prefixes: PrefixNamer
    drain: Drain
    background: Background


GATEWAY = web.AppKey("gateway", Gateway)
TENANT = web.RequestKey("tenant", str)
"""Where the middleware leaves a request's tenant."""
REQUEST_ID = web.RequestKey("request_id", str)
"""Where a handler leaves the id that it gave, for log lines."""

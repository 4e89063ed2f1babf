"""What the handlers share: the parts of one gateway, made in `app.py`."""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from gateway.auth import KeyRing
from gateway.background import Background
from gateway.body_budget import BodyBudget
from gateway.cell import CellView
from gateway.detokenize import TokenText
from gateway.door import Door
from gateway.drain import Drain
from gateway.health import HealthView
from gateway.intake import IntakeDesk
from gateway.metrics import GatewayMetrics
from gateway.model_folder import ModelFolder
from gateway.prefixes import PrefixNamer
from gateway.relay import Relay
from shared.bus import Bus
from shared.config import HttpConfig
from shared.ids import GatewayId


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The parts. `model_names`: what clients may call the model, the first one is its name in lists and metrics."""

    gateway_id: GatewayId
    http: HttpConfig
    bus: Bus
    folder: ModelFolder
    model_names: tuple[str, ...]
    started_at: int
    keys: KeyRing
    bodies: BodyBudget
    desk: IntakeDesk
    token_text: TokenText
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

"""/health, /ready, /version and /metrics: what operators and their probes ask."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from gateway.state import GATEWAY

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def get_health(_: web.Request) -> web.Response:
    """The event loop turns."""
    return web.json_response({"status": "ok"})


async def get_ready(request: web.Request) -> web.Response:
    """Whether tokens can be produced; 503 with the reasons if not."""
    reasons = request.app[GATEWAY].directory.why_not_ready()
    if not reasons:
        return web.json_response({"status": "ready"})
    return web.json_response({"status": "not ready", "reasons": reasons}, status=503, headers={"Retry-After": "1"})


async def get_version(_: web.Request) -> web.Response:
    """Quire's version."""
    try:
        return web.json_response({"version": version("quire")})
    except PackageNotFoundError:
        return web.json_response({"version": "unknown"})


async def get_metrics(request: web.Request) -> web.Response:
    """Prometheus' text format: the cell, or with `?scope=process` this process."""
    gateway = request.app[GATEWAY]
    if request.query.get("scope") == "process":
        body = gateway.metrics.render_process()
    else:
        body = gateway.metrics.render_cell(await gateway.cell.totals(), gateway.health.live_workers())
    return web.Response(body=body, headers={"Content-Type": _METRICS_TYPE})

"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, for those with the admin key."""

from __future__ import annotations

from aiohttp import web

from gateway.openai import LoadAdapterBody, UnloadAdapterBody, parse_body, parse_json
from gateway.routes.body import body_of
from gateway.state import GATEWAY
from shared.errors import InvalidRequest


async def post_load(request: web.Request) -> web.Response:
    """Register an adapter, or another content under a name that is known."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        body, _ = parse_body(parse_json(data), LoadAdapterBody)
    name, path = _text("lora_name", body.lora_name), _text("lora_path", body.lora_path)
    await gateway.adapters.load(name, path, body.base_model_name)
    return web.Response(text=f"Success: LoRA adapter {name!r} added successfully.")


async def post_unload(request: web.Request) -> web.Response:
    """Forget one."""
    gateway = request.app[GATEWAY]
    async with body_of(request) as data:
        body, _ = parse_body(parse_json(data), UnloadAdapterBody)
    name = _text("lora_name", body.lora_name)
    await gateway.adapters.unload(name)
    return web.Response(text=f"Success: LoRA adapter {name!r} removed successfully.")


def _text(field: str, value: str | None) -> str:
    if not value:
        raise InvalidRequest(f"{field}: must be given", param=field)
    return value

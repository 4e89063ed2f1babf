"""Which adapter a request is for, and that it is there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import orjson

from quire.api.connection import Connection
from shared.errors import ArgumentError, shorten


@dataclass(frozen=True)
class LoRARequest:
    """As vLLM's, also by position. `lora_int_id` is a number that the caller chose, one for each adapter."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


def check_adapter(adapter: object) -> LoRARequest | None:
    """What a caller gave as `lora_request`. Raises `ArgumentError` for anything else."""
    if adapter is None or isinstance(adapter, LoRARequest):
        return adapter
    raise ArgumentError(f"lora_request: must be a LoRARequest, got {type(adapter).__name__}")


class Owner(Protocol):
    """Who may load adapters."""

    @property
    def admin_key(self) -> str | None:
        """None: not the caller."""
        ...


class AdapterLoader:
    """Sees that adapters are served before they are asked for: where the services are the caller's own they are loaded,
    each once for a name and a path; elsewhere they must be there."""

    def __init__(self, owner: Owner, connection: Connection) -> None:
        self._owner, self._connection = owner, connection
        self._paths: dict[str, str] = {}
        self._lock = asyncio.Lock()

    async def require(self, adapter: LoRARequest, model: str) -> None:
        """Have `adapter` of `model` served. Raises `ArgumentError`, `QuireError`."""
        async with self._lock:
            if self._paths.get(adapter.lora_name) == adapter.lora_path:
                return
            if self._owner.admin_key is not None and adapter.lora_path:
                body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path, "base_model_name": model}
                await self._connection.order("/v1/load_lora_adapter", body, self._owner.admin_key)
            else:
                await self._check_served(adapter.lora_name)
            self._paths[adapter.lora_name] = adapter.lora_path

    async def _check_served(self, name: str) -> None:
        names = [card["id"] for card in orjson.loads(await self._connection.get("/v1/models"))["data"]]
        if name not in names:
            served = shorten(", ".join(names))
            raise ArgumentError(f"lora_request: no adapter {shorten(name)!r} is served; served: {served}; give its "
                                "lora_path with enable_lora=True, or load it at the server")  # fmt: skip

"""The adapters of a cell, registered once for all of its gateways."""

from __future__ import annotations

from typing import Protocol

from shared.messages import AdapterCard


class AdapterOps(Protocol):
    """What is registered outlives who registered it."""

    async def put_adapter(self, card: AdapterCard) -> None:
        """Register an adapter, in place of one of its name."""
        ...

    async def drop_adapter(self, name: str) -> bool:
        """Forget an adapter; whether it was there. Requests that name it already go on."""
        ...

    async def read_adapters(self) -> dict[str, AdapterCard]:
        """All that are registered, by name; what nobody can read is left out."""
        ...

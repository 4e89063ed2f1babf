"""Where an `LLM` gets its tokens from: services of its own, or a deployment that runs already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.private_cell import PrivateCell
from shared.errors import ArgumentError, shorten

PATIENCE_S = 60.0


class RunningDeployment:
    """One that others keep running. `url` is without /v1. Who serves it loads its adapters."""

    patience_s = PATIENCE_S
    admin_key: str | None = None

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key
        if not self.url.startswith(("http://", "https://")):
            raise ArgumentError(f"base_url={shorten(base_url)!r}: must begin with http:// or https://")

    def check(self) -> None:
        """Nothing is known of it but by asking."""

    def stop(self) -> None:
        """It goes on without us."""


Deployment = PrivateCell | RunningDeployment


def open_deployment(model: str, base_url: str | None, api_key: str | None, arguments: Mapping[str, Any]) -> Deployment:
    """The one that `LLM`'s arguments name, ready to serve. Raises `ArgumentError`, `DeploymentError`."""
    if base_url is None:
        if api_key is not None:
            raise ArgumentError("api_key: is for a running deployment; give its base_url, too")
        return PrivateCell({"model": model, **arguments})
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise ArgumentError(f"{given[0]}: says how services are started, and those at base_url run already; leave it "
                            "out")  # fmt: skip
    return RunningDeployment(base_url, api_key)

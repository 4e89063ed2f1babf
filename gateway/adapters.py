"""The adapters that this gateway offers, and who may change them: registered in the bus, so that all gateways do."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.auth import KeyRing
from gateway.directory import ModelDirectory
from shared.adapters import CONFIG_FILE, WEIGHTS_FILE, content_hash, parse_lora_modules
from shared.bus import Bus
from shared.config import HttpConfig, ModelConfig
from shared.errors import ConfigError, InvalidRequest, NotFound, shorten
from shared.logs import get_log
from shared.messages import AdapterCard
from shared.paths import expand

MAX_NAME_CHARS = 256

_log = get_log("gateway.adapters")


class AdapterDesk:
    """See the module.

    Attributes:
        keys: of those who may load and unload; None: nobody may, by HTTP.

    Raises:
        ConfigError: a folder of the settings is not there.
    """

    def __init__(self, bus: Bus, directory: ModelDirectory, http: HttpConfig, model: ModelConfig) -> None:
        self._bus = bus
        self._directory = directory
        self.keys = KeyRing((http.admin_key,)) if http.enable_lora_updates else None
        folders = [expand("--lora-dir", folder) for folder in http.lora_dir]
        for folder in folders:
            if not folder.is_dir():
                raise ConfigError(f"--lora-dir={shorten(folder)}: there is no such folder")
        modules = parse_lora_modules(model.lora_modules)
        self._roots = [folder.resolve() for folder in (*folders, *(module.folder for module in modules))]

    async def read(self) -> None:
        """Take in what is registered. Raises `BusError`."""
        self._directory.take_adapters(await self._bus.read_adapters())

    async def load(self, name: str, path: str, model: str | None) -> AdapterCard:
        """Register the adapter in folder `path`, in place of one of its name.

        Raises:
            InvalidRequest: the name or the folder may not be used. NotFound: the model is not served.
            Overloaded, BusError: it cannot be done now.
        """
        served = self._directory.find(model)
        if served.adapter is not None:
            raise InvalidRequest(f"base_model_name: {shorten(model)!r} is an adapter itself", param="base_model_name")
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise InvalidRequest(f"lora_name: must be 1 to {MAX_NAME_CHARS} printable characters", param="lora_name")
        if self._directory.is_model(name):
            raise InvalidRequest(f"lora_name: a model is called {shorten(name)!r}", param="lora_name")
        folder, content = await asyncio.to_thread(self._examine, path)
        card = AdapterCard(name=name, model=served.name, path=str(folder), content=content)
        await self._bus.put_adapter(card)
        _log.info("adapter.registered", name=shorten(name), content=content)
        await self.read()
        return card

    async def unload(self, name: str) -> None:
        """Forget an adapter; requests that name it already go on.

        Raises:
            NotFound: there is none of this name. BusError: it cannot be done now.
        """
        if not await self._bus.drop_adapter(name):
            raise NotFound(f"lora_name: no adapter is called {shorten(name)!r}", param="lora_name")
        _log.info("adapter.dropped", name=shorten(name))
        await self.read()

    def _examine(self, path: str) -> tuple[Path, str]:
        """The true folder and the hash of its files. The answer is the same whether a folder that may not be loaded is
        there or not."""
        try:
            folder = Path(path).resolve()
        except (OSError, ValueError, RuntimeError):
            folder = Path("/")
        places = (folder, *(folder / name for name in (CONFIG_FILE, WEIGHTS_FILE)))
        if not all(self._may_be_read(place) for place in places):
            raise InvalidRequest("lora_path: must lie below --lora-dir, or be a folder of --lora-modules",
                                 param="lora_path")  # fmt: skip
        try:
            return folder, content_hash(folder)
        except ConfigError as error:
            raise InvalidRequest(f"lora_path: {error}", param="lora_path") from None

    def _may_be_read(self, place: Path) -> bool:
        """Whether what is there, links followed, lies below a folder that is open."""
        try:
            return any(place.resolve().is_relative_to(root) for root in self._roots)
        except (OSError, RuntimeError):
            return False

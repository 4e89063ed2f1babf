"""The adapters of `--lora-modules`: read when a worker starts, so that what does not fit is said there."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from shared.adapters import parse_lora_modules
from shared.config import ModelConfig
from shared.errors import ConfigError, shorten
from shared.messages import AdapterCard


class LoadedAdapter(Protocol):
    """An adapter in host memory."""

    def __hash__(self) -> int: ...

    @property
    def content(self) -> str:
        """The hash of its files."""
        ...


class AdapterSource(Protocol):
    """Where a worker has its adapters from."""

    def load(self, folder: Path, content: str = "") -> LoadedAdapter:
        """The adapter in `folder`, of this content if one is given. Raises `ConfigError`."""
        ...


def read_modules(model: ModelConfig, source: AdapterSource) -> tuple[AdapterCard, ...]:
    """What to register of `--lora-modules`.

    Raises:
        ConfigError: an adapter is called as the model is or for another, can't be read or does not fit.
    """
    served_names = model.served_model_name or (Path(model.model).name,)
    cards = []
    for module in parse_lora_modules(model.lora_modules):
        name, folder = module.name, module.folder
        if name in served_names:
            raise ConfigError(f"--lora-modules={shorten(name)}: the model is called so; choose another name")
        if module.model and module.model not in served_names:
            raise ConfigError(f"--lora-modules={shorten(name)}: base_model_name {shorten(module.model)} is not this "
                              f"model; it is called {shorten(', '.join(served_names))}")  # fmt: skip
        content = source.load(folder).content
        cards.append(AdapterCard(name=name, model=served_names[0], path=str(folder.resolve()), content=content))
    return tuple(cards)

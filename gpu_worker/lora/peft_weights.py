"""The factors of an adapter from adapter_model.safetensors, checked against the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpu_worker.lora.peft_config import PeftConfig, read_peft_config
from gpu_worker.lora.targets import Key, Module, find_targets, modules_of
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.weights import head_order
from shared.adapters import WEIGHTS_FILE
from shared.errors import ConfigError, shorten

Factors = tuple[Tensor, Tensor]
"""A [rank, in] and B [out, rank] float32, with the adapter's scale in B."""
Parts = tuple[Factors | None, ...]
"""Of each part of a projection, None where the adapter leaves it alone."""

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d{1,6})\.(.+))\.lora_([AB])(\.default)?\.weight")


def read_peft(config: CheckpointConfig, folder: Path, max_rank: int) -> dict[Key, Parts]:
    """The factors of the adapter in `folder` for each projection that it changes.

    Raises:
        ConfigError: it does not fit the model, or holds what we have not; the text names the tensor and sizes.
    """
    settings = read_peft_config(folder, max_rank)
    path = folder / WEIGHTS_FILE
    try:
        with safe_open(path, framework="pt") as file:
            return _Reading(config, settings, path, file).read()
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise ConfigError(f"{shorten(path)} is not a readable safetensors file: {shorten(error)}") from None


class _Reading:
    """One file being read."""

    def __init__(self, config: CheckpointConfig, settings: PeftConfig, path: Path, file: Any) -> None:
        self._config, self._settings, self._path, self._file = config, settings, path, file
        self._targets, self._modules = find_targets(config), modules_of(config)

    def read(self) -> dict[Key, Parts]:
        names: dict[tuple[int, str], dict[str, str]] = {}
        for name in self._file.keys():  # noqa: SIM118 - no mapping
            found = _NAME.fullmatch(name)
            if found is None:
                raise self._no_place(name)
            layer, module = int(found[2]), found[3]
            if module not in self._modules or (layer, self._modules[module].projection) not in self._targets:
                raise self._no_place(name)
            factors = names.setdefault((layer, module), {})
            if found[4] in factors:
                raise ConfigError(f"{shorten(self._path)}: {shorten(name)} is there twice")
            factors[found[4]] = name
        parts: dict[Key, list[Factors | None]] = {}
        for (layer, module), factors in names.items():
            place = self._modules[module]
            key = (layer, place.projection)
            of_all = parts.setdefault(key, [None] * len(self._targets[key].parts))
            of_all[place.first : place.end] = self._take(layer, module, place, factors)
        if not parts:
            raise ConfigError(f"{shorten(self._path)} holds no factors")
        return {key: tuple(of_all) for key, of_all in parts.items()}

    def _take(self, layer: int, module: str, place: Module, names: dict[str, str]) -> list[Factors | None]:
        """The factors of the parts of one module."""
        whole_name = f"model.layers.{layer}.{module}"
        for factor in "AB":
            if factor not in names:
                raise ConfigError(f"{shorten(self._path)}: {whole_name} has no lora_{factor}")
        target, rank = self._targets[layer, place.projection], self._settings.rank_of(whole_name)
        sizes = target.parts[place.first : place.end]
        a = self._tensor(names["A"], (rank, target.in_features))
        b = self._tensor(names["B"], (sum(sizes), rank)) * self._settings.scale_of(whole_name)
        if not bool(b.isfinite().all()):
            raise ConfigError(f"{shorten(self._path)}: {whole_name}: lora_B times its scale is beyond float32")
        made: list[Factors | None] = []
        for part, outer in enumerate(torch.split(b, list(sizes)), start=place.first):
            made.append((a, self._in_order(layer, place, part, outer)))
        return made

    def _in_order(self, layer: int, place: Module, part: int, b: Tensor) -> Tensor:
        """B with a head's outputs in the order that the model's own have."""
        order = head_order(self._config.head_size, self._config.ropes[layer].size)
        if place.projection != "qkv" or part == 2 or order is None:
            return b
        return b.view(-1, self._config.head_size, b.shape[1])[:, order].flatten(0, 1)

    def _tensor(self, name: str, shape: tuple[int, int]) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"{shorten(self._path)}: {name} is {list(tensor.shape)}, the model and the adapter's "
                              f"config ask for {list(shape)}")  # fmt: skip
        if tensor.dtype not in _FLOATS or not bool((wide := tensor.float()).isfinite().all()):
            raise ConfigError(f"{shorten(self._path)}: {name} holds {tensor.dtype} that are no finite numbers")
        return wide

    def _no_place(self, name: str) -> ConfigError:
        known = ", ".join(module.rpartition(".")[2] for module in self._modules)
        return ConfigError(f"{shorten(self._path)}: no place for {shorten(name)}; adapters of {known} are supported"
                           f"{', of experts not' if any(self._config.experts) else ''}")  # fmt: skip

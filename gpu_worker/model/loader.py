"""Weights from safetensors files, one tensor at a time.

A model takes the tensors it needs by name (`Checkpoint.take`), so that at most one projection exists twice while it
is packed; afterwards `close` says what was not taken. Nothing but safetensors is read.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import ConfigError, shorten
from shared.logs import get_log

_log = get_log("loader")

_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 16
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Checkpoint:
    """The tensors of a model folder, taken by name.

    Args:
        folder: holds model.safetensors, or the index and its shards.
        dtype: what tensors are converted to.
        device: where they go.

    Raises:
        ConfigError: no safetensors, a shard missing, or a file that is not one.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._taken: set[str] = set()
        self._last_progress = time.monotonic()
        for path in weight_files(folder):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a readable safetensors file: {error}") from None
        self._files |= dict.fromkeys(file.keys(), file)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`, converted to `dtype` (the checkpoint's if None) and moved.

        Raises:
            ConfigError: it is missing, has another shape, or is no float tensor.
        """
        tensor = self.take_stored(name, shape)
        if tensor.dtype not in _FLOATS:
            raise ConfigError(
                f"{self._folder}: {name} is {tensor.dtype}, and config.json does not say how it is quantized"
            )
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors there are."""
        return frozenset(self._files)

    def has(self, name: str) -> bool:
        """Whether there is a tensor `name`."""
        return name in self._files

    def take_stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor `name` as the file has it, of any shape if `shape` is None.

        Raises:
            ConfigError: it is missing, or has another shape.
        """
        if name not in self._files:
            raise ConfigError(f"{self._folder}: the weights hold no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ConfigError(f"{self._folder}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
        self._taken.add(name)
        self._report_progress()
        return tensor

    def take_joined(self, names: list[str], shapes: list[tuple[int, ...]]) -> Tensor:
        """Several tensors below one another."""
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def close(self, ignored: tuple[str, ...] = ()) -> None:
        """Close the files.

        Args:
            ignored: endings of names that may be left over.

        Raises:
            ConfigError: the files hold tensors that the model did not take.
        """
        left = sorted(name for name in self._files.keys() - self._taken if not name.endswith(ignored))
        self._stack.close()
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise ConfigError(f"{self._folder}: the model has no place for {shorten(', '.join(left[:5]))}{more}")

    def _report_progress(self) -> None:
        if time.monotonic() - self._last_progress > 1.0:
            self._last_progress = time.monotonic()
            _log.info("weights.loading", tensors=f"{len(self._taken)}/{len(self._files)}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, sorted.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
    """
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} is not a safetensors index") from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{index} names {shorten(', '.join(missing))}, not in the folder")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f" (found {', '.join(others)}, but opening such a file could run code: convert it)" if others else ""
    raise ConfigError(f"{folder} holds no model.safetensors{hint}")


def fingerprint(folder: Path, dtype: str) -> str:
    """32 hex digits that name the weights and the arithmetic: equal ones give equal tokens.

    Hashes config.json, each weight file's size, its header (names, types and shapes of tensors) and 64 KiB samples
    spread evenly over its data: enough to tell checkpoints apart without reading gigabytes.
    """
    digest = hashlib.sha256(f"quire-1 {dtype}\n".encode())
    digest.update((folder / "config.json").read_bytes())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header, size)))
            for i in range(_NUM_SAMPLES):
                file.seek(max(0, (size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1)))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]

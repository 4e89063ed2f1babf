"""Weights from safetensors files, one tensor at a time.

A model takes the tensors it needs by name (`Checkpoint.take`), so that at most one projection exists twice while it
is packed; afterwards `close` says what was not taken. Nothing but safetensors is read.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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


class Part(NamedTuple):
    """What of a tensor is read: these rows, below one another; of each, these columns, None: all."""

    rows: tuple[range, ...]
    columns: range | None = None

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Whether that is all of a tensor of `shape`."""
        return self.rows == (range(shape[0]),) and self.columns in (None, range(shape[-1]))


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

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, part: Part | None = None
    ) -> Tensor:
        """The tensor `name`, converted to `dtype` (the checkpoint's if None) and moved.

        Args:
            shape: of the whole tensor. part: of it, all that is read; None: the whole.

        Raises:
            ConfigError: it is missing, has another shape, or is no float tensor.
        """
        tensor = self.take_stored(name, shape, part)
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

    def take_stored(self, name: str, shape: tuple[int, ...] | None = None, part: Part | None = None) -> Tensor:
        """The tensor `name`, or `part` of it, as the file has it, of any shape if `shape` is None.

        Raises:
            ConfigError: it is missing, or has another shape.
        """
        if name not in self._files:
            raise ConfigError(f"{self._folder}: the weights hold no tensor {name}")
        stored = self._files[name].get_slice(name)
        if shape is not None and tuple(stored.get_shape()) != shape:
            raise ConfigError(f"{self._folder}: {name} is {stored.get_shape()}, config.json asks for {list(shape)}")
        if part is None or part.is_whole(tuple(stored.get_shape())):
            tensor: Tensor = self._files[name].get_tensor(name)
        else:
            tensor = _read_part(stored, part)
        self._taken.add(name)
        self._report_progress()
        return tensor

    def take_joined(self, names: list[str], shapes: list[tuple[int, ...]], parts: list[Part] | None = None) -> Tensor:
        """Several tensors, or a part of each, below one another."""
        wanted: Sequence[Part | None] = parts or [None] * len(names)
        tensors = [self.take(name, shape, None, part) for name, shape, part in zip(names, shapes, wanted, strict=True)]
        return torch.cat(tensors)

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


def _read_part(stored: Any, part: Part) -> Tensor:
    """`part` of a tensor in a safetensors file."""
    columns = () if part.columns is None else (slice(part.columns.start, part.columns.stop),)
    pieces = [stored[(slice(rows.start, rows.stop), *columns)] for rows in part.rows]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


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

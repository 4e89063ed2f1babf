"""A checkpoint's folder being written: shards of safetensors, each written when it is full, then config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

_SHARD_BYTES = 2 << 30
_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


class CheckpointWriter:
    """Tensors on their way into `folder`, which is made; at most one shard of them is in memory. Use it as a context
    manager: what is not finished is removed."""

    def __init__(self, folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._pending = 0
        self.num_bytes = 0
        """Of all tensors."""

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._folder.glob(".shard-*.tmp"):
            path.unlink()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take `tensor`, which is not changed afterwards."""
        if self._tensors and self._pending + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._tensors[name] = tensor.contiguous()
        self._pending += tensor.nbytes
        self.num_bytes += tensor.nbytes

    def close(self, source: Path, config: dict[str, Any]) -> None:
        """Write what is left, `config`, and copies of the other files of the checkpoint in `source`."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._path(i).rename(self._folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
        for path in source.iterdir():
            if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, self._folder / path.name)
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        path = self._path(len(self._shards))
        save_file(self._tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)
        self._shards.append(list(self._tensors))
        self._tensors, self._pending = {}, 0

    def _path(self, shard: int) -> Path:
        return self._folder / f".shard-{shard}.tmp"

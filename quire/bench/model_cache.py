"""Random models to measure with, kept in the cache folder."""

from __future__ import annotations

from pathlib import Path

from quire.bench.progress import say
from shared.paths import cache_folder


def ensure_model(shape: str, cache_dir: str) -> Path:
    """The folder of the random model `shape`, made if it is not there.

    Args:
        cache_dir: as `quire serve` has it; empty for its default.
    """
    folder = cache_folder(cache_dir) / "bench" / shape
    if not (folder / "model.safetensors").is_file():
        from quire.bench.random_model import write_random_model  # needs torch, which takes seconds to import

        say(f"making {shape} in {folder}")
        write_random_model(shape, folder, report=say)
    return folder

"""Folders that a user names."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError, shorten


def expand(flag: str, given: str) -> Path:
    """The path `given`, which may begin with ~ or ~user. Raises `ConfigError` that names `flag`."""
    try:
        return Path(given).expanduser()
    except RuntimeError:
        raise ConfigError(f"{flag}={shorten(given)}: there is no such user; write the path without ~") from None


def cache_folder(chosen: str) -> Path:
    """Where converted models, packed weights and compiled kernels are kept: `--cache-dir`, or the default. Raises
    `ConfigError`."""
    return expand("--cache-dir", chosen) if chosen else Path.home() / ".cache" / "quire"

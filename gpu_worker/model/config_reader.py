"""Typed look-ups in a checkpoint's config.json, with errors that name file, key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from shared.errors import ConfigError, shorten


class ConfigReader:
    """One object of config.json, or the whole of it.

    Args:
        path: of the file, for errors.
        raw: what it holds.
    """

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def over(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same with `defaults` for the keys that are not there; a null is there."""
        return ConfigReader(self.path, {**defaults, **self.raw})

    def nested(self, *keys: str) -> ConfigReader:
        """The object under the first of `keys` that holds one; an empty one if none does."""
        key = next((key for key in keys if self.raw.get(key)), keys[0])
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            self.fail(key, "must be an object")
        return ConfigReader(self.path, value)

    def get(self, key: str) -> Any:
        return self.raw.get(key)

    def fail(self, key: str, reason: str) -> NoReturn:
        raise ConfigError(f"{self.path}: {key} = {shorten(repr(self.raw.get(key)))}: {reason}")

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(key, "must be a positive whole number" if minimum else "must be a whole number, 0 or more")
        return value

    def optional_number(self, key: str) -> float | None:
        """None for a key that is null or not there."""
        return None if self.raw.get(key) is None else self.number(key, 1.0)

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.fail(key, "must be a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self.raw.get(key)
        is_fit = isinstance(values, list) and all(
            isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values
        )
        if not is_fit or len(values) != count:  # type: ignore[arg-type]
            self.fail(key, f"must be a list of {count} positive numbers")
        return tuple(map(float, values))  # type: ignore[arg-type]

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value


def open_config(folder: Path) -> ConfigReader:
    """The config.json of the checkpoint in `folder`.

    Raises:
        ConfigError: there is none, or it holds no object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return ConfigReader(path, raw)

"""Sampling as a model's author wants it where a request says nothing: what generation_config.json holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from gateway import limits
from shared.errors import ConfigError, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Each as the field of a request; `max_tokens` of chats, None: what fits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


def read_defaults(raw: Mapping[str, Any], source: str) -> GenerationDefaults:
    """What `raw`, the object in generation_config.json, says; null and absence leave ours.

    `do_sample` is not looked at, as in vLLM: temperature 0 is how a model asks for the likeliest tokens.

    Args:
        source: the file, for errors.

    Raises:
        ConfigError: a value that no request could have.
    """
    found = _Reader(raw, source)
    return GenerationDefaults(
        temperature=found.number("temperature", 1.0, 0.0, 2.0),
        top_p=found.number("top_p", 1.0, 1e-9, 1.0),
        top_k=found.whole("top_k", -1, limits.MAX_TOP_K) or 0,
        min_p=found.number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=found.number("repetition_penalty", 1.0, limits.MIN_REPETITION_PENALTY, 2.0),
        max_tokens=found.whole("max_new_tokens", 1, 2**31 - 1),
    )


class _Reader:
    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self._source = raw, source

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            self._fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def whole(self, key: str, low: int, high: int) -> int | None:
        value = self._raw.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high):
            self._fail(key, f"a whole number from {low} to {high}")
        return value

    def _fail(self, key: str, wanted: str) -> NoReturn:
        raise ConfigError(
            f"{self._source}: {key} = {shorten(repr(self._raw[key]))}: must be {wanted}; correct it, or leave "
            "the file's sampling out with --generation-config vllm"
        )

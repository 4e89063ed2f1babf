"""Prompts in all the spellings that callers have: texts, token ids, and dicts of either."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.api.lora_request import LoRARequest
from shared.errors import ArgumentError, shorten

_KEYS = ("prompt", "prompt_token_ids", "lora_request", "cache_salt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: `text`, or `token_ids`, which count where both are given."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None


def read_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[Prompt]:
    """All prompts of a call; `prompt_token_ids` is the older keyword, ids of one prompt or of several.

    Raises:
        ArgumentError: it is no prompt, or two that differ in number.
    """
    ids = None if prompt_token_ids is None else _read_ids_of_all(prompt_token_ids)
    if prompts is None:
        if ids is None:
            raise ArgumentError("prompts: give a text, token ids, a dict, or a list of them")
        return ids
    found = [read_prompt(prompts, "prompts")] if _is_one(prompts) else _read_each(prompts)
    if ids is None:
        return found
    if len(ids) != len(found):
        raise ArgumentError(f"prompt_token_ids: {len(ids)} of them, and {len(found)} prompts")
    return [Prompt(text=one.text, token_ids=other.token_ids) for one, other in zip(found, ids, strict=True)]


def read_prompt(value: Any, where: str = "prompt") -> Prompt:
    """One prompt. Raises `ArgumentError` that names `where`."""
    if isinstance(value, str):
        return Prompt(text=value)
    if isinstance(value, Mapping):
        return _read_mapping(value, where)
    if isinstance(value, Sequence):
        return Prompt(token_ids=_read_ids(value, where))
    raise ArgumentError(f"{where}: must be a text, a list of token ids, or a dict with prompt or prompt_token_ids, "
                        f"got {type(value).__name__}")  # fmt: skip


def _read_each(values: Any) -> list[Prompt]:
    if not isinstance(values, Sequence):
        raise ArgumentError(
            f"prompts: must be a text, token ids, a dict, or a list of them, got {type(values).__name__}"
        )
    return [read_prompt(value, f"prompts[{index}]") for index, value in enumerate(values)]


def _is_one(value: Any) -> bool:
    is_ids = isinstance(value, Sequence) and len(value) > 0 and not isinstance(value[0], str | Mapping | Sequence)
    return isinstance(value, str | Mapping) or is_ids


def _read_mapping(value: Mapping[str, Any], where: str) -> Prompt:
    unknown = [name for name, item in value.items() if name not in _KEYS and item not in (None, {}, [])]
    if unknown:
        raise ArgumentError(f"{where}: {shorten(unknown[0])!r} is not supported in this version; "
                            f"supported: {', '.join(_KEYS)}")  # fmt: skip
    text, ids = value.get("prompt"), value.get("prompt_token_ids")
    if text is None and ids is None:
        raise ArgumentError(f"{where}: holds neither prompt nor prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ArgumentError(f"{where}: prompt must be a text, got {type(text).__name__}")
    return Prompt(
        text=text,
        token_ids=None if ids is None else _read_ids(ids, f"{where}: prompt_token_ids"),
        lora_request=value.get("lora_request"),
        cache_salt=value.get("cache_salt"),
    )


def _read_ids_of_all(values: Any) -> list[Prompt]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ArgumentError("prompt_token_ids: must be a list of token ids, or a list of such lists")
    lists = [values] if values and not isinstance(values[0], Sequence) else values
    return [Prompt(token_ids=_read_ids(ids, "prompt_token_ids")) for ids in lists]


def _read_ids(values: Any, where: str) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        raise ArgumentError(f"{where}: token ids must be whole numbers") from None

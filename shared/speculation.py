"""`--speculative-config`: vLLM's JSON object for drafts from the text itself (prompt lookup), read strictly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigError, shorten

FLAG = "--speculative-config"
METHOD = "ngram"
DEFAULT_LOOKUP = 5
"""vLLM's, of `prompt_lookup_max` and `prompt_lookup_min` when neither is given; one alone is the other's default."""
MAX_TOKENS = 64
MAX_LOOKUP = 16
"""An index of a text holds an entry for each of its tokens and each length of n-grams: see `NgramIndex`."""

_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """The last `lookup_max` to `lookup_min` tokens of a text are looked up in it; up to `num_tokens` that followed them
    before are tried in one step."""

    num_tokens: int
    lookup_max: int
    lookup_min: int


def parse_speculative_config(text: str) -> SpeculationConfig | None:
    """What `text` asks for; None for an empty text or object.

    Raises:
        ConfigError: not such an object; names the key, its value and what to do.
    """
    if not text.strip():
        return None
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refuse(text, f"not JSON ({error}); {_example()}") from None
    if not isinstance(raw, dict):
        raise _refuse(text, f"not a JSON object; {_example()}")
    if not raw:
        return None
    for key, value in raw.items():
        if key not in _KEYS:
            raise _refuse(f"{key}={json.dumps(value)}", f"no such key in this version; leave it out, {_example()}")
    method = raw.get("method")
    if method != METHOD:
        raise _refuse(f"method={json.dumps(method)}", f'the only method in this version is "{METHOD}"; {_example()}')
    if "num_speculative_tokens" not in raw:
        raise _refuse(text, f"num_speculative_tokens is missing; {_example()}")
    num_tokens = _whole_number(raw, "num_speculative_tokens", MAX_TOKENS)
    lookup_max = _whole_number(raw, "prompt_lookup_max", MAX_LOOKUP)
    lookup_min = _whole_number(raw, "prompt_lookup_min", MAX_LOOKUP)
    assert num_tokens is not None
    lookup_max = lookup_max or lookup_min or DEFAULT_LOOKUP
    lookup_min = lookup_min or lookup_max
    if lookup_min > lookup_max:
        raise _refuse(f"prompt_lookup_min={lookup_min}", f"must be at most prompt_lookup_max={lookup_max}")
    return SpeculationConfig(num_tokens=num_tokens, lookup_max=lookup_max, lookup_min=lookup_min)


def _whole_number(raw: dict[str, Any], key: str, most: int) -> int | None:
    """The number of `key`; None when it is null or not given (vLLM's default)."""
    value = raw.get(key)
    if value is None and key != "num_speculative_tokens":
        return None
    if type(value) is not int or not 1 <= value <= most:
        raise _refuse(f"{key}={json.dumps(value)}", f"must be a whole number from 1 to {most}")
    return value


def _refuse(what: str, why: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {shorten(what)}: {why}")


def _example() -> str:
    return f"""say for example '{{"method": "{METHOD}", "num_speculative_tokens": 5, "prompt_lookup_max": 4}}'"""

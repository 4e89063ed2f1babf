"""How long a text a model can be asked for: what gateways and workers hold `--max-model-len` against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRETCHED = ("dynamic", "yarn")
"""Kinds of rotary embedding that reach further than `max_position_embeddings`, which may be what was trained."""


def stretched_len(kind: str, factor: float, original_len: int) -> int:
    """Tokens that a rotary embedding of `kind` reaches by stretching `original_len` tokens; 0: it does not say."""
    return int(original_len * factor) if kind in STRETCHED else 0


def longest_text(config: Mapping[str, Any], max_position: int) -> int:
    """Tokens of the longest text by a config.json, whose bad values, which a worker refuses by name, count as none.

    Args:
        max_position: its `max_position_embeddings`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict):
        return max_position
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    original = max_position
    if kind == "yarn":
        name = "original_max_position_embeddings"
        original = config.get(name) or rope.get(name) or max_position
    if not isinstance(kind, str) or not isinstance(factor, int | float) or not isinstance(original, int):
        return max_position
    return max(max_position, stretched_len(kind, factor, original))

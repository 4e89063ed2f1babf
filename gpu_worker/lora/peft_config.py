"""adapter_config.json as PEFT writes it, read strictly: what we would not honour is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.adapters import CONFIG_FILE
from shared.errors import ConfigError, shorten

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "use_qalora": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "megatron_config": (None, {}),
    "eva_config": (None, {}),
    "corda_config": (None, {}),
    "arrow_config": (None, {}),
}
"""What settings may be; anything else changes what an adapter computes."""
MAX_ALPHA = 1e6
MAX_PATTERN_CHARS, MAX_REPEATS = 200, 4
_SLOW, _REPEATS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]")
"""In patterns: what repeats a group, and what repeats anything. Without the first a match takes under a millisecond."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Ranks and scales of an adapter; patterns name modules with others."""

    folder: Path
    rank: int
    alpha: float
    is_rank_stabilized: bool
    rank_pattern: Mapping[str, Any]
    alpha_pattern: Mapping[str, Any]

    def rank_of(self, module: str) -> int:
        """Rank of `module` (its whole name)."""
        return _whole(self.folder, "rank_pattern", _matching(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        """What its product is multiplied by: alpha / rank, with rslora alpha / √rank."""
        alpha = _number(self.folder, "alpha_pattern", _matching(self.alpha_pattern, module, self.alpha))
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """What the config of the adapter in `folder` says.

    Raises:
        ConfigError: it is no LoRA config, asks for more than `max_rank`, or for what we have not.
    """
    path = folder / CONFIG_FILE
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{shorten(path)} cannot be read: {shorten(error)}") from None
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise ConfigError(f"{shorten(path)}: peft_type is not LORA; other adapters are not supported")
    for name, allowed in _NEUTRAL.items():
        if settings.get(name, allowed[0]) not in allowed:
            raise ConfigError(f"{shorten(path)}: {name}={shorten(settings[name])} is not supported; train it without")
    if settings.get("use_rslora", False) not in (True, False, None):
        raise ConfigError(f"{shorten(path)}: use_rslora={shorten(settings['use_rslora'])}: must be true or false")
    patterns = [settings.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise ConfigError(f"{shorten(path)}: rank_pattern and alpha_pattern are not objects")
    config = PeftConfig(
        folder=folder,
        rank=_whole(folder, "r", settings.get("r")),
        alpha=_number(folder, "lora_alpha", settings.get("lora_alpha")),
        is_rank_stabilized=settings.get("use_rslora") is True,
        rank_pattern=patterns[0],
        alpha_pattern=patterns[1],
    )
    highest = max(config.rank, *(_whole(folder, "rank_pattern", rank) for rank in patterns[0].values()), 0)
    if highest > max_rank:
        raise ConfigError(f"{shorten(path)}: rank {highest} is above --max-lora-rank={max_rank}; raise it")
    return config


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name in `pattern` that `module` ends in."""
    for name, value in pattern.items():
        if len(name) > MAX_PATTERN_CHARS or _SLOW.search(name) or len(_REPEATS.findall(name)) > MAX_REPEATS:
            raise ConfigError(f"{CONFIG_FILE}: {shorten(name)} as a pattern could take for ever; name modules plainly")
        try:
            if re.fullmatch(rf"(.*\.)?({name})", module):
                return value
        except re.error:
            raise ConfigError(f"{CONFIG_FILE}: {shorten(name)} is no pattern of module names") from None
    return default


def _whole(folder: Path, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{shorten(folder / CONFIG_FILE)}: {name}={shorten(value)}: must be a whole number from 1 on")
    return value


def _number(folder: Path, name: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -MAX_ALPHA <= value <= MAX_ALPHA:
        shown = shorten(repr(value)[:MAX_PATTERN_CHARS]) if not isinstance(value, int) else "a number"
        raise ConfigError(f"{shorten(folder / CONFIG_FILE)}: {name}={shown}: must be a number up to {MAX_ALPHA:g}")
    return float(value)

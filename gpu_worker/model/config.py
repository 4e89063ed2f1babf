"""What a checkpoint's config.json says, read strictly: what we would not honour is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ConfigError, shorten

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
DEFAULT_WINDOW = 4096
"""Of Mistral and Qwen2 where config.json has no `sliding_window` (null is none), as in transformers."""
DEFAULT_FULL_LAYERS = 28
"""Of Qwen2 where config.json has no `max_window_layers`."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched. `kind` "linear": divided by `factor`; "llama3": Llama 3.1's rule, by
    wavelength against `original_max_position`."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Sizes and switches of a decoder. `dtype` is the checkpoint's own, a torch name ("bfloat16"). `windows`, of each
    layer: the query at position p sees the keys p − window + 1 .. p; None: all up to p."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    is_tied: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    dtype: str
    windows: tuple[int | None, ...]


def read_config(folder: Path) -> CheckpointConfig:
    """The config of the checkpoint in `folder`.

    Raises:
        ConfigError: no config.json, a bad or missing value, or something this version does not support.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return _parse(_Reader(path, raw))


def _parse(reader: _Reader) -> CheckpointConfig:
    architecture = _architecture(reader)
    _refuse_unsupported(reader)
    is_qwen2, is_llama = architecture == "Qwen2ForCausalLM", architecture == "LlamaForCausalLM"
    hidden_size, num_heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    num_kv_heads = reader.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        reader.fail("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    theta, scaling = _rope(reader)
    return CheckpointConfig(
        architecture=architecture,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=reader.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=reader.size("head_dim", hidden_size // num_heads),
        max_position=reader.size("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        is_tied=reader.flag("tie_word_embeddings", False),
        has_qkv_bias=is_qwen2 or (is_llama and reader.flag("attention_bias", False)),
        has_output_bias=is_llama and reader.flag("attention_bias", False),
        has_mlp_bias=is_llama and reader.flag("mlp_bias", False),
        dtype=str(reader.get("dtype") or reader.get("torch_dtype") or "float32").removeprefix("torch."),
        windows=_windows(reader, architecture, reader.size("num_hidden_layers")),
    )


class _Reader:
    """Typed look-ups in the raw config, with errors that name file, key and value."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def get(self, key: str) -> Any:
        return self.raw.get(key)

    def fail(self, key: str, reason: str) -> None:
        raise ConfigError(f"{self.path}: {key} = {shorten(repr(self.raw.get(key)))}: {reason}")

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(key, "must be a positive whole number" if minimum else "must be a whole number, 0 or more")
        return int(value or 0)

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.fail(key, "must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return bool(value)


def _architecture(reader: _Reader) -> str:
    names = reader.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        reader.fail("architectures", "must name one architecture")
    name = str(names[0])
    if name not in SUPPORTED_ARCHITECTURES:
        shown, supported = shorten(name), ", ".join(SUPPORTED_ARCHITECTURES)
        raise ConfigError(f"{reader.path}: architecture {shown} is not supported; supported: {supported}")
    return name


def _refuse_unsupported(reader: _Reader) -> None:
    if reader.get("hidden_act") not in (None, "silu"):
        reader.fail("hidden_act", "only silu is supported")
    if reader.get("quantization_config") is not None:
        reader.fail("quantization_config", "quantized checkpoints are not supported in this version")


def _windows(reader: _Reader, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, as transformers reads them: a Mistral's layers all have `sliding_window`; of a Qwen2 with
    `use_sliding_window` those that `layer_types` names, or those from `max_window_layers` on."""
    if architecture == "MistralForCausalLM":
        window = _window(reader)
        kinds = [_FULL if window is None else _SLIDING] * num_layers
    elif architecture == "Qwen2ForCausalLM":
        window = _window(reader) if reader.flag("use_sliding_window", False) else None
        num_full = reader.size("max_window_layers", DEFAULT_FULL_LAYERS, minimum=0)
        kinds = [_FULL if window is None or layer < num_full else _SLIDING for layer in range(num_layers)]
    else:
        window, kinds = None, [_FULL] * num_layers
        if reader.flag("use_sliding_window", reader.get("sliding_window") is not None):
            reader.fail("use_sliding_window" if "use_sliding_window" in reader.raw else "sliding_window",
                        f"{architecture} has no sliding window")  # fmt: skip
    kinds = _check_layer_types(reader, kinds, may_differ=architecture == "Qwen2ForCausalLM" and window is not None)
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _window(reader: _Reader) -> int | None:
    is_none = "sliding_window" in reader.raw and reader.get("sliding_window") is None
    return None if is_none else reader.size("sliding_window", DEFAULT_WINDOW)


def _check_layer_types(reader: _Reader, kinds: list[str], *, may_differ: bool) -> list[str]:
    """What `layer_types` says, or `kinds` if it says nothing. It may name other kinds than `kinds` only where
    transformers would follow it."""
    named = reader.get("layer_types")
    if named is None:
        return kinds
    if not isinstance(named, list) or not all(isinstance(kind, str) for kind in named) or len(named) != len(kinds):
        reader.fail("layer_types", f"must name a kind for each of {len(kinds)} layers")
    other = set(named) - {_FULL, _SLIDING}
    if other:
        reader.fail("layer_types", f"{shorten(', '.join(sorted(other)))} is not supported in this version")
    if named != kinds and not may_differ:
        reader.fail("layer_types", f"is not supported beside the other settings, by which all layers are {kinds[0]}")
    return list(named)


def _rope(reader: _Reader) -> tuple[float, RopeScaling | None]:
    """(theta, scaling), from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    raw = reader.get("rope_parameters") or reader.get("rope_scaling") or {}
    if not isinstance(raw, dict):
        reader.fail("rope_scaling", "must be an object")
    nested = _Reader(reader.path, raw)
    theta = nested.number("rope_theta", reader.number("rope_theta", 10000.0))
    kind = raw.get("rope_type", raw.get("type", "default"))
    if float(raw.get("partial_rotary_factor", 1.0)) != 1.0:
        nested.fail("partial_rotary_factor", "only 1 is supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind=kind, factor=nested.number("factor", 1.0))
    if kind == "llama3":
        return theta, RopeScaling(
            kind=kind,
            factor=nested.number("factor", 8.0),
            low_freq_factor=nested.number("low_freq_factor", 1.0),
            high_freq_factor=nested.number("high_freq_factor", 4.0),
            original_max_position=nested.size("original_max_position_embeddings", 8192),
        )
    raise ConfigError(
        f"{reader.path}: rope scaling {shorten(repr(kind))} is not supported; supported: default, linear, llama3"
    )

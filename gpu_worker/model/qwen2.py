"""Qwen2: Llama's decoder with a bias on queries, keys and values. With `use_sliding_window` the layers that
`layer_types` names, or those from `max_window_layers` on, see a window."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import (
    FULL,
    SLIDING,
    CheckpointConfig,
    layer_kinds,
    mixed_windows,
    read_decoder,
    read_window,
)
from gpu_worker.model.config_reader import ConfigReader

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
"""What transformers takes where config.json says nothing (null is none)."""


def read_qwen2(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Qwen2ForCausalLM."""
    reader = reader.over(DEFAULTS)
    config = read_decoder(reader)
    return replace(config, has_qkv_bias=True, windows=qwen_windows(reader, config.num_layers))


def qwen_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer of a Qwen2 or Qwen3."""
    window = read_window(reader) if reader.flag("use_sliding_window", False) else None
    num_full = reader.size("max_window_layers", minimum=0)
    kinds = [FULL if window is None or layer < num_full else SLIDING for layer in range(num_layers)]
    return mixed_windows(window, layer_kinds(reader, kinds, may_differ=window is not None))

"""Qwen3: Llama's decoder that norms each head of queries and keys before it turns them, with windows as a Qwen2."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import CheckpointConfig, read_decoder
from gpu_worker.model.config_reader import ConfigReader
from gpu_worker.model.qwen2 import qwen_windows

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}
"""What transformers takes where config.json says nothing (null is none)."""


def read_qwen3(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Qwen3ForCausalLM."""
    reader = reader.over(DEFAULTS)
    config, has_bias = read_decoder(reader), reader.flag("attention_bias", False)
    windows = qwen_windows(reader, config.num_layers)
    return replace(config, has_qk_norm=True, has_qkv_bias=has_bias, has_output_bias=has_bias, windows=windows)

"""Mistral: Llama's decoder, all of whose layers see a window of the context."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import (
    CheckpointConfig,
    read_decoder,
    read_window,
    same_windows,
)
from gpu_worker.model.config_reader import ConfigReader

DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}
"""What transformers takes where config.json says nothing (null is none)."""


def read_mistral(reader: ConfigReader) -> CheckpointConfig:
    """The config of a MistralForCausalLM."""
    reader = reader.over(DEFAULTS)
    config = read_decoder(reader)
    return replace(config, windows=same_windows(reader, read_window(reader), config.num_layers))

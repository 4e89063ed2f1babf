"""Mixtral: Llama's decoder with experts in place of each feed-forward layer. All layers may see a window."""

from __future__ import annotations

from dataclasses import replace

from gpu_worker.model.config import (
    CheckpointConfig,
    ExpertNames,
    read_decoder,
    read_experts,
    read_window,
    same_windows,
)
from gpu_worker.model.config_reader import ConfigReader

DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""What transformers takes where config.json says nothing (null is none)."""
_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def read_mixtral(reader: ConfigReader) -> CheckpointConfig:
    """The config of a MixtralForCausalLM."""
    reader = ConfigReader(reader.path, {**DEFAULTS, **reader.raw, "norm_topk_prob": True})
    config = read_decoder(reader)
    experts = read_experts(reader, "num_local_experts", size=config.intermediate_size, names=_NAMES)
    windows = same_windows(reader, read_window(reader), config.num_layers)
    return replace(config, experts=(experts,) * config.num_layers, windows=windows)

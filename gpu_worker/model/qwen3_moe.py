"""Qwen3-MoE: Qwen3's decoder with experts in place of each feed-forward layer, but for those that `mlp_only_layers` and
`decoder_sparse_step` leave dense. With `use_sliding_window` all layers see a window."""

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
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
"""What transformers takes where config.json says nothing (null is none)."""
_NAMES = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
)


def read_qwen3_moe(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Qwen3MoeForCausalLM."""
    reader = reader.over(DEFAULTS)
    config, has_bias = read_decoder(reader), reader.flag("attention_bias", False)
    count_key = "num_local_experts" if "num_local_experts" in reader.raw else "num_experts"
    experts = read_experts(reader, count_key, size=reader.size("moe_intermediate_size"), names=_NAMES)
    dense, step = _dense_layers(reader), reader.size("decoder_sparse_step")
    window = read_window(reader) if reader.flag("use_sliding_window", False) else None
    return replace(
        config,
        has_qk_norm=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        windows=same_windows(reader, window, config.num_layers),
        experts=tuple(None if layer in dense or (layer + 1) % step else experts for layer in range(config.num_layers)),
    )


def _dense_layers(reader: ConfigReader) -> list[int]:
    layers = reader.get("mlp_only_layers") or []
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        reader.fail("mlp_only_layers", "must be a list of layers")
    return layers

"""Gemma 3 (text): as Gemma 2, with norms of query and key heads in place of softcapped scores, and two rotary
embeddings: layers with a window turn faster than those that see all, and only the latter are stretched."""

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
from gpu_worker.model.gemma2 import as_gemma
from gpu_worker.model.rope import Rope, read_rope

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
"""What transformers takes where config.json says nothing (null is none)."""


def read_gemma3(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Gemma3ForCausalLM."""
    reader = reader.over(DEFAULTS)
    if reader.get("attn_logit_softcapping") is not None:
        reader.fail("attn_logit_softcapping", "only null is supported for this architecture")
    ropes = reader.nested("rope_parameters")
    plain = ConfigReader(reader.path, {**reader.raw, "rope_parameters": None, "rope_scaling": None})
    config = as_gemma(reader, read_decoder(plain, activation=("hidden_activation", "gelu_pytorch_tanh")))
    pattern = reader.size("sliding_window_pattern")
    kinds = layer_kinds(
        reader, [SLIDING if (layer + 1) % pattern else FULL for layer in range(config.num_layers)], may_differ=True
    )
    full, local = ropes.nested(FULL), ropes.nested(SLIDING)
    full = ConfigReader(reader.path, {**full.raw, **reader.nested("rope_scaling").raw})
    local = local.over({"rope_theta": reader.number("rope_local_base_freq", 10_000.0)})
    by_kind = {FULL: _read_rope(reader, full, config), SLIDING: _read_rope(reader, local, config)}
    return replace(
        config,
        has_qk_norm=True,
        windows=mixed_windows(read_window(reader), kinds),
        ropes=tuple(by_kind[kind] for kind in kinds),
    )


def _read_rope(reader: ConfigReader, nested: ConfigReader, config: CheckpointConfig) -> Rope:
    rope = read_rope(reader, nested, head_size=config.head_size, max_position=config.max_position)
    if rope.size != config.head_size:
        nested.fail("partial_rotary_factor", "only 1 is supported for this architecture")
    return rope

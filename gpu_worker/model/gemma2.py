"""Gemma 2: a decoder that differs from Llama's in many small ways.

Embeddings are scaled, norms multiply by 1 + w and also lie behind attention and behind the feed-forward layer, whose
gate is a gelu; attention's scores are scaled by a number of their own and softcapped, and so are logits. Every other
layer sees a window.
"""

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

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
"""What transformers takes where config.json says nothing (null is none)."""


def read_gemma2(reader: ConfigReader) -> CheckpointConfig:
    """The config of a Gemma2ForCausalLM."""
    reader = reader.over(DEFAULTS)
    config = as_gemma(reader, read_decoder(reader, activation=("hidden_activation", "gelu_pytorch_tanh")))
    kinds = [FULL if layer % 2 else SLIDING for layer in range(config.num_layers)]
    return replace(
        config,
        attention_softcap=reader.optional_number("attn_logit_softcapping"),
        windows=mixed_windows(read_window(reader), layer_kinds(reader, kinds, may_differ=True)),
    )


def as_gemma(reader: ConfigReader, config: CheckpointConfig) -> CheckpointConfig:
    """`config` with what Gemma 2 and Gemma 3 share."""
    if reader.get("use_bidirectional_attention"):
        reader.fail("use_bidirectional_attention", "only false is supported")
    has_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        query_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=reader.optional_number("final_logit_softcapping"),
        gate="gelu_tanh",
        has_offset_norms=True,
        has_post_norms=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
    )

"""Tiny random checkpoints of the model families, made with `transformers` so that names and shapes are its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Spread = Callable[[str, torch.Tensor], tuple[float, float]]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.3, 1.4, 1.6],
    "long_factor": [1.0, 1.3, 2.0, 3.0, 4.5, 6.0],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": SIZES | {"model_type": "phi3", "sliding_window": 40},
    "phi4_mini": SIZES
    | {
        "model_type": "phi3",
        "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE,
    },
    "qwen3": SIZES
    | {
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "mixtral": SIZES
    | {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40},
    "qwen3_moe": SIZES
    | {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    },
    "gemma2": SIZES
    | {
        "model_type": "gemma2",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 2,
        "sliding_window": 40,
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3": SIZES
    | {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 2,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}
"""config.json of each, but for the architecture."""


def write_tiny_model(
    config: dict[str, Any], folder: Path, *, max_shard_size: str = "50GB", spread: Spread | None = None
) -> Path:
    """The folder, with config.json and float32 safetensors of random weights whose greedy texts vary: see
    `quire.bench.random_model` for why they are scaled as they are. `spread`: mean and standard deviation of a weight's
    numbers by its name; None: those that fit the families here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            centre, deviation = (spread or _spread)(name, weight)
            if "gemma" in config["model_type"]:
                if "embed" in name:
                    deviation = 2.0 / weight.shape[1] ** 0.5  # they are scaled by the root of their size
                elif "post" in name:
                    centre = 5.0  # else layers add little beside the embedding
            weight.normal_(0.0, deviation, generator=generator).add_(centre)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _spread(name: str, weight: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a weight's random numbers."""
    if "norm" in name:
        return float(weight.mean()), 0.3
    if "embed" in name:
        return 0.0, 0.4
    if "lm_head" in name:
        return 0.0, 3.0 / weight.shape[-1] ** 0.5
    gain = 3.0 if "o_proj" in name or "down_proj" in name else 1.5
    return 0.0, gain / weight.shape[-1] ** 0.5 if weight.dim() > 1 else 0.3

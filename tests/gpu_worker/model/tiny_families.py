"""Tiny random checkpoints of the model families, made with `transformers` so that names and shapes are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
}
"""config.json of each, but for the architecture."""


def write_tiny_model(config: dict[str, Any], folder: Path, *, max_shard_size: str = "50GB") -> Path:
    """The folder, with config.json and float32 safetensors of random weights whose greedy texts vary: see
    `quire.bench.random_model` for why they are scaled as they are."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            centre, spread = _spread(name, weight)
            weight.normal_(0.0, spread, generator=generator).add_(centre)
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

"""Tiny random checkpoints of the architectures that the code of `transformers` computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.gpu_worker.model.tiny_families import FAMILIES, SIZES, write_tiny_model

MHA = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
DEFAULT_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
OLD_SIZES: dict[str, Any] = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "vocab_size": 320,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS: dict[str, Any] = {
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}

FOREIGN: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": SIZES | DEFAULT_ROPE | {"model_type": "apertus"},
    "ArceeForCausalLM": SIZES | {"model_type": "arcee"},
    "BioGptForCausalLM": MHA | {"model_type": "biogpt", "pad_token_id": 0},
    "CodeGenForCausalLM": OLD_SIZES | {"model_type": "codegen", "rotary_dim": 8},
    "Cohere2ForCausalLM": SIZES | WINDOWS | {"model_type": "cohere2", "logit_scale": 0.5},
    "CohereForCausalLM": SIZES | {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5},
    "CwmForCausalLM": SIZES | WINDOWS | DEFAULT_ROPE | {"model_type": "cwm", "head_dim": 32},
    "Ernie4_5ForCausalLM": SIZES | {"model_type": "ernie4_5", "head_dim": 32},
    "Ernie4_5_MoeForCausalLM": SIZES
    | {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48},
    "Exaone4ForCausalLM": SIZES | WINDOWS | {"model_type": "exaone4"},
    "FlexOlmoForCausalLM": SIZES | EXPERTS | {"model_type": "flex_olmo"},
    "GPT2LMHeadModel": OLD_SIZES | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
    "GPTBigCodeForCausalLM": OLD_SIZES | {"model_type": "gpt_bigcode"},
    "GPTJForCausalLM": OLD_SIZES | {"model_type": "gptj", "rotary_dim": 8},
    "GPTNeoXForCausalLM": MHA | {"model_type": "gpt_neox"},
    "Gemma2ForCausalLM": FAMILIES["gemma2"],
    "Gemma3ForCausalLM": FAMILIES["gemma3"],
    "GemmaForCausalLM": SIZES | {"model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "Glm4ForCausalLM": SIZES | {"model_type": "glm4", "head_dim": 32},
    "GlmForCausalLM": SIZES | {"model_type": "glm", "head_dim": 32},
    "GraniteForCausalLM": SIZES
    | {"model_type": "granite", "attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "GraniteMoeForCausalLM": SIZES | EXPERTS | {"model_type": "granitemoe", "attention_multiplier": 0.3},
    "HeliumForCausalLM": SIZES | {"model_type": "helium", "head_dim": 16},
    "HunYuanDenseV1ForCausalLM": SIZES | {"model_type": "hunyuan_v1_dense", "head_dim": 32},
    "LlamaForCausalLM": SIZES | {"model_type": "llama"},
    "MinistralForCausalLM": SIZES | {"model_type": "ministral", "head_dim": 32, "sliding_window": 40},
    "MistralForCausalLM": SIZES | {"model_type": "mistral", "sliding_window": 40},
    "MixtralForCausalLM": FAMILIES["mixtral"],
    "NemotronForCausalLM": SIZES | {"model_type": "nemotron"},
    "OPTForCausalLM": MHA | {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, "pad_token_id": 1},
    "Olmo2ForCausalLM": SIZES | {"model_type": "olmo2"},
    "Olmo3ForCausalLM": SIZES | WINDOWS | {"model_type": "olmo3"},
    "OlmoForCausalLM": SIZES | {"model_type": "olmo", "clip_qkv": 0.5},
    "OlmoeForCausalLM": SIZES | EXPERTS | {"model_type": "olmoe"},
    "PersimmonForCausalLM": MHA | {"model_type": "persimmon"},
    "Phi3ForCausalLM": FAMILIES["phi3"],
    "PhiForCausalLM": SIZES | {"model_type": "phi", "qk_layernorm": True},
    "PhimoeForCausalLM": SIZES | EXPERTS | {"model_type": "phimoe", "sliding_window": None},
    "Qwen2ForCausalLM": SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
    "Qwen2MoeForCausalLM": SIZES
    | EXPERTS
    | {"model_type": "qwen2_moe", "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64},
    "Qwen3ForCausalLM": FAMILIES["qwen3"],
    "Qwen3MoeForCausalLM": FAMILIES["qwen3_moe"],
    "SeedOssForCausalLM": SIZES | {"model_type": "seed_oss", "head_dim": 32},
    "SmolLM3ForCausalLM": SIZES | {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "StableLmForCausalLM": SIZES | {"model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    "Starcoder2ForCausalLM": SIZES | {"model_type": "starcoder2", "sliding_window": 40},
    "VaultGemmaForCausalLM": SIZES
    | WINDOWS
    | {
        "model_type": "vaultgemma",
        "head_dim": 32,
        "query_pre_attn_scalar": 2,
        "attn_logit_softcapping": 8.0,
        "final_logit_softcapping": 6.0,
        "tie_word_embeddings": True,
    },
}
"""config.json of each, but for the architecture; with what a family has that others have not where it has a switch."""


_OUTPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "attn.dense", "attention.dense", "4h_to_h", "fc2", "fc_out")


def write_foreign_model(name: str, folder: Path) -> Path:
    """The folder, with a checkpoint of architecture `name` whose greedy texts vary."""
    return write_tiny_model(FOREIGN[name], folder, spread=_spread)


def _spread(name: str, weight: torch.Tensor) -> tuple[float, float]:
    """Mean and standard deviation of a weight's random numbers."""
    if weight.dim() == 1:
        return float(weight.mean()), 0.3
    if any(part in name for part in ("embed_in", "embed_tokens", "embed_positions", "wte", "wpe")):
        return 0.0, 0.4
    if any(part in name for part in ("lm_head", "embed_out", "output_projection")):
        return 0.0, 3.0 / weight.shape[-1] ** 0.5
    return 0.0, (3.0 if any(part in name for part in _OUTPUTS) else 1.5) / weight.shape[-1] ** 0.5

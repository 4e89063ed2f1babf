"""Sizes of the models that are measured and tested; their weights are made in `random_model.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a random model. `vocab_size` (logits) may exceed `tokenizer_size`: padded ids without a token.
    `window`: keys that a query of a Mistral or Qwen2 sees, in all layers but the first `num_full_layers` of a Qwen2."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tokenizer_size: int
    max_model_len: int
    is_tied: bool
    rope_theta: float = 10000.0
    window: int | None = None
    num_full_layers: int = 0

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture == "Qwen2ForCausalLM"


SHAPES: dict[str, ModelShape] = {
    "q05b": ModelShape(
        architecture="Qwen2ForCausalLM",
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        intermediate_size=4864,
        vocab_size=151_936,
        tokenizer_size=151_936,
        max_model_len=32_768,
        is_tied=True,
        rope_theta=1_000_000.0,
    ),
    "tiny": ModelShape(
        architecture="Qwen2ForCausalLM",
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=1024,
        vocab_size=8192,
        tokenizer_size=8192,
        max_model_len=32_768,
        is_tied=True,
        rope_theta=1_000_000.0,
    ),
    "test": ModelShape(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=128,
        vocab_size=512,
        tokenizer_size=512,
        max_model_len=4096,
        is_tied=False,
    ),
    "test_qwen2": ModelShape(
        architecture="Qwen2ForCausalLM",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=1,
        intermediate_size=128,
        vocab_size=512,
        tokenizer_size=512,
        max_model_len=4096,
        is_tied=True,
    ),
}

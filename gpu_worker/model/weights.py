"""The tensors of a decoder by their names in a checkpoint, layer by layer: what every way of computing starts from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.loader import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A linear's weight [out, in] and its bias [out], if it has one."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder block. `qkv` holds queries, keys and values below one another."""

    input_norm: Tensor
    qkv: Projection
    output: Projection
    mlp_norm: Tensor
    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterWeights:
    """What is not in a block. `head` is `embedding` itself where they are tied."""

    embedding: Tensor
    norm: Tensor
    head: Tensor


def read_outer(config: CheckpointConfig, checkpoint: Checkpoint) -> OuterWeights:
    """Embedding, last norm and output projection."""
    vocab = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.take("model.embed_tokens.weight", vocab)
    return OuterWeights(
        embedding=embedding,
        norm=checkpoint.take("model.norm.weight", (config.hidden_size,)),
        head=embedding if config.is_tied else checkpoint.take("lm_head.weight", vocab),
    )


def read_layer(config: CheckpointConfig, checkpoint: Checkpoint, layer: int) -> LayerWeights:
    """The weights of block `layer`."""
    name, hidden, ffn = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def projection(parts: dict[str, int], in_features: int, has_bias: bool) -> Projection:
        weight = checkpoint.take_joined(
            [name + part + ".weight" for part in parts], [(size, in_features) for size in parts.values()]
        )
        if not has_bias:
            return Projection(weight=weight)
        bias = checkpoint.take_joined([name + part + ".bias" for part in parts], [(size,) for size in parts.values()])
        return Projection(weight=weight, bias=bias)

    qkv_parts = {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    return LayerWeights(
        input_norm=checkpoint.take(name + "input_layernorm.weight", (hidden,)),
        qkv=projection(qkv_parts, hidden, config.has_qkv_bias),
        output=projection({"self_attn.o_proj": hidden}, q_size, config.has_output_bias),
        mlp_norm=checkpoint.take(name + "post_attention_layernorm.weight", (hidden,)),
        gate=projection({"mlp.gate_proj": ffn}, hidden, config.has_mlp_bias),
        up=projection({"mlp.up_proj": ffn}, hidden, config.has_mlp_bias),
        down=projection({"mlp.down_proj": hidden}, ffn, config.has_mlp_bias),
    )


def ignored_weights(config: CheckpointConfig) -> tuple[str, ...]:
    """Endings of names that a checkpoint may hold for nothing."""
    return ("rotary_emb.inv_freq", "lm_head.weight") if config.is_tied else ("rotary_emb.inv_freq",)

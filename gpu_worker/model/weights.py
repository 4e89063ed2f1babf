"""The tensors of a decoder by their names in a checkpoint, layer by layer: what every way of computing starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
    """The weights of block `layer`, a head's numbers in the order that `kernels.rotary` turns in."""
    name, hidden, ffn = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    names, q_size = _NAMES[config.is_fused], config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size

    def projection(parts: list[str], sizes: list[int], in_features: int, has_bias: bool) -> Projection:
        prefixed = [name + part for part in parts]
        sizes = sizes if len(parts) == len(sizes) else [sum(sizes)]
        weight = checkpoint.take_joined(
            [part + ".weight" for part in prefixed], [(size, in_features) for size in sizes]
        )
        if not has_bias:
            return Projection(weight=weight)
        bias = checkpoint.take_joined([part + ".bias" for part in prefixed], [(size,) for size in sizes])
        return Projection(weight=weight, bias=bias)

    qkv = projection(names.qkv, [q_size, kv_size, kv_size], hidden, config.has_qkv_bias)
    gate_up = projection(names.gate_up, [ffn, ffn], hidden, config.has_mlp_bias)
    gate, up = _split(gate_up)
    return LayerWeights(
        input_norm=checkpoint.take(name + "input_layernorm.weight", (hidden,)),
        qkv=_pair_up(qkv, config, config.ropes[layer].size),
        output=projection(["self_attn.o_proj"], [hidden], q_size, config.has_output_bias),
        mlp_norm=checkpoint.take(name + "post_attention_layernorm.weight", (hidden,)),
        gate=gate,
        up=up,
        down=projection(["mlp.down_proj"], [hidden], ffn, config.has_mlp_bias),
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """What a checkpoint calls the projections that are computed as one."""

    qkv: list[str]
    gate_up: list[str]


_NAMES = {
    False: _Names(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], ["mlp.gate_proj", "mlp.up_proj"]),
    True: _Names(["self_attn.qkv_proj"], ["mlp.gate_up_proj"]),
}
"""By whether the checkpoint holds them as one, too."""


def _split(projection: Projection) -> tuple[Projection, Projection]:
    """The upper and the lower half of the outputs, as views."""
    weights = projection.weight.chunk(2)
    biases = (None, None) if projection.bias is None else projection.bias.chunk(2)
    first, second = (Projection(weight=weight, bias=bias) for weight, bias in zip(weights, biases, strict=True))
    return first, second


def _pair_up(qkv: Projection, config: CheckpointConfig, num_turned: int) -> Projection:
    """`qkv` with the numbers of each query and key head reordered where only the first `num_turned` of them are turned.

    `kernels.rotary` turns number i of a head with number i + head_size / 2. So the turned halves come first in either
    half of the head, and the others fill it up. Queries and keys change places alike, so their products stay the same.
    """
    size = config.head_size
    if num_turned == size:
        return qkv
    numbers = torch.arange(size)
    turned, still = numbers[:num_turned].chunk(2), numbers[num_turned:].chunk(2)
    order = torch.cat((turned[0], still[0], turned[1], still[1]))
    num_rows = (config.num_heads + config.num_kv_heads) * size
    rows = (torch.arange(0, num_rows, size)[:, None] + order).flatten()
    rows = torch.cat((rows, torch.arange(num_rows, len(qkv.weight)))).to(qkv.weight.device)
    return Projection(weight=qkv.weight[rows], bias=None if qkv.bias is None else qkv.bias[rows])


def ignored_weights(config: CheckpointConfig) -> tuple[str, ...]:
    """Endings of names that a checkpoint may hold for nothing."""
    return ("rotary_emb.inv_freq", "lm_head.weight") if config.is_tied else ("rotary_emb.inv_freq",)

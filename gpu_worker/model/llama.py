"""The Llama family's decoder: pre-norm blocks of attention and a gated feed-forward layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache, KvGroup
from gpu_worker.model.layers import Attention, GatedMlp, Linear, RmsNorm, StepContext, rotary_table
from gpu_worker.model.loader import Checkpoint
from kernels.kv_write import WriteSlots
from kernels.rotary import take_turns


class DecoderLayer:
    """One block: attention, then feed-forward, each behind a norm and added to the residual."""

    def __init__(self, attention: Attention, mlp: GatedMlp, *, input_norm: RmsNorm, mlp_norm: RmsNorm) -> None:
        self._attention, self._mlp = attention, mlp
        self._input_norm, self._mlp_norm = input_norm, mlp_norm

    def __call__(self, x: Tensor | None, residual: Tensor, step: StepContext) -> Tensor:
        """This block's last addend [rows, hidden]; `residual` takes in `x` (the block before's) and ours but that."""
        normed = self._input_norm(residual) if x is None else self._input_norm.add(x, residual)
        return self._mlp(self._mlp_norm.add(self._attention(normed, step), residual))


class Llama:
    """A decoder with its embedding and output projection.

    Args:
        embedding: [vocab, hidden]. head: hidden → vocab.
        cos_sin: [positions, head_size] float32, from `rotary_table`.
    """

    def __init__(
        self, embedding: Tensor, layers: list[DecoderLayer], *, norm: RmsNorm, head: Linear, cos_sin: Tensor
    ) -> None:
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._cos_sin = cos_sin

    @property
    def kv_groups(self) -> tuple[KvGroup, ...]:
        """All layers see the whole context."""
        return (KvGroup(layers=range(len(self._layers))),)

    def forward(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        """Normed hidden states [rows, hidden] of the step's tokens; writes their keys and values into `cache`."""
        step = StepContext(
            turns=take_turns(self._cos_sin, inputs.positions),
            slots=WriteSlots(inputs.slots, inputs.batch.block_size),
            batch=inputs.batch,
            cache=cache,
        )
        residual = F.embedding(inputs.token_ids, self._embedding)
        x: Tensor | None = None
        for layer in self._layers:
            x = layer(x, residual, step)
        assert x is not None, "a decoder has layers"
        return self._norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return self._head(hidden).float()


def load_llama(config: CheckpointConfig, checkpoint: Checkpoint, max_model_len: int, device: torch.device) -> Llama:
    """The model of `config` with its weights from `checkpoint`."""
    vocab = (config.vocab_size, config.hidden_size)
    embedding = checkpoint.take("model.embed_tokens.weight", vocab)
    layers = [_load_layer(config, checkpoint, layer) for layer in range(config.num_layers)]
    norm = RmsNorm(checkpoint.take("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
    head = Linear(embedding if config.is_tied else checkpoint.take("lm_head.weight", vocab))
    cos_sin = rotary_table(config, max_model_len, device)
    return Llama(embedding, layers, norm=norm, head=head, cos_sin=cos_sin)


def _load_layer(config: CheckpointConfig, checkpoint: Checkpoint, layer: int) -> DecoderLayer:
    name, hidden, ffn = f"model.layers.{layer}.", config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def norm(which: str) -> RmsNorm:
        return RmsNorm(checkpoint.take(name + which + ".weight", (hidden,)), config.rms_norm_eps)

    def projection(parts: dict[str, int], in_features: int, has_bias: bool) -> Linear:
        sizes = list(parts.values())
        weight = checkpoint.take_joined([name + p + ".weight" for p in parts], [(s, in_features) for s in sizes])
        if not has_bias:
            return Linear(weight)
        return Linear(weight, checkpoint.take_joined([name + p + ".bias" for p in parts], [(s,) for s in sizes]))

    attention = Attention(
        config,
        layer,
        qkv=projection(
            {"self_attn.q_proj": q_size, "self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size},
            hidden,
            config.has_qkv_bias,
        ),
        output=projection({"self_attn.o_proj": hidden}, q_size, config.has_output_bias),
    )
    mlp = GatedMlp(
        projection({"mlp.gate_proj": ffn, "mlp.up_proj": ffn}, hidden, config.has_mlp_bias),
        projection({"mlp.down_proj": hidden}, ffn, config.has_mlp_bias),
    )
    return DecoderLayer(attention, mlp, input_norm=norm("input_layernorm"), mlp_norm=norm("post_attention_layernorm"))

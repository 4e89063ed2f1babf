"""Llama, and the decoder that all families share: pre-norm blocks of attention and a gated feed-forward layer. What
another family has beside that is a switch of `CheckpointConfig`, which its own file sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig, read_decoder, refuse_windows
from gpu_worker.model.config_reader import ConfigReader
from gpu_worker.model.experts import ExpertMlp, GroupedExperts, LoopedExperts
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.layers import ActiveRows, Attention, GatedMlp, HeadNorms, Linear, RmsNorm, StepContext
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.quantization import QUANTIZATIONS, Quantization
from gpu_worker.model.rope import rotary_table
from gpu_worker.model.split import WHOLE, Split, Vocabulary
from gpu_worker.model.torch_decoder import TorchDecoder
from gpu_worker.model.weights import LayerWeights, MlpWeights, Projection, read_layer, read_outer
from gpu_worker.quant.rows import join
from kernels.kv_write import WriteSlots
from kernels.launch import uses_triton
from kernels.lora_matmul import LoraWeight
from kernels.rotary import take_turns
from kernels.softcap import softcap


def read_llama(reader: ConfigReader) -> CheckpointConfig:
    """The config of a LlamaForCausalLM."""
    config = read_decoder(reader)
    refuse_windows(reader, config)
    has_attention_bias = reader.flag("attention_bias", False)
    return replace(
        config,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=reader.flag("mlp_bias", False),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """The norms of a block: before attention, before feed-forward, and in some models behind either."""

    input: RmsNorm
    mlp: RmsNorm
    post_attention: RmsNorm | None
    post_mlp: RmsNorm | None


class DecoderLayer:
    """One block: attention, then feed-forward, each behind a norm and added to the residual."""

    def __init__(self, attention: Attention, mlp: GatedMlp | ExpertMlp, norms: LayerNorms) -> None:
        self._attention, self._mlp, self._norms = attention, mlp, norms

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether its launches depend on the number of rows only."""
        return not isinstance(self._mlp, ExpertMlp) or self._mlp.has_fixed_shapes

    @property
    def projections(self) -> dict[str, Linear]:
        """Those that each row goes through, by name: not the experts'."""
        return self._attention.projections | ({} if isinstance(self._mlp, ExpertMlp) else self._mlp.projections)

    def __call__(self, x: Tensor | None, residual: Tensor, step: StepContext) -> Tensor:
        """This block's last addend [rows, hidden]; `residual` takes in `x` (the block before's) and ours but that."""
        norms = self._norms
        attended = self._attention(norms.input(residual) if x is None else norms.input.add(x, residual), step)
        if norms.post_attention is not None:
            attended = norms.post_attention(attended)
        mixed = self._mlp(norms.mlp.add(attended, residual))
        return mixed if norms.post_mlp is None else norms.post_mlp(mixed)


@dataclass(frozen=True, slots=True)
class OuterScales:
    """`embedding`: factor of embeddings, 1: none. `logit_softcap`: cap of logits, None: none."""

    embedding: float
    logit_softcap: float | None


class Llama(TorchDecoder):
    """A decoder with its embedding and output projection.

    Args:
        vocabulary: of which `embedding` [ids, hidden] and `head`, hidden → ids, are this rank's part.
        scales: of embeddings and logits.
        cos_sin: of each of the model's ropes, [positions, head_size] float32, from `rotary_table`.
    """

    def __init__(
        self, embedding: Tensor, layers: list[DecoderLayer], *, norm: RmsNorm, head: Linear, scales: OuterScales,
        cos_sin: Sequence[Tensor], vocabulary: Vocabulary,
    ) -> None:  # fmt: skip
        super().__init__()
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._scales, self._cos_sin, self._vocabulary = scales, cos_sin, vocabulary
        self._active = ActiveRows()

    def adapt(self, weights: Mapping[tuple[int, str], LoraWeight]) -> None:
        """From now on let `weights`, by layer and projection, add what a step's adapters give."""
        for (layer, name), weight in weights.items():
            self._layers[layer].projections[name].adapt(weight, self._active)

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether a step's launches depend on its sizes only, so that they can be captured."""
        return all(layer.has_fixed_shapes for layer in self._layers)

    def forward(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        """Normed hidden states [rows, hidden] of the step's tokens; writes their keys and values into `cache`."""
        self._active.rows = inputs.adapters
        step = StepContext(
            turns=[take_turns(cos_sin, inputs.positions) for cos_sin in self._cos_sin],
            slots=WriteSlots(inputs.slots, inputs.batch.block_size),
            batch=inputs.batch,
            cache=cache,
        )
        residual = self._vocabulary.look_up(inputs.token_ids, self._embedding)
        if self._scales.embedding != 1.0:
            residual *= self._scales.embedding
        x: Tensor | None = None
        for layer in self._layers:
            x = layer(x, residual, step)
        assert x is not None, "a decoder has layers"
        return self._norm.add(x, residual)

    def _compute_logits(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        self._wanted_hidden = self.forward(inputs, cache)[inputs.wanted_rows]
        return self.logits(self._wanted_hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32; of several ranks, on the first."""
        logits, cap = self._vocabulary.join(self._head(hidden)).float(), self._scales.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def load_llama(
    config: CheckpointConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    device: torch.device,
    quantization: Quantization = QUANTIZATIONS["none"],
    *,
    split: Split = WHOLE,
) -> Llama:
    """The model of `config`, or this rank's part of it, with its weights from `checkpoint`."""
    outer, own = read_outer(config, checkpoint, split), split.own(config)
    head = Linear(outer.head, kind=quantization.outer)
    layers = [
        _make_layer(own, read_layer(config, checkpoint, layer, split), layer, quantization.body, split)
        for layer in range(config.num_layers)
    ]
    return Llama(
        head.rows(outer.embedding) if config.is_tied else outer.embedding,
        layers,
        norm=RmsNorm(outer.norm, config.rms_norm_eps),
        head=head,
        scales=OuterScales(float(outer.embedding.new_tensor(config.embedding_scale)), config.logit_softcap),
        cos_sin=[rotary_table(rope, config.head_size, max_model_len, device) for rope in config.distinct_ropes],
        vocabulary=Vocabulary(config.vocab_size, split),
    )


def _make_layer(config: CheckpointConfig, weights: LayerWeights, layer: int, kind: str, split: Split) -> DecoderLayer:
    attention = Attention(
        config,
        layer,
        qkv=Linear(weights.qkv.weight, weights.qkv.bias, kind),
        output=Linear(weights.output.weight, weights.output.bias, kind, split.add_up),
        head_norms=make_head_norms(config, weights),
    )
    return DecoderLayer(
        attention,
        _make_feed_forward(config, weights, layer, kind, split),
        _make_norms(config, weights),
    )


def _make_feed_forward(
    config: CheckpointConfig, weights: LayerWeights, layer: int, kind: str, split: Split
) -> GatedMlp | ExpertMlp:
    experts = config.experts[layer] if config.experts else None
    if experts is None or weights.router is None:
        return _make_mlp(weights.mlp[0], config.gate, kind, split.add_up)
    router, router_weight = Linear(weights.router.weight), weights.router.weight
    is_on_card = isinstance(router_weight, Tensor) and uses_triton(router_weight)
    if is_on_card and config.gate == "silu" and kind == "none" and config.scheme is None:
        return ExpertMlp(experts, router, group_experts(weights.mlp), split.add_up)
    looped = LoopedExperts([_make_mlp(mlp, config.gate, kind) for mlp in weights.mlp])
    return ExpertMlp(experts, router, looped, split.add_up)


def group_experts(mlps: Sequence[MlpWeights]) -> GroupedExperts:
    """The experts of a layer, which have no biases, with their weights below one another."""
    gates, ups, downs = ([_floats(getattr(mlp, part)) for mlp in mlps] for part in ("gate", "up", "down"))
    size, hidden = gates[0].shape
    gate_up = gates[0].new_empty((len(mlps), 2 * size, hidden))
    for weight, gate, up in zip(gate_up, gates, ups, strict=True):
        torch.cat((gate, up), out=weight)
    return GroupedExperts(gate_up, torch.stack(downs))


def _floats(projection: Projection) -> Tensor:
    assert isinstance(projection.weight, Tensor)
    return projection.weight


def _make_mlp(
    weights: MlpWeights, gate_kind: str, kind: str, add_up: Callable[[Tensor], Tensor] | None = None
) -> GatedMlp:
    gate, up, down = weights.gate, weights.up, weights.down
    bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
    gate_up = Linear(join(gate.weight, up.weight), bias, kind)
    return GatedMlp(gate_up, Linear(down.weight, down.bias, kind, add_up), gate_kind)


def _make_norms(config: CheckpointConfig, weights: LayerWeights) -> LayerNorms:
    input_norm, mlp_norm = (RmsNorm(w, config.rms_norm_eps) for w in (weights.input_norm, weights.mlp_norm))
    post_attention, post_mlp = (
        None if w is None else RmsNorm(w, config.rms_norm_eps)
        for w in (weights.post_attention_norm, weights.post_mlp_norm)
    )
    return LayerNorms(input=input_norm, mlp=mlp_norm, post_attention=post_attention, post_mlp=post_mlp)


def make_head_norms(config: CheckpointConfig, weights: LayerWeights) -> HeadNorms | None:
    """Those of a layer; None: its model has none."""
    if weights.query_norm is None or weights.key_norm is None:
        return None
    return HeadNorms(*(RmsNorm(weight, config.rms_norm_eps) for weight in (weights.query_norm, weights.key_norm)))

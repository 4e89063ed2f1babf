"""Llama, and the decoder that all families share: pre-norm blocks of attention and a gated feed-forward layer. What
another family has beside that is a switch of `CheckpointConfig`, which its own file sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.model.config import CheckpointConfig, read_decoder, refuse_windows
from gpu_worker.model.config_reader import ConfigReader
from gpu_worker.model.inputs import StepInputs
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.layers import Attention, GatedMlp, Linear, RmsNorm, StepContext
from gpu_worker.model.loader import Checkpoint
from gpu_worker.model.quantization import QUANTIZATIONS, Quantization
from gpu_worker.model.rope import rotary_table
from gpu_worker.model.weights import LayerWeights, read_layer, read_outer
from kernels.kv_write import WriteSlots
from kernels.rotary import take_turns


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
        cos_sin: of each of the model's ropes, [positions, head_size] float32, from `rotary_table`.
    """

    def __init__(
        self, embedding: Tensor, layers: list[DecoderLayer], *, norm: RmsNorm, head: Linear, cos_sin: Sequence[Tensor]
    ) -> None:
        self._embedding, self._layers, self._norm, self._head = embedding, layers, norm, head
        self._cos_sin = cos_sin

    def forward(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        """Normed hidden states [rows, hidden] of the step's tokens; writes their keys and values into `cache`."""
        step = StepContext(
            turns=[take_turns(cos_sin, inputs.positions) for cos_sin in self._cos_sin],
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

    def start_logits(self, inputs: StepInputs, cache: KvCache) -> Callable[[], Tensor]:
        """Launch a step that writes its keys and values into `cache`. The result: raw logits [wanted rows, vocab]
        float32. On a CPU it is the call of the result that computes."""
        if inputs.token_ids.device.type == "cpu":
            return lambda: self._compute_logits(inputs, cache)
        logits = self._compute_logits(inputs, cache)
        return lambda: logits

    def start_best(self, inputs: StepInputs, cache: KvCache, vocab_size: int) -> Callable[[], list[int]]:
        """Launch a step that writes its keys and values into `cache`. The result waits for it: the likeliest of the
        first `vocab_size` ids for each wanted row, the lowest on a tie. On a CPU it is the call of it that computes."""
        wait = self.start_logits(inputs, cache)
        if inputs.token_ids.device.type == "cpu":
            return lambda: _find_best(wait(), vocab_size).tolist()
        return _find_best(wait(), vocab_size).tolist

    def _compute_logits(self, inputs: StepInputs, cache: KvCache) -> Tensor:
        return self.logits(self.forward(inputs, cache)[inputs.wanted_rows])

    def profile(self) -> dict[str, float]:
        """Nothing: torch's ops are not timed."""
        return {}

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] → [rows, vocab] float32."""
        return self._head(hidden).float()


def load_llama(
    config: CheckpointConfig,
    checkpoint: Checkpoint,
    max_model_len: int,
    device: torch.device,
    quantization: Quantization = QUANTIZATIONS["none"],
) -> Llama:
    """The model of `config` with its weights from `checkpoint`."""
    outer = read_outer(config, checkpoint)
    head = Linear(outer.head, kind=quantization.outer)
    layers = [
        _make_layer(config, read_layer(config, checkpoint, layer), layer, quantization.body)
        for layer in range(config.num_layers)
    ]
    return Llama(
        head.rows(outer.embedding) if config.is_tied else outer.embedding,
        layers,
        norm=RmsNorm(outer.norm, config.rms_norm_eps),
        head=head,
        cos_sin=[rotary_table(rope, config.head_size, max_model_len, device) for rope in config.distinct_ropes],
    )


def _find_best(logits: Tensor, vocab_size: int) -> Tensor:
    return logits[:, :vocab_size].argmax(dim=-1)


def _make_layer(config: CheckpointConfig, weights: LayerWeights, layer: int, kind: str) -> DecoderLayer:
    gate_up = Linear(_join(weights.gate.weight, weights.up.weight), _join(weights.gate.bias, weights.up.bias), kind)
    attention = Attention(
        config,
        layer,
        qkv=Linear(weights.qkv.weight, weights.qkv.bias, kind),
        output=Linear(weights.output.weight, weights.output.bias, kind),
    )
    return DecoderLayer(
        attention,
        GatedMlp(gate_up, Linear(weights.down.weight, weights.down.bias, kind)),
        input_norm=RmsNorm(weights.input_norm, config.rms_norm_eps),
        mlp_norm=RmsNorm(weights.mlp_norm, config.rms_norm_eps),
    )


@overload
def _join(first: Tensor, second: Tensor) -> Tensor: ...
@overload
def _join(first: Tensor | None, second: Tensor | None) -> Tensor | None: ...
def _join(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return None if first is None or second is None else torch.cat((first, second))

"""What linears are given while a text passes through a model, layer by layer: what AWQ chooses scales by.

Only one layer's weights and one layer's keys and values are there at a time; in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.kv_layout import KvGroup, KvLayout
from gpu_worker.model.layers import Attention, GatedMlp, Linear, RmsNorm, StepContext
from gpu_worker.model.llama import DecoderLayer, LayerNorms, make_head_norms
from gpu_worker.model.rope import rotary_table
from gpu_worker.model.weights import LayerWeights
from gpu_worker.quant.rows import join
from kernels.kv_write import WriteSlots
from kernels.rotary import take_turns
from shared.ids import RequestId
from shared.messages import SamplingParams

_BLOCK = 16
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearInputs:
    """What the linears of a layer are given, float32 [rows, in]."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class _Tap:
    """A linear that remembers what it was given last."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._linear = Linear(weight, bias)
        self.seen = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        self.seen = x
        return self._linear(x)


class Calibration:
    """Texts on their way through a decoder of `config`.

    Args:
        windows: token ids of each text.
        embedding: [vocab, hidden].
    """

    def __init__(self, config: CheckpointConfig, windows: list[list[int]], embedding: Tensor) -> None:
        longest = max(map(len, windows))
        self._config = config
        self._blocks = -(-longest // _BLOCK)
        self._num_blocks = self._blocks * len(windows)
        self._inputs = StepInputs(
            StepCapacity(
                max_tokens=sum(map(len, windows)),
                max_sequences=len(windows),
                max_wanted=len(windows),
                max_blocks=self._blocks,
                block_size=_BLOCK,
            ),
            _CPU,
        )
        self._inputs.fill(self._plan(windows))
        self._inputs.send()
        self._residual = F.embedding(self._inputs.token_ids, embedding).float()
        self._cos_sin = [rotary_table(rope, config.head_size, longest, _CPU) for rope in config.distinct_ropes]

    def advance(self, layer: int, weights: LayerWeights) -> LinearInputs:
        """What the linears of `layer` are given; the texts go on through it."""
        config = self._config
        own = replace(config, num_layers=1, windows=config.windows[layer : layer + 1], ropes=(config.ropes[layer],))
        (mlp,) = weights.mlp
        gate_up_bias = None if mlp.gate.bias is None or mlp.up.bias is None else torch.cat((mlp.gate.bias, mlp.up.bias))
        qkv, output = (
            _Tap(_dense(weights.qkv.weight), weights.qkv.bias),
            _Tap(_dense(weights.output.weight), weights.output.bias),
        )
        gate_up = _Tap(_dense(join(mlp.gate.weight, mlp.up.weight)), gate_up_bias)
        down = _Tap(_dense(mlp.down.weight), mlp.down.bias)
        attention = Attention(own, 0, qkv=qkv, output=output, head_norms=make_head_norms(config, weights))
        norms = [RmsNorm(weight, config.rms_norm_eps) for weight in (weights.input_norm, weights.mlp_norm)]
        block = DecoderLayer(
            attention,
            GatedMlp(gate_up, down, config.gate),
            LayerNorms(input=norms[0], mlp=norms[1], post_attention=None, post_mlp=None),
        )
        self._residual += block(None, self._residual, self._context(layer))
        return LinearInputs(qkv=qkv.seen, output=output.seen, gate_up=gate_up.seen, down=down.seen)

    def _context(self, layer: int) -> StepContext:
        config, inputs = self._config, self._inputs
        layout = KvLayout(
            groups=(KvGroup(layers=range(1), window=None),),
            block_size=_BLOCK,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            dtype=torch.float32,
        )
        return StepContext(
            turns=[take_turns(self._cos_sin[config.rope_ids[layer]], inputs.positions)],
            slots=WriteSlots(inputs.slots, _BLOCK),
            batch=inputs.batch,
            cache=layout.allocate(self._num_blocks, _CPU),
        )

    def _plan(self, windows: list[list[int]]) -> BatchPlan:
        chunks = []
        for i, window in enumerate(windows):
            sequence = Sequence(
                request_id=RequestId(f"calibration-{i}"),
                attempt=0,
                choice=0,
                rank=0,
                token_ids=window,
                num_prompt_tokens=len(window),
                sampling=SamplingParams(seed=0, max_tokens=1),
            )
            sequence.block_ids = list(range(i * self._blocks, (i + 1) * self._blocks))
            chunks.append(PlannedChunk(sequence, 0, len(window), is_sampling=True))
        return BatchPlan(tuple(chunks))


def _dense(weight: object) -> Tensor:
    assert isinstance(weight, Tensor), "a float checkpoint"
    return weight

"""The layers that decoders are made of, over the ops of `kernels`. Model files never touch weights or caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.quantization import quantize
from kernels.kv_write import WriteSlots, kv_write
from kernels.linear import linear, pack_weight
from kernels.paged_attention import PagedBatch, paged_attention
from kernels.quantized_linear import QuantizedWeight, quantized_linear
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import Turns, rotary
from kernels.silu_mul import silu_mul


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the layers of one step share.

    Attributes:
        turns: rotations of each row, for each of the model's ropes. slots: where each row is written.
        batch: the chunks. cache: all layers' blocks.
    """

    turns: Sequence[Turns]
    slots: WriteSlots
    batch: PagedBatch
    cache: KvCache


class Linear:
    """One projection. The one place where weights are stored, split over ranks and adapted.

    Args:
        weight: [out, in]. bias: [out] or None.
        kind: what the weight is quantized to: "none", "int8" or "int4".
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kind: str = "none") -> None:
        self._weight = pack_weight(weight) if kind == "none" else quantize(weight, kind)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        if isinstance(self._weight, QuantizedWeight):
            return quantized_linear(x, self._weight, self._bias).to(x.dtype)
        return linear(x, self._weight, self._bias)

    def rows(self, like: Tensor) -> Tensor:
        """The weight as a table to look rows up in, of the dtype of `like`, which it was made of."""
        return self._weight.dequantize().to(like.dtype) if isinstance(self._weight, QuantizedWeight) else like


class RmsNorm:
    """Norm with its weight [hidden]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `x` [rows, hidden]."""
        return rms_norm(x, self._weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of `residual + x`; that sum is left in `residual`."""
        return add_rms_norm(x, residual, self._weight, self._eps)


class Attention:
    """Self-attention of layer `layer` over the paged cache, with queries, keys and values from one projection."""

    def __init__(self, config: CheckpointConfig, layer: int, *, qkv: Linear, output: Linear) -> None:
        self._layer = layer
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_size, self._window = config.head_size, config.windows[layer]
        self._rope, self._scale = config.rope_ids[layer], config.query_scale
        self._qkv, self._output = qkv, output

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → [rows, hidden]; writes this step's keys and values into the cache."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        num_rotated = self._num_heads + self._num_kv_heads
        rotary(heads[:, :num_rotated], step.turns[self._rope])
        query = heads[:, : self._num_heads]
        keys, values = step.cache.keys(self._layer), step.cache.values(self._layer)
        scales = step.cache.scales(self._layer)
        key, value = heads[:, self._num_heads : num_rotated], heads[:, num_rotated:]
        kv_write(key, value, keys, values, step.slots, scales=scales)
        mixed = paged_attention(query, keys, values, step.batch, self._scale, kv_scales=scales, window=self._window)
        return self._output(mixed.flatten(1))


class GatedMlp:
    """Feed-forward layer: down(silu(gate(x)) · up(x)), gate and up from one projection."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))

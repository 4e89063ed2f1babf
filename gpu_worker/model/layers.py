"""The layers that decoders are made of, over the ops of `kernels`. Model files never touch weights or caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_worker.model.config import CheckpointConfig
from gpu_worker.model.kv_layout import KvCache
from gpu_worker.model.quantization import quantize
from kernels.gelu_mul import gelu_mul
from kernels.grouped_weight import GroupedWeight, Weight, dequantized_linear
from kernels.kv_write import WriteSlots, kv_write
from kernels.linear import LinearWeight, linear, pack_weight
from kernels.lora_matmul import AdapterRows, LoraWeight, lora_matmul
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


class ActiveRows:
    """Which rows of the step that computes have an adapter, for all projections of a model. None: no row has one."""

    rows: AdapterRows | None = None


Project = Callable[[Tensor], Tensor]
"""[rows, in] → [rows, out]: a `Linear`, or what stands for one."""


class Linear:
    """One projection. The one place where weights are stored, split over ranks and adapted.

    Args:
        weight: [out, in]. bias: [out] or None.
        kind: what a float weight is quantized to: "none", "int8" or "int4".
        add_up: of the ranks' results, where each has some of the inputs; None: these are all.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None = None, kind: str = "none",
        add_up: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._bias, self._add_up = bias, add_up
        self._weight: LinearWeight | QuantizedWeight | GroupedWeight
        if not isinstance(weight, Tensor):
            self._weight = weight
        else:
            self._weight = pack_weight(weight) if kind == "none" else quantize(weight, kind)
        self._adapted: tuple[LoraWeight, ActiveRows] | None = None

    def adapt(self, lora: LoraWeight, active: ActiveRows) -> None:
        """From now on add what the adapters of the `active` rows give; not for addends of several ranks."""
        assert self._add_up is None, "adapters are for one rank"
        self._adapted = lora, active

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        if self._add_up is not None:
            sums = self._add_up(self._multiply(x, None))
            return sums if self._bias is None else sums + self._bias
        y = self._multiply(x, self._bias)
        if self._adapted is not None and self._adapted[1].rows is not None:
            lora_matmul(y, x, self._adapted[0], self._adapted[1].rows)
        return y

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self._weight
        if isinstance(weight, GroupedWeight) or (isinstance(weight, QuantizedWeight) and weight.is_fp8):
            return dequantized_linear(x, weight, bias).to(x.dtype)
        if isinstance(weight, QuantizedWeight):
            return quantized_linear(x, weight, bias).to(x.dtype)
        return linear(x, weight, bias)

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


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each head of queries and of keys."""

    query: RmsNorm
    key: RmsNorm

    def __call__(self, query: Tensor, key: Tensor) -> None:
        """Norm the heads of `query` and `key` [rows, heads, head_size] in place."""
        for heads, norm in ((query, self.query), (key, self.key)):
            heads.copy_(norm(heads.flatten(0, 1)).view_as(heads))


class Attention:
    """Self-attention of layer `layer` over the paged cache, with queries, keys and values from one projection."""

    def __init__(
        self,
        config: CheckpointConfig,
        layer: int,
        *,
        qkv: Project,
        output: Project,
        head_norms: HeadNorms | None = None,
    ) -> None:
        self._layer = layer
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_size, self._window = config.head_size, config.windows[layer]
        self._rope, self._scale, self._softcap = config.rope_ids[layer], config.query_scale, config.attention_softcap
        self._qkv, self._output, self._head_norms = qkv, output, head_norms

    @property
    def projections(self) -> dict[str, Linear]:
        """By name, those that can have adapters."""
        return _linears(qkv=self._qkv, output=self._output)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[rows, hidden] → [rows, hidden]; writes this step's keys and values into the cache."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_size)
        num_rotated = self._num_heads + self._num_kv_heads
        query, key, value = heads.tensor_split((self._num_heads, num_rotated), dim=1)
        if self._head_norms is not None:
            self._head_norms(query, key)
        rotary(heads[:, :num_rotated], step.turns[self._rope])
        keys, values = step.cache.keys(self._layer), step.cache.values(self._layer)
        scales = step.cache.scales(self._layer)
        kv_write(key, value, keys, values, step.slots, scales=scales)
        mixed = paged_attention(
            query, keys, values, step.batch, self._scale, kv_scales=scales, window=self._window, softcap=self._softcap
        )
        return self._output(mixed.flatten(1))


_GATES = {"silu": silu_mul, "gelu_tanh": gelu_mul}


class GatedMlp:
    """Feed-forward layer: down(activation(gate(x)) · up(x)), gate and up from one projection.

    Args:
        gate: of `CheckpointConfig`.
    """

    def __init__(self, gate_up: Project, down: Project, gate: str) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, _GATES[gate]

    @property
    def projections(self) -> dict[str, Linear]:
        """By name, those that can have adapters."""
        return _linears(gate_up=self._gate_up, down=self._down)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, hidden] → [rows, hidden]."""
        return self._down(self._gate(self._gate_up(x)))


def _linears(**projections: Project) -> dict[str, Linear]:
    return {name: linear for name, linear in projections.items() if isinstance(linear, Linear)}

"""Weights in panels for the CPU kernels' linears, and one linear as an op.

A panel is 16 neighbouring outputs, laid out so that one vector register takes one number (bfloat16: one pair) of each
(ops.h has the exact orders). Packing is a permutation with zero padding; unpacking gives the same numbers back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.arena import Arena
from kernels.cpu.ops import Dtype, Epilogue, LinearArgs, OpKind, Weight
from kernels.cpu.program import Program, address

LANES = 16
ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [out, in] in panels; `panels` is a flat byte tensor whose data is aligned to 64 bytes. `order`
    int32 [in] is that of `GroupedWeight`: the rows that it is multiplied by must be in it."""

    dtype: Dtype
    in_features: int
    out_features: int
    panels: Tensor
    scales: Tensor | None = None
    order: Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it is multiplied by quantized rows."""
        return self.dtype not in (Dtype.F32, Dtype.BF16)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors there are, by field."""
        parts = {"panels": self.panels, "scales": self.scales, "order": self.order}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def moved(self, arena: Arena) -> PackedWeight:
        """The same weight, its tensors copied into `arena`."""
        return replace(
            self,
            panels=arena.copy(self.panels),
            scales=None if self.scales is None else arena.copy(self.scales),
            order=None if self.order is None else arena.copy(self.order),
        )

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def struct(self) -> Weight:
        """What ops hold; the tensors must outlive it."""
        return Weight(
            dtype=self.dtype,
            in_features=self.in_features,
            out_features=self.out_features,
            panels=address(self.panels),
            scales=address(self.scales),
        )


def pack_float(weight: Tensor) -> PackedWeight:
    """`weight` [out, in] float32 or bfloat16 in panels, of the same dtype."""
    out_features, in_features = weight.shape
    pair = 2 if weight.dtype == torch.bfloat16 else 1
    padded = F.pad(weight, (0, -in_features % pair, 0, -out_features % LANES))
    panels = padded.view(-1, LANES, padded.shape[1] // pair, pair).transpose(1, 2)
    return PackedWeight(
        dtype=Dtype.BF16 if pair == 2 else Dtype.F32,
        in_features=in_features,
        out_features=out_features,
        panels=aligned_copy(panels),
    )


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[out, …] and [out, …] with their panels alternating, each padded to whole panels: what gates read."""
    padding = -gate.shape[0] % LANES
    tail = (0, 0) * (gate.dim() - 1)
    panels = [F.pad(part, (*tail, 0, padding)).view(-1, LANES, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(panels, dim=1).flatten(0, 2)


def aligned_copy(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` in order, [bytes] uint8, aligned to `ALIGNMENT`."""
    size = tensor.numel() * tensor.element_size()
    made = aligned_bytes(size)
    made.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return made


def aligned_bytes(size: int) -> Tensor:
    """[size] uint8, not initialised, aligned to `ALIGNMENT`."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
    offset = -memory.data_ptr() % ALIGNMENT
    return memory[offset : offset + size]


def add_linear(
    program: Program,
    x: Tensor,
    weight: PackedWeight,
    y: Tensor,
    *,
    bias: Tensor | None = None,
    x_scales: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    label: str = "linear",
) -> None:
    """Append y = x · Wᵀ + bias.

    Args:
        x: [rows, at least `in`] float32 or bfloat16 as the weight; for quantized weights quantized rows (ops.h) and
            their `x_scales` [rows].
        y: [rows, `out`] float32; SILU_MUL and GELU_MUL: [rows, out / 2] float32 or bfloat16.
        bias: [out] float32 or None; it is padded here.
    """
    if bias is not None:
        bias = F.pad(bias.float(), (0, -weight.out_features % LANES)).contiguous()
    args = linear_args(x, weight, y, bias=bias, x_scales=x_scales, epilogue=epilogue)
    program.add(OpKind.LINEAR, args, x, weight, y, bias, x_scales, label=label)


def linear_args(
    x: Tensor, weight: PackedWeight, y: Tensor, *, bias: Tensor | None = None, x_scales: Tensor | None,
    epilogue: Epilogue,
) -> LinearArgs:  # fmt: skip
    """What `add_linear` gives the op, `bias` padded to whole panels; the tensors must outlive it."""
    return LinearArgs(
        weight=weight.struct(),
        x=address(x),
        x_scales=address(x_scales),
        bias=address(bias),
        y=address(y),
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        epilogue=epilogue,
        out_dtype=Dtype.BF16 if y.dtype == torch.bfloat16 else Dtype.F32,
    )

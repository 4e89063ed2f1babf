"""Weights of 4 bits in groups, as AWQ and GPTQ checkpoints hold them, and y = x · Wᵀ + b by dequantizing them.

W [out, in] ≈ scale[out, group] · (n − zero[out, group]) with n and zero in 0 … 15; a group is a fixed number of
neighbours along `in`. Where a checkpoint chose groups by the size of activations (GPTQ's desc_act), the columns lie
here in the groups' order, and `order` says which column of x each of them multiplies.

The CPU kernels multiply them by activations of int8 (`as_int4` says the sums they compute); this file multiplies
floats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import ROW_TILE, LinearWeight, linear
from kernels.quantized_linear import GROUP, QuantizedWeight

MIDDLE = 8
"""The zero point of symmetric weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight:
    """A weight [out, in], `in` even.

    Attributes:
        nibbles: uint8 [out, in / 2]; byte i holds number 2i (its low half) and 2i + 1.
        scales: float16 [out, groups].
        zeros: uint8 [out, groups]; None: `MIDDLE` everywhere.
        group: numbers of a group along `in`: a multiple of 32, or all.
        order: int64 [in], column i multiplies x[:, order[i]]; None: x[:, i].
    """

    nibbles: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.nibbles.shape[0], 2 * self.nibbles.shape[1]

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """n of some rows, uint8 [rows, in]."""
        nibbles = self.nibbles[rows]
        return torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(1)

    def steps(self, rows: slice = slice(None)) -> Tensor:
        """n − zero of some rows, int8 [rows, in]."""
        numbers = self.numbers(rows).to(torch.int8)
        if self.zeros is None:
            return numbers.sub_(MIDDLE)
        return numbers.sub_(self._by_column(self.zeros[rows]).to(torch.int8))

    def dequantize(self) -> Tensor:
        """What it stands for, float32 [out, in], columns as those of x."""
        weight = self.steps().float().mul_(self._by_column(self.scales))
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def as_int4(self) -> QuantizedWeight:
        """The same numbers in groups of 32, columns as they lie: what the CPU kernels' sums are, of int8 activations
        in `order`. 8 bits a number."""
        return QuantizedWeight(values=self.steps(), scales=self.by_32(self.scales))

    def by_32(self, grouped: Tensor) -> Tensor:
        """What each group has [rows, groups], for each 32 columns: [rows, ceil(in / 32)]."""
        count = -(-self.shape[1] // GROUP)
        return grouped.repeat_interleave(-(-min(self.group, self.shape[1]) // GROUP), dim=1)[:, :count]

    def _by_column(self, grouped: Tensor) -> Tensor:
        return grouped.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]


Weight = Tensor | QuantizedWeight | GroupedWeight
"""What a linear's weight [out, in] may be stored as; integers or float8 with one scale an output, or in groups."""


def make_grouped(numbers: Tensor, scales: Tensor, zeros: Tensor | None, group: int) -> GroupedWeight:
    """From n, uint8 [out, in], scales of any float dtype and zeros [out, groups] of any integer dtype.

    Raises:
        ValueError: a scale is no finite float16.
    """
    half = scales.to(torch.float16)
    if not bool(half.isfinite().all()):
        raise ValueError("a scale is not finite in float16")
    pairs = F.pad(numbers, (0, numbers.shape[1] % 2)).view(len(numbers), -1, 2)
    if zeros is not None and bool((zeros == MIDDLE).all()):
        zeros = None
    return GroupedWeight(
        nibbles=pairs[..., 0] | pairs[..., 1] << 4,
        scales=half.contiguous(),
        zeros=None if zeros is None else zeros.to(torch.uint8).contiguous(),
        group=group,
    )


def dequantized_linear(x: Tensor, weight: QuantizedWeight | GroupedWeight, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b of floats, float32 [rows, out], each row independent of the others.

    Args:
        x: [rows, in], any float dtype.
    """
    dense = LinearWeight(weight.dequantize(), is_packed=False, row_tile=ROW_TILE)
    return linear(x.float(), dense, None if bias is None else bias.float())

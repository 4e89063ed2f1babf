"""Weights rounded to 4 bits in groups, each with a scale and a zero point, and the tensors that files hold for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.quant.linears import AWQ_ORDER

_STEPS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """w ≈ scale · (n − zero): `numbers` float32 [out, groups, size] and `zeros` [out, groups, 1] whole numbers 0 … 15,
    `scales` [out, groups, 1] float16."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor

    def floats(self) -> Tensor:
        """What it stands for, float32 [out, in]."""
        return ((self.numbers - self.zeros) * self.scales.float()).flatten(1)


def round_to_groups(weight: Tensor, group: int, shrink: Tensor | float = 1.0) -> Rounded:
    """`weight` float32 [out, in] to the nearest of 16 steps between the least and the largest number of each group.

    Args:
        group: divides `in`.
        shrink: of that range, for all or for each group [out, groups, 1]; what lies beyond is cut off.
    """
    groups = weight.view(len(weight), -1, group)
    low = groups.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = groups.amax(-1, keepdim=True).clamp(min=0) * shrink
    scales = ((high - low) / _STEPS).half()
    inverse = scales.float().reciprocal().masked_fill_(scales == 0, 0.0)
    zeros = (-low * inverse).round_().clamp_(0, _STEPS)
    numbers = (groups * inverse).round_().add_(zeros).clamp_(0, _STEPS)
    return Rounded(numbers=numbers, scales=scales, zeros=zeros)


def awq_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """As AutoAWQ writes them (`linears.py`)."""
    return {
        "qweight": _pack(rounded.numbers.flatten(1).T, AWQ_ORDER),
        "qzeros": _pack(rounded.zeros.squeeze(-1).T, AWQ_ORDER),
        "scales": rounded.scales.squeeze(-1).T.contiguous(),
    }


def packed_tensors(rounded: Rounded) -> dict[str, Tensor]:
    """As llm-compressor writes them; outputs a multiple of 8."""
    numbers = rounded.numbers.flatten(1)
    return {
        "weight_packed": _pack(numbers),
        "weight_zero_point": _pack(rounded.zeros.squeeze(-1).T).T.contiguous(),
        "weight_scale": rounded.scales.squeeze(-1).contiguous(),
        "weight_shape": torch.tensor(numbers.shape),
    }


def _pack(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Numbers 0 … 15 [rows, n] in int32 [rows, n / 8], the eight of each in `order`."""
    nibbles = numbers.to(torch.uint8).reshape(len(numbers), -1, 8)[..., list(order)].reshape(len(numbers), -1, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)

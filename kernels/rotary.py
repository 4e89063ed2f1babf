"""Rotary position embedding in the split-halves order of Llama and Qwen.

For a head vector (a, b) of two halves at position p: (a·cos − b·sin, b·cos + a·sin), with cos and sin taken from a
table at p. Layouts: x [rows, heads, head_size], table [positions, head_size] = cos half, then sin half, float32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_cos_sin(inverse_frequencies: Tensor, num_positions: int) -> Tensor:
    """The table [num_positions, 2 · len(inverse_frequencies)], float32, on the frequencies' device."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotary(x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """Rotate `x` in place.

    Args:
        x: [rows, heads, head_size]; may be a view (queries and keys of a fused projection at once).
        positions: [rows] int64, below the table's length.
        cos_sin: from `make_cos_sin`.
    """
    if x.dim() != 3 or x.shape[0] != positions.shape[0] or x.shape[2] != cos_sin.shape[1]:
        raise ValueError(f"x {list(x.shape)}, positions {list(positions.shape)}, table {list(cos_sin.shape)}")
    x.copy_(rotary_reference(x, positions, cos_sin))


def rotary_reference(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """`x` rotated, computed in float32; a new tensor of x's dtype."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

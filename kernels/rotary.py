"""Rotary position embedding in the split-halves order of Llama and Qwen.

For a head vector (a, b) of two halves at position p: (a·cos − b·sin, b·cos + a·sin), with cos and sin taken from a
table at p. Layouts: x [rows, heads, head_size], table [positions, head_size] = cos half, then sin half, float32. What
a step takes from the table is the same in all of its layers: `take_turns` once, then `rotary` in each, on CUDA by the
Triton kernel in `kernels/gpu/rotary.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.launch import uses_triton


def make_cos_sin(inverse_frequencies: Tensor, num_positions: int) -> Tensor:
    """The table [num_positions, 2 · len(inverse_frequencies)], float32, on the frequencies' device."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@dataclass(frozen=True, slots=True)
class Turns:
    """The rotation of each row: `cos` is (cos, cos) and `sin` is (−sin, sin), both [rows, 1, head_size] float32, so
    that a row is x · cos + (its halves swapped) · sin."""

    cos: Tensor
    sin: Tensor


def take_turns(cos_sin: Tensor, positions: Tensor) -> Turns:
    """The rotations at `positions`.

    Args:
        cos_sin: from `make_cos_sin`.
        positions: [rows] int64, below the table's length.
    """
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    return Turns(cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1))


def rotary(x: Tensor, turns: Turns) -> None:
    """Rotate `x` in place; on CPU the same bits as `rotary_reference`.

    Args:
        x: [rows, heads, head_size]; may be a view (queries and keys of a fused projection at once).
        turns: of the rows.
    """
    if x.dim() != 3 or (x.shape[0], 1, x.shape[2]) != turns.cos.shape:
        raise ValueError(f"x is {list(x.shape)}, its turns are {list(turns.cos.shape)}")
    if uses_triton(x):
        from kernels.gpu.rotary import rotary_triton

        return rotary_triton(x, turns)
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    x.copy_((wide * turns.cos).add_(swapped.mul_(turns.sin)))
    return None


def rotary_reference(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """`x` rotated, computed in float32; a new tensor of x's dtype."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

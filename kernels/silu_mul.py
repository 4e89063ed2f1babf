"""The gate of a gated feed-forward layer: silu(gate) · up, silu(z) = z / (1 + exp(−z)).

Layouts: gate_up [rows, 2 · size] (gate columns first), result [rows, size].

On CUDA the Triton kernel in `kernels/gpu/silu_mul.py` runs.

Design note: torch's own `silu` gives other last bits in its vector loop than in its scalar tail (170 of 4096 float32
values), so an element's value would depend on where it lies in the tensor. exp, division and product don't; float32
is therefore built from those. bfloat16 uses `silu`, which is faster; its rounding hides nearly all of that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import uses_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) · up: [rows, size] in the dtype of `gate_up` [rows, 2 · size]."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up is {list(gate_up.shape)}: the last dimension is not even")
    if uses_triton(gate_up):
        from kernels.gpu.silu_mul import silu_mul_triton

        return silu_mul_triton(gate_up)
    if gate_up.dtype == torch.float32:
        return silu_mul_reference(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """The formula in float32, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1.0 + torch.exp(-gate)) * up).to(gate_up.dtype)

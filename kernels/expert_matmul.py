"""Feed-forward layers of experts, each row computed by a few of them, in products grouped by expert.

    y[row] = Σ over its experts e, in the order of their numbers: share[row, e] · down_e(silu(gate_e(x)) · up_e(x))

Layouts: x and y [rows, hidden]; shares float32 and chosen integers, both [rows, num_used]; gate_up [experts, 2 · size,
hidden] (gate outputs first) and down [experts, hidden, size]. What gate, up and down give is rounded to x's dtype, the
sum is float32, rounded once.

On CUDA the Triton kernels in `kernels/gpu/expert_matmul.py` run; elsewhere the reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.launch import uses_triton
from kernels.silu_mul import silu_mul_reference


def expert_mlp(x: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """y; see the module. No wait for the device: launches depend on the number of rows only.

    Raises:
        ValueError: sizes disagree.
    """
    num_experts, hidden, size = down.shape
    is_routed = shares.shape == chosen.shape and chosen.shape[0] == x.shape[0]
    if x.shape[1] != hidden or gate_up.shape != (num_experts, 2 * size, hidden) or not is_routed:
        raise ValueError(f"x {list(x.shape)}, chosen {list(chosen.shape)}, gate_up {list(gate_up.shape)} and down "
                         f"{list(down.shape)} disagree")  # fmt: skip
    if not uses_triton(x):
        return expert_mlp_reference(x, shares, chosen, gate_up, down)
    from kernels.gpu.expert_matmul import expert_mlp_triton

    return expert_mlp_triton(x, shares, chosen, gate_up, down)


def expert_mlp_reference(x: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The formula, one expert at a time, products in float32."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(len(down)):
        rows, choices = (chosen == expert).nonzero(as_tuple=True)
        inner = silu_mul_reference(F.linear(x[rows].float(), gate_up[expert].float()).to(x.dtype))
        outer = F.linear(inner.float(), down[expert].float()).to(x.dtype)
        out.index_add_(0, rows, outer.float() * shares[rows, choices, None])
    return out.to(x.dtype)

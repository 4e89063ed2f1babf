"""RMS norm: y = x / sqrt(mean(x²) + eps) · w over the last dimension, alone or after adding into the residual.

Layouts: x and residual [rows, hidden], w [hidden]. The mean is taken in float32 whatever the dtype; what is multiplied
by w is rounded before, unless w is float32 beside another dtype (as models were trained: Llama, Gemma). Every row is
reduced in an order that depends on `hidden` only. On CUDA the Triton kernel in `kernels/gpu/rms_norm.py` runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import uses_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of each row, [rows, hidden] in x's dtype.

    Args:
        x: [rows, hidden].
        weight: [hidden], x's dtype or float32.
        eps: added to the mean square.
    """
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"x is {list(x.shape)}, the weight {list(weight.shape)}")
    if uses_triton(x):
        from kernels.gpu.rms_norm import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of `residual + x`, [rows, hidden]; `residual` is overwritten with that sum."""
    if uses_triton(x):
        from kernels.gpu.rms_norm import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula, in float32, rounded to the weight's dtype before that is applied, and to x's at the end."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(x.dtype)

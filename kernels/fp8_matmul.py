"""y = x · (W · scale)ᵀ + b with a weight of fp8 (e4m3) numbers and a scale for each output.

    W ≈ scale[out] · q, q e4m3, exact in bfloat16 and float16; a scale for the whole tensor is the same one for all

Layouts: q [out, in] as checkpoints hold it, neighbours along `in`; x [rows, in].

On CUDA the Triton kernel in `kernels/gpu/fp8_matmul.py` runs; elsewhere the reference. Numbers must not be NaN: the
kernel takes one for 480, which is what its bits would be in a format without it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.launch import uses_triton


def fp8_matmul(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · (W · scale)ᵀ + b, [rows, out] in x's dtype, summed in float32. A row's bits do not depend on the other rows
    as long as there are at most 16, and not while there are more than 64.

    Args:
        x: [rows, in]. weight: float8_e4m3fn [out, in]. scales: float32 [out]. bias: [out], any float dtype, or None.

    Raises:
        ValueError: sizes disagree.
    """
    if x.shape[1] != weight.shape[1] or scales.shape != weight.shape[:1]:
        raise ValueError(f"x {list(x.shape)}, weight {list(weight.shape)} and scales {list(scales.shape)} disagree")
    if not uses_triton(x):
        return fp8_matmul_reference(x, weight, scales, bias)
    from kernels.gpu.fp8_matmul import fp8_matmul_triton

    return fp8_matmul_triton(x, weight, scales, bias)


def fp8_matmul_reference(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula, in float32."""
    product = F.linear(x.float(), weight.float()) * scales
    return (product if bias is None else product + bias.float()).to(x.dtype)

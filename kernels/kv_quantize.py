"""Keys and values as int8 or fp8 (e4m3) numbers with a scale for each token and head, and back.

    scale = max|x| / L as fp16, at most 65504, with L = 127 for int8 and 448 for fp8
    q = x / scale to the nearest number, ties to even, within ±L
    x ≈ q · scale, a product that is exact in float32

A token's numbers depend on that token only, so it does not matter how a prompt was cut. A head of zeros, or one so
near 0 that its scale is 0 in fp16, gives zeros; infinities and what is too large for a scale become ±L; a head with a
NaN has q = 0 and scale NaN.

Layouts: x and q [..., head_size]; scales [...]. The kernels that write and read the cache do the same on the way
(`kernels/kv_write.py`, `kernels/paged_attention.py`, `kernels/cpu/kv_quantize.h`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""L, by the dtype of q."""
MAX_SCALE = 65504.0  # the largest fp16
SCALE_DTYPE = torch.float16


@dataclass(frozen=True, slots=True)
class KvScales:
    """Scales of a quantized cache: `key` and `value` [num_blocks, block_size, kv_heads] fp16, any strides."""

    key: Tensor
    value: Tensor


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of `dtype` has scales."""
    return dtype in LIMITS


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q of `dtype`, as `x`, and its scales [...] fp16.

    Args:
        x: [..., head_size], any float dtype.
        dtype: one of `LIMITS`.
    """
    wide, limit = x.float(), LIMITS[dtype]
    scales = (wide.abs().amax(-1) / limit).clamp(max=MAX_SCALE).to(SCALE_DTYPE)
    divisor = scales.float().unsqueeze(-1)
    ratio = (wide / divisor).clamp(-limit, limit)
    ratio = torch.where(divisor > 0, ratio, 0.0).nan_to_num(nan=0.0)
    return (ratio.round() if dtype == torch.int8 else ratio).to(dtype), scales


def dequantize_kv(q: Tensor, scales: Tensor) -> Tensor:
    """q · scale, float32."""
    return q.float() * scales.float().unsqueeze(-1)

"""The arithmetic of `kernels.kv_quantize` in Triton, for the kernels that write and read a quantized cache.

fp8 numbers are bits in int8 tensors, encoded and decoded by integer operations: cards before sm_89 have no conversion,
and so every card gives the same bits. Moved to where fp16 has exponent and mantissa, an fp8 number's bits are its value
times 2⁻⁸; scales are multiplied by 2⁸ when they are read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAIN, INT8, FP8 = 0, 1, 2
"""KIND of a cache: of floats, or of numbers with scales."""
_KINDS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


def cache_kind(cache: Tensor) -> int:
    """KIND of `cache`."""
    return _KINDS.get(cache.dtype, PLAIN)


def as_bits(cache: Tensor) -> Tensor:
    """`cache` as kernels take it: fp8 as int8."""
    return cache.view(torch.int8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def quantize_heads(x, IS_FP8: tl.constexpr):
    """Numbers [H, D] int8 of x [H, D], and scales [H] fp16; what is masked in x must be 0."""
    LIMIT: tl.constexpr = 448.0 if IS_FP8 else 127.0
    x = x.to(tl.float32)
    is_nan = x != x  # noqa: PLR0124 - only NaN differs from itself
    has_nan = tl.max(is_nan.to(tl.int32), 1) > 0
    largest = tl.max(tl.where(is_nan, 0.0, tl.abs(x)), 1)
    scale = tl.minimum(tl.div_rn(largest, LIMIT), 65504.0).to(tl.float16)
    divisor = scale.to(tl.float32)
    is_known = ((divisor > 0) & (has_nan == 0))[:, None]
    ratio = tl.div_rn(x, tl.where(divisor > 0, divisor, 1.0)[:, None])
    ratio = tl.where(is_known, tl.minimum(tl.maximum(ratio, -LIMIT), LIMIT), 0.0)
    if IS_FP8:
        bits = ratio.to(tl.int32, bitcast=True)
        most = bits & 0x7FFFFFFF
        # below 2⁻⁶ numbers are multiples of 2⁻⁹: the last bits of the sum with 2¹⁴
        small = (most.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        normal = ((most + 0x7FFFF + ((most >> 20) & 1)) >> 20) - (120 << 3)
        numbers = tl.where(most < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    else:
        numbers = ((ratio + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 · 2²³: to the nearest, ties to even
    return numbers.to(tl.int8), tl.where(has_nan, float("nan"), divisor).to(tl.float16)


@triton.jit
def to_floats(numbers, KIND: tl.constexpr):
    """Numbers as floats, exactly; of FP8, fp16 and times 2⁻⁸."""
    if KIND == 2:
        moved = (numbers.to(tl.int16) << 7) & -16385  # the sign twice, exponent, mantissa; one of the signs goes
        floats = moved.to(tl.float16, bitcast=True)
    else:
        floats = numbers.to(tl.float32)
    return floats


@triton.jit
def load_scales(pointer, mask, KIND: tl.constexpr):
    """What `to_floats` is to be multiplied by, float32."""
    scales = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    return scales * 256.0 if KIND == 2 else scales

"""y = x · Wᵀ + b with a quantized weight and activations quantized to int8 row by row.

Formulas, W [out, in], x [rows, in]:

* int8: W ≈ scale[out] · q with q in [−127, 127], scale = max|W[out]| / 127.
* int4: W ≈ scale[out, group] · q with q in [−8, 7], groups of `GROUP` numbers along `in` (4.5 bits a weight). The
  number farthest from zero becomes −8 exactly (as ggml's Q4_0 does), so that one of 16 values isn't wasted.
* x ≈ scale[row] · q with q in [−127, 127], scale = max|x[row]| / 127.

Sums of products of integers are exact in int32, so a result's bits depend only on the few float32 operations after
them, and these are fixed: int8 (float(sum) · weight scale) · x scale + bias; int4 starts from 0, adds float(sum of a
group) · its scale group after group, each product and sum rounded, then · x scale + bias. The C kernels
(kernels/cpu/linear_int8.c, linear_int4.c) do the same, so both give equal bits, for any number of rows. This file is
what runs without them: right, not fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 32
_CHUNK = 1 << 20
"""Weights quantized at a time: temporary float32 copies stay within some MB and in the cache."""
_EXACT_SUMMANDS = 1024
"""Products of two int8 that float32 adds without rounding, in any order: 1024 · 127² < 2^24."""
_SMALLEST_ROW = 2.0**-100
"""A row whose largest number is not above this counts as zero: 127 / it would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """A weight [out, in] as integers `values` int8 [out, in] and `scales`: float32 [out] (int8), or float16
    [out, ceil(in / GROUP)] (int4; values in [−8, 7] from `quantize_int4`, from checkpoints with zero points in
    [−15, 15]). In checkpoints `values` may be float8 e4m3, too, with float32 scales [out]."""

    values: Tensor
    scales: Tensor

    @property
    def is_int4(self) -> bool:
        return self.scales.dim() == 2

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == torch.float8_e4m3fn

    def dequantize(self) -> Tensor:
        """What it stands for, float32 [out, in]."""
        if not self.is_int4:
            return self.values.float() * self.scales[:, None]
        return self.values.float() * self.scales.float().repeat_interleave(GROUP, dim=1)[:, : self.values.shape[1]]


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """`weight` [out, in], any float dtype, as int8 with a scale for each output.

    Raises:
        ValueError: it holds a NaN or an infinity.
    """
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for rows in _chunks(weight):
        values[rows], scales[rows] = quantize_rows(weight[rows])
    _check_finite(scales)
    return QuantizedWeight(values=values, scales=scales)


def quantize_int4(weight: Tensor) -> QuantizedWeight:
    """`weight` [out, in], any float dtype, as int4 with a scale for each group of each output.

    Raises:
        ValueError: it holds a NaN, an infinity, or a number whose scale exceeds float16.
    """
    out_features, in_features = weight.shape
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(out_features, -(-in_features // GROUP), dtype=torch.float16)
    for rows in _chunks(weight):
        groups = F.pad(weight[rows], (0, -in_features % GROUP)).float()
        groups = groups.view(len(groups), -1, GROUP)
        low, high = groups.amin(dim=-1), groups.amax(dim=-1)  # four times as fast as aminmax
        scales[rows] = torch.where(high > -low, high, low).div_(-8).half()
        inverse = scales[rows].float().reciprocal_()
        inverse.masked_fill_(scales[rows] == 0, 0)
        quantized = (groups * inverse[..., None]).round_().clamp_(-8, 7).to(torch.int8)
        values[rows] = quantized.flatten(1)[:, :in_features]
    _check_finite(scales)
    return QuantizedWeight(values=values, scales=scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, in], any float dtype, as (int8 [rows, in], float32 scales [rows]).

    A row of zeros, or within 2^−100 of it, has scale 0; one with a NaN or an infinity has zeros and scale NaN.
    """
    wide = x.float()
    largest = torch.maximum(wide.amax(dim=-1), -wide.amin(dim=-1))
    is_zero, is_finite = largest <= _SMALLEST_ROW, largest.isfinite()
    # a tensor, as 127.0 / largest is computed as 127.0 · (1 / largest)
    inverse = (torch.full_like(largest, 127.0) / largest).masked_fill_(is_zero | ~is_finite, 0.0)
    values = wide * inverse[:, None]
    if not bool(is_finite.all()):
        values[~is_finite] = 0.0
    scales = (largest / 127.0).masked_fill_(is_zero, 0.0).masked_fill_(~is_finite, torch.nan)
    return values.round_().to(torch.int8), scales


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b: float32 [rows, out], each row independent of the others.

    Args:
        x: [rows, in], any float dtype; quantized here.
        weight: of int8 or int4.
        bias: [out] or None.

    Raises:
        ValueError: x does not have `in` columns.
    """
    if x.dim() != 2 or x.shape[1] != weight.values.shape[1]:
        raise ValueError(f"x is {list(x.shape)}; the weight takes [rows, {weight.values.shape[1]}]")
    values, scales = quantize_rows(x)
    y = _int4_sums(values, weight) if weight.is_int4 else _int_sums(values, weight.values) * weight.scales
    y = y * scales[:, None]
    return y if bias is None else y + bias.float()


def _int_sums(x: Tensor, w: Tensor) -> Tensor:
    """x · wᵀ of int8, exact, then rounded to float32."""
    if _is_int_mm_exact() and x.shape[0]:
        return torch._int_mm(x, w.T).float()
    return exact_product(x, w).float()


def exact_product(x: Tensor, w: Tensor) -> Tensor:
    """x [rows, in] · w [out, in]ᵀ of int8 in int32, by float32 products that are short enough not to round."""
    sums = torch.zeros(x.shape[0], w.shape[0], dtype=torch.int32)
    for k in range(0, x.shape[1], _EXACT_SUMMANDS):
        sums += (x[:, k : k + _EXACT_SUMMANDS].float() @ w[:, k : k + _EXACT_SUMMANDS].float().T).int()
    return sums


def _int4_sums(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The groups' sums, each times its scale, added up in their order."""
    y = torch.zeros(x.shape[0], weight.values.shape[0])
    for group in range(weight.scales.shape[1]):
        columns = slice(group * GROUP, (group + 1) * GROUP)
        y += (x[:, columns].float() @ weight.values[:, columns].float().T) * weight.scales[:, group].float()
    return y


def _chunks(weight: Tensor) -> list[slice]:
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    return [slice(row, row + rows) for row in range(0, weight.shape[0], rows)]


def _check_finite(scales: Tensor) -> None:
    if not bool(scales.isfinite().all()):
        raise ValueError("a weight to quantize holds a NaN, an infinity, or a number too large for its scale")


@lru_cache(maxsize=1)
def _is_int_mm_exact() -> bool:
    """Whether this machine's int8 product adds in 32 bits all the way (without VNNI some add pairs in 16)."""
    x = torch.full((32, 256), 127, dtype=torch.int8)
    return bool((torch._int_mm(x, -x.T) == -(127**2) * 256).all())

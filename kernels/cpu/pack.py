"""Quantized weights in panels for the CPU kernels (ops.h has the orders), and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.linear import LANES, PackedWeight, aligned_bytes
from kernels.cpu.ops import Dtype
from kernels.grouped_weight import GroupedWeight
from kernels.quantized_linear import GROUP, QuantizedWeight, quantize_int8

_NIBBLE_BYTES = GROUP * LANES // 2
_GROUP_BYTES = _NIBBLE_BYTES + LANES * 2
_ZERO_POINT = 8
_SIGN = -128
"""Turns int8 into uint8 + 128 and back."""
_PANELS_AT_ONCE = 256
"""Temporary copies stay small beside the weight."""


def pack_quantized(weight: QuantizedWeight | GroupedWeight) -> PackedWeight:
    """`weight` in panels; its tensors are not needed afterwards. fp8 becomes int8 of each output's own scale."""
    if isinstance(weight, GroupedWeight):
        return _pack_grouped(weight)
    if weight.is_fp8:
        weight = quantize_int8(weight.dequantize())
    return _pack_int4(weight) if weight.is_int4 else _pack_int8(weight)


def unpack_quantized(packed: PackedWeight) -> QuantizedWeight:
    """The weight that `pack_quantized` was given, of int8 or int4."""
    return _unpack_int4(packed) if packed.dtype == Dtype.INT4 else _unpack_int8(packed)


def _pack_int8(weight: QuantizedWeight) -> PackedWeight:
    out_features, in_features = weight.values.shape
    num_panels, columns = -(-out_features // LANES), -(-in_features // 4)
    panels = aligned_bytes(num_panels * columns * 4 * LANES)
    by_panel = panels.view(torch.int32).view(num_panels, columns, LANES)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        values = weight.values[first * LANES : (first + _PANELS_AT_ONCE) * LANES]
        values = F.pad(values, (0, -in_features % 4, 0, -values.shape[0] % LANES)) ^ _SIGN
        chunk = values.view(torch.int32).view(-1, LANES, columns).transpose(1, 2)
        by_panel[first : first + _PANELS_AT_ONCE] = chunk
    return PackedWeight(
        dtype=Dtype.INT8,
        in_features=in_features,
        out_features=out_features,
        panels=panels,
        scales=F.pad(weight.scales, (0, -out_features % LANES)),
    )


def _unpack_int8(packed: PackedWeight) -> QuantizedWeight:
    assert packed.scales is not None
    columns = -(-packed.in_features // 4)
    values = packed.panels.view(torch.int32).view(-1, columns, LANES).transpose(1, 2)
    values = values.reshape(-1).view(torch.int8).view(-1, columns * 4) ^ _SIGN
    return QuantizedWeight(
        values=values[: packed.out_features, : packed.in_features].contiguous(),
        scales=packed.scales[: packed.out_features],
    )


def _pack_int4(weight: QuantizedWeight) -> PackedWeight:
    out_features, in_features = weight.values.shape
    num_groups = weight.scales.shape[1]
    num_panels = -(-out_features // LANES)
    panels = aligned_bytes(num_panels * num_groups * _GROUP_BYTES)
    by_panel = panels.view(num_panels, num_groups, _GROUP_BYTES)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        some = slice(first * LANES, (first + _PANELS_AT_ONCE) * LANES)
        values, scales = weight.values[some], weight.scales[some]
        padding = -values.shape[0] % LANES
        values = F.pad(values, (0, -in_features % GROUP, 0, padding)) + _ZERO_POINT
        chunk = by_panel[first : first + _PANELS_AT_ONCE]
        chunk[..., : -2 * LANES] = _nibbles(values.view(torch.uint8), num_groups)
        chunk[..., -2 * LANES :] = _by_panel(F.pad(scales, (0, 0, 0, padding)))
    return PackedWeight(dtype=Dtype.INT4, in_features=in_features, out_features=out_features, panels=panels)


def _pack_grouped(weight: GroupedWeight) -> PackedWeight:
    """INT4 or INT4_ZEROS."""
    out_features, in_features = weight.shape
    num_groups, num_panels = -(-in_features // GROUP), -(-out_features // LANES)
    group_bytes = _GROUP_BYTES + (0 if weight.zeros is None else LANES)
    panels = aligned_bytes(num_panels * num_groups * group_bytes)
    by_panel = panels.view(num_panels, num_groups, group_bytes)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        rows = slice(first * LANES, (first + _PANELS_AT_ONCE) * LANES)
        numbers, scales = weight.numbers(rows), weight.by_32(weight.scales[rows])
        padding = -len(numbers) % LANES
        chunk = by_panel[first : first + _PANELS_AT_ONCE]
        padded = F.pad(numbers, (0, -in_features % GROUP, 0, padding))
        chunk[..., :_NIBBLE_BYTES] = _nibbles(padded, num_groups)
        chunk[..., _NIBBLE_BYTES:_GROUP_BYTES] = _by_panel(F.pad(scales, (0, 0, 0, padding)))
        if weight.zeros is not None:
            zeros = weight.by_32(weight.zeros[rows])
            chunk[..., _GROUP_BYTES:] = _by_panel(F.pad(zeros, (0, 0, 0, padding)))
    return PackedWeight(
        dtype=Dtype.INT4 if weight.zeros is None else Dtype.INT4_ZEROS,
        in_features=in_features,
        out_features=out_features,
        panels=panels,
        order=None if weight.order is None else weight.order.int(),
    )


def _nibbles(values: Tensor, num_groups: int) -> Tensor:
    """[panels, groups, bytes] from numbers 0 .. 15 [outputs, in]: byte [v][o][b] holds 8v + b and 8v + 4 + b."""
    halves = values.view(torch.int32).view(-1, LANES, num_groups, 4, 2)
    both = halves[..., 0] | halves[..., 1] << 4
    return both.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(-1, num_groups, GROUP * LANES // 2)


def _by_panel(grouped: Tensor) -> Tensor:
    """What each output has for each group [outputs, groups], as bytes [panels, groups, bytes]."""
    by_panel = grouped.reshape(-1, LANES, grouped.shape[1]).transpose(1, 2).contiguous()
    return by_panel.view(torch.uint8)


def _unpack_int4(packed: PackedWeight) -> QuantizedWeight:
    num_groups = -(-packed.in_features // GROUP)
    by_panel = packed.panels.view(-1, num_groups, _GROUP_BYTES)
    nibbles = by_panel[..., : -2 * LANES].contiguous().view(-1, num_groups, 4, LANES, 4)
    values = torch.stack((nibbles & 15, nibbles >> 4), dim=-2).permute(0, 3, 1, 2, 4, 5)
    values = values.reshape(-1, num_groups * GROUP).view(torch.int8) - _ZERO_POINT
    scales = by_panel[..., -2 * LANES :].contiguous().view(torch.float16).transpose(1, 2)
    return QuantizedWeight(
        values=values[: packed.out_features, : packed.in_features].contiguous(),
        scales=scales.reshape(-1, num_groups)[: packed.out_features].contiguous(),
    )

"""Rows as the linears of the CPU kernels read them: floats, or quantized for quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.arena import make_buffer
from kernels.cpu.linear import PackedWeight
from kernels.cpu.program import Program
from kernels.cpu.rows import add_quantize, quantized_bytes

_PAD_COLUMNS = 64
"""Rows that linears read are as long as this allows, with zeros behind: panels are padded along `in`."""


@dataclass(frozen=True, slots=True)
class LinearRows:
    """What a linear reads: `values` [rows, width and padding]; int8 with `scales` [rows] for quantized weights. Where a
    weight wants the numbers of a row in an order of its own, they are as floats in theirs `in_order`."""

    values: Tensor
    scales: Tensor | None = None
    in_order: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LinearInput:
    """Rows of `width` numbers that linears are to read: as `floats`, or `quantized` if any of these linears is."""

    width: int
    floats: Tensor
    quantized: Tensor
    scales: Tensor

    def rows(self, weight: PackedWeight) -> LinearRows:
        """What `weight` reads."""
        if not weight.is_quantized:
            return LinearRows(self.floats)
        return LinearRows(self.quantized, self.scales, None if weight.order is None else self.floats)

    def add_quantize(self, program: Program, weight: PackedWeight, *, per_row: int = 1) -> LinearRows:
        """Append what it takes to have the floats as `weight` reads them. `per_row`: rows for each of the step's."""
        if weight.is_quantized:
            add_quantize(
                program, self.floats, self.width, self.quantized, self.scales, order=weight.order, per_row=per_row
            )
        return self.rows(weight)


def make_input(num_rows: int, width: int, dtype: torch.dtype) -> LinearInput:
    """Buffers; pages that nothing is written to take no memory."""
    padded = -(-width // _PAD_COLUMNS) * _PAD_COLUMNS
    return LinearInput(
        width=width,
        floats=make_buffer(num_rows, padded, dtype=dtype),
        quantized=make_buffer(num_rows, quantized_bytes(width), dtype=torch.int8),
        scales=torch.zeros(num_rows),
    )

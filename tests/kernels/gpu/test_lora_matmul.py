"""Triton's adapters against the reference, and row by row."""

from __future__ import annotations

import pytest
import torch

from kernels.gpu.lora_matmul import SPLIT, lora_matmul_triton
from kernels.lora_matmul import AdapterRows, LoraWeight, lora_matmul_reference
from tests.kernels.gpu.device import ABSOLUTE, DEVICE, assert_near, needs_device
from tests.kernels.lora_cases import PARTS, SLOTS, make_rows, make_weight, make_xy

pytestmark = needs_device


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_device(weight: LoraWeight) -> LoraWeight:
    return LoraWeight(weight.a.to(DEVICE), weight.b.to(DEVICE), weight.ends, weight.ranks)


def rows_of(slots: list[int], empty_groups: int = 0) -> AdapterRows:
    rows = make_rows(slots, empty_groups=empty_groups)
    return AdapterRows(rows.rows.to(DEVICE), rows.starts.to(DEVICE), rows.slots.to(DEVICE))


@pytest.mark.parametrize("dtype", ABSOLUTE)
@pytest.mark.parametrize(("ends", "slots"), [*zip(PARTS, SLOTS, strict=True), (PARTS[2], SLOTS[3])])
def test_equals_reference(dtype: torch.dtype, ends: tuple[int, ...], slots: list[int]) -> None:
    """Each row should gain its own adapter's product, and rows without one, or beside a group, stay as they are."""
    weight = make_weight(ends, SPLIT + 100 if len(slots) < 9 else 100, (3, 20, 24), 24, dtype)
    x, y = make_xy(slots, weight)
    expected = lora_matmul_reference(y, x, weight, slots)
    y = y.to(DEVICE)
    lora_matmul_triton(y, x.to(DEVICE), on_device(weight), rows_of(slots, empty_groups=2))
    assert_near(expected, y)


def test_rows_are_independent() -> None:
    """A row should have the same bits alone and among others."""
    weight = make_weight((64, 80, 96), 100, (8, 4), 8, torch.bfloat16)
    slots = [0, 1] * 4
    x, y = make_xy(slots, weight)
    before = y.clone()
    y = y.to(DEVICE)
    lora_matmul_triton(y, x.to(DEVICE), on_device(weight), rows_of(slots))
    for row in (0, 7):
        alone = before[row : row + 1].to(DEVICE)
        lora_matmul_triton(alone, x[row : row + 1].to(DEVICE), on_device(weight), rows_of(slots[row : row + 1]))
        assert torch.equal(y[row], alone[0])

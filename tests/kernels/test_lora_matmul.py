"""Adapters by torch against the reference, and row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.lora_matmul import GROUP_ROWS, NO_SLOT, group_rows, lora_matmul, lora_matmul_reference, most_groups
from tests.kernels.lora_cases import PARTS, SLOTS, make_rows, make_weight, make_xy

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("slots", SLOTS)
def test_groups_hold_each_row_once(slots: list[int]) -> None:
    """Each row with an adapter should be in one group of its slot, no group too large, and no more than are told."""
    numbers, starts, found = group_rows(np.array(slots, dtype=np.int64))
    assert sorted(numbers.tolist()) == [row for row, slot in enumerate(slots) if slot != NO_SLOT]
    assert starts[-1] == len(numbers)
    assert len(found) <= most_groups(len(slots), 3)
    for slot, first, end in zip(found, starts, starts[1:], strict=False):
        assert 0 < end - first <= GROUP_ROWS
        assert {slots[row] for row in numbers[first:end]} == {slot}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("ends", PARTS)
@pytest.mark.parametrize("slots", SLOTS)
def test_equals_reference(dtype: torch.dtype, ends: tuple[int, ...], slots: list[int]) -> None:
    """Each row should gain its own adapter's product, rows without one should stay bit by bit."""
    weight = make_weight(ends, 100, (3, 0, 8), 8, dtype)
    x, y = make_xy(slots, weight)
    expected = lora_matmul_reference(y, x, weight, slots)
    before = y.clone()
    lora_matmul(y, x, weight, make_rows(slots, empty_groups=2))
    torch.testing.assert_close(y, expected, rtol=0, atol=TOLERANCE[dtype])
    for row, slot in enumerate(slots):
        assert torch.equal(y[row], before[row]) == (slot in (NO_SLOT, 1))


def test_rows_are_independent() -> None:
    """In float32 a row should have the same bits alone and among others."""
    weight = make_weight((64, 80, 96), 576, (8, 4), 8, torch.float32)
    slots = [0, 1] * 20
    x, y = make_xy(slots, weight)
    before = y.clone()
    lora_matmul(y, x, weight, make_rows(slots))
    for row in (0, 7, 39):
        alone = before[row : row + 1].clone()
        lora_matmul(alone, x[row : row + 1], weight, make_rows(slots[row : row + 1]))
        assert torch.equal(y[row], alone[0])


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Another width should be an error that shows the sizes."""
    weight = make_weight((32,), 100, (3,), 8, torch.float32)
    x, y = make_xy([0], weight)
    with pytest.raises(ValueError, match=r"\[1, 99\]"):
        lora_matmul(y, x[:, :99], weight, make_rows([0]))

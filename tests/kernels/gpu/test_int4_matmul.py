"""Triton's product with 4-bit weights against the reference, its packed layout, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.int4_matmul import SPLIT, int4_matmul_triton
from kernels.int4_matmul import Int4Weight, int4_matmul, int4_matmul_reference, repack_int4
from tests.kernels.gpu.device import DEVICE, assert_near, needs_device

pytestmark = needs_device


def make_weight(
    out_features: int, in_features: int, group: int, *, has_zeros: bool = True, has_order: bool = False
) -> tuple[Int4Weight, Tensor]:
    """A packed weight and, column by column of x, what it stands for in float32 [out, in]."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    groups = -(-in_features // group) if group > 0 else 1
    values = torch.randint(0, 16, (out_features, in_features), generator=generator).to(torch.uint8)
    scales = ((torch.rand(out_features, groups, generator=generator) + 0.1) / in_features**0.5 / 8).half()
    zeros = torch.randint(0, 17, (out_features, groups), generator=generator) if has_zeros else None
    order = torch.randperm(in_features, generator=generator) if has_order else None
    of_column = torch.arange(in_features) // (group if group > 0 else in_features)
    meant = (values.float() - (8.0 if zeros is None else zeros[:, of_column])) * scales[:, of_column].float()
    if order is not None:
        meant = torch.empty_like(meant).index_copy_(1, order, meant)
    zeros = None if zeros is None else zeros.to(DEVICE)
    order = None if order is None else order.to(DEVICE)
    return repack_int4(values.to(DEVICE), scales.to(DEVICE), zeros, group, order), meant


def make_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], a view of something wider whose rest is NaN."""
    whole = torch.full((rows, width + 16), torch.nan, dtype=dtype)
    whole[:, :width] = torch.randn(rows, width).to(dtype)
    return whole.to(DEVICE)[:, :width]


@pytest.mark.parametrize(
    ("dtype", "sizes", "group", "has_zeros", "has_order"),
    [
        (torch.float16, (1, 63, 128), 32, True, False),
        (torch.bfloat16, (1, 100, 576), 64, True, False),
        (torch.bfloat16, (3, 64, 63), -1, False, False),
        (torch.float16, (16, 65, 2 * SPLIT + 128), 128, False, False),
        (torch.bfloat16, (7, 1, 100), 32, True, True),
        (torch.float32, (2, 33, SPLIT + 1), 256, True, False),
        (torch.float16, (17, 63, SPLIT + 256), 128, True, True),
        (torch.bfloat16, (64, 100, 320), 16, False, False),
        (torch.bfloat16, (100, 129, 384), 128, True, False),
        (torch.float16, (65, 100, 100), -1, True, False),
        (torch.float16, (0, 8, 32), 32, True, False),
    ],
)
def test_equals_reference(
    dtype: torch.dtype, sizes: tuple[int, int, int], group: int, has_zeros: bool, has_order: bool
) -> None:
    """Few rows and many should equal the formula, with and without a bias, whatever the sizes and groups; and so
    should the reference equal products with what the weight means."""
    rows, out_features, in_features = sizes
    weight, meant = make_weight(out_features, in_features, group, has_zeros=has_zeros, has_order=has_order)
    x, bias = make_rows(rows, in_features, dtype), torch.randn(out_features).to(dtype).to(DEVICE)
    for added in (None, bias):
        expected = int4_matmul_reference(x, weight, added)
        assert_near(expected, int4_matmul_triton(x, weight, added))
    rounded = meant.to(dtype).float()
    torch.testing.assert_close(
        (x.cpu().float() @ rounded.T + bias.cpu().float()).to(dtype), expected.cpu(), rtol=1e-2, atol=1e-2
    )


def test_a_packed_weight_keeps_its_numbers() -> None:
    """Dequantizing should give exactly what was packed, in 4 bits a number and a few for each group."""
    weight, meant = make_weight(64, 1024, 64)
    assert torch.equal(meant, weight.dequantize(torch.float32).cpu())
    assert weight.zeros is not None
    num_bytes = sum(x.numel() * x.element_size() for x in (weight.words, weight.scales, weight.zeros))
    assert num_bytes == meant.numel() // 2 + meant.numel() // 64 * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 130])
def test_alone_equals_in_a_batch(dtype: torch.dtype, rows: int) -> None:
    """A row should have the same bits alone and among few, and the same in any place among many."""
    weight, _ = make_weight(80, SPLIT + 64, 64)
    x = make_rows(rows, SPLIT + 64, dtype)
    together = int4_matmul_triton(x, weight, None)
    if rows <= 16:
        for row in range(rows):
            assert torch.equal(together[row], int4_matmul_triton(x[row : row + 1], weight, None)[0])
    moved = torch.randperm(rows)
    assert torch.equal(together[moved], int4_matmul_triton(x[moved], weight, None))


def test_what_does_not_fit_is_refused() -> None:
    """Groups that no kernel has, scales of other shapes or beyond float16, and an x of another width should be
    refused."""
    values, scales = torch.zeros(4, 192, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ValueError, match="groups of 96 columns"):
        repack_int4(values, scales, None, 96)
    with pytest.raises(ValueError, match=r"scales are \[4, 2\], and this weight has \[4, 3\] groups"):
        repack_int4(values, scales, None, 64)
    with pytest.raises(ValueError, match="not finite in float16"):
        repack_int4(values, scales * 1e5, None, 128)
    weight = repack_int4(values, scales, None, 128)
    with pytest.raises(ValueError, match="the weight has 192 columns"):
        int4_matmul(torch.zeros(2, 190), weight)
    assert torch.equal(torch.full((2, 4), -8.0 * 192), int4_matmul(torch.ones(2, 192), weight))

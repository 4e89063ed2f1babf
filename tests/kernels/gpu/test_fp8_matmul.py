"""Triton's product with fp8 weights against the reference, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.fp8_matmul import fp8_matmul, fp8_matmul_reference
from kernels.gpu.fp8_matmul import SPLIT, fp8_matmul_triton
from tests.kernels.gpu.device import DEVICE, assert_near, needs_device
from tests.kernels.gpu.test_int4_matmul import make_rows

pytestmark = needs_device


def make_weight(out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    """Numbers of all sizes, the largest and subnormal ones among them, and scales."""
    generator = torch.Generator().manual_seed(out_features + in_features)
    wide = torch.randn(out_features, in_features, generator=generator) * 60
    wide[0, :2] = torch.tensor([448.0, -448.0])[:in_features]
    wide[-1] *= 2.0**-12
    scales = (torch.rand(out_features, generator=generator) + 0.1) / in_features**0.5 / 60
    return wide.clamp(-448, 448).to(torch.float8_e4m3fn).to(DEVICE), scales.to(DEVICE)


@pytest.mark.parametrize(
    ("dtype", "rows", "out_features", "in_features"),
    [
        (torch.float16, 1, 63, 63),
        (torch.bfloat16, 1, 100, 576),
        (torch.bfloat16, 16, 65, 2 * SPLIT + 100),
        (torch.float32, 3, 1, 1),
        (torch.float16, 17, 63, SPLIT + 1),
        (torch.bfloat16, 100, 129, 320),
        (torch.float16, 0, 8, 32),
    ],
)
def test_equals_reference(dtype: torch.dtype, rows: int, out_features: int, in_features: int) -> None:
    """Few rows and many should equal the formula, with and without a bias."""
    weight, scales = make_weight(out_features, in_features)
    x, bias = make_rows(rows, in_features, dtype), torch.randn(out_features).to(dtype).to(DEVICE)
    for added in (None, bias):
        assert_near(fp8_matmul_reference(x, weight, scales, added), fp8_matmul_triton(x, weight, scales, added))


def test_alone_equals_in_a_batch() -> None:
    """A row should have the same bits alone and among few."""
    weight, scales = make_weight(80, SPLIT + 64)
    x = make_rows(16, SPLIT + 64, torch.bfloat16)
    together = fp8_matmul_triton(x, weight, scales, None)
    for row in range(16):
        assert torch.equal(together[row], fp8_matmul_triton(x[row : row + 1], weight, scales, None)[0])


def test_what_does_not_fit_is_refused() -> None:
    """An x of another width and scales of another number should be refused."""
    weight, scales = make_weight(4, 32)
    with pytest.raises(ValueError, match=r"x \[1, 31\], weight \[4, 32\] and scales \[4\] disagree"):
        fp8_matmul(torch.zeros(1, 31, device=DEVICE), weight, scales)
    with pytest.raises(ValueError, match="disagree"):
        fp8_matmul(torch.zeros(1, 32, device=DEVICE), weight, scales[:1])

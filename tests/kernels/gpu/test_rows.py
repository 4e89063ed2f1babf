"""Triton's norm, gate, rotation, cache write and block copy against their references, and row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.gpu.kv_copy import kv_copy_triton
from kernels.gpu.kv_write import kv_write_triton
from kernels.gpu.rms_norm import add_rms_norm_triton, rms_norm_triton
from kernels.gpu.rotary import rotary_triton
from kernels.gpu.silu_mul import silu_mul_triton
from kernels.kv_copy import kv_copy_reference
from kernels.kv_quantize import LIMITS, KvScales
from kernels.kv_write import WriteSlots, kv_write_reference
from kernels.rms_norm import rms_norm_reference
from kernels.rotary import make_cos_sin, rotary_reference, take_turns
from kernels.silu_mul import silu_mul_reference
from tests.kernels.gpu.device import ABSOLUTE, DEVICE, assert_near, map_blocks, needs_device

pytestmark = needs_device
DTYPES = list(ABSOLUTE)


def make_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """[rows, width], a view of something wider."""
    return (torch.randn(rows, width + 16) * 2).to(dtype).to(DEVICE)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (63, 100), (3, 896), (0, 64)])
def test_rms_norm(dtype: torch.dtype, rows: int, size: int) -> None:
    """The norm should equal the formula; the fused form should leave exactly the sum in the residual."""
    x, residual, weight = make_rows(rows, size, dtype), make_rows(rows, size, dtype), make_rows(1, size, dtype)[0]
    assert_near(rms_norm_reference(x, weight, 1e-5), rms_norm_triton(x, weight, 1e-5))
    total = x + residual
    assert_near(rms_norm_reference(total, weight, 1e-5), add_rms_norm_triton(x, residual, weight, 1e-5))
    assert torch.equal(total, residual)
    wide = weight.float() + 0.001
    assert_near(rms_norm_reference(x, wide, 1e-5), rms_norm_triton(x, wide, 1e-5))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy, in the interpreter; the result is right
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 63), (3, 100), (2, 1025), (0, 8)])
def test_silu_mul(dtype: torch.dtype, rows: int, size: int) -> None:
    """The gate should equal the formula, also where exp overflows."""
    gate_up = make_rows(rows, 2 * size, dtype)
    assert_near(silu_mul_reference(gate_up), silu_mul_triton(gate_up))
    large = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], dtype=dtype, device=DEVICE)
    assert torch.equal(torch.tensor([[0.0, 1e4]], dtype=dtype, device=DEVICE), silu_mul_triton(large))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 1, 64), (5, 16, 128), (3, 9, 80)])
def test_rotary(dtype: torch.dtype, rows: int, heads: int, size: int) -> None:
    """A view should be rotated as by the formula, and what lies beside it left alone."""
    table = make_cos_sin(1.0 / 10000.0 ** (torch.arange(0, size, 2) / size), 640).to(DEVICE)
    positions = (torch.arange(rows) * 100).to(DEVICE)
    whole = torch.randn(rows, heads + 2, size).to(dtype).to(DEVICE)
    expected, beside = rotary_reference(whole[:, :heads], positions, table), whole[:, heads:].clone()
    rotary_triton(whole[:, :heads], take_turns(table, positions))
    assert_near(expected, whole[:, :heads])
    assert torch.equal(beside, whole[:, heads:])


def test_rows_are_independent() -> None:
    """A row should have the same bits wherever it lies."""
    x, gate_up = make_rows(5, 100, torch.bfloat16), make_rows(5, 200, torch.bfloat16)
    weight = make_rows(1, 100, torch.bfloat16)[0]
    normed, gated = rms_norm_triton(x, weight, 1e-6), silu_mul_triton(gate_up)
    for row in range(5):
        assert torch.equal(normed[row], rms_norm_triton(x[row : row + 1], weight, 1e-6)[0])
        assert torch.equal(gated[row], silu_mul_triton(gate_up[row : row + 1])[0])


@pytest.mark.parametrize("slots", [[0, 5, 17, 34], [33, -1, 2, -1], [-1, -1, -1, -1]])
@pytest.mark.parametrize(("block_size", "heads", "size"), [(7, 3, 80), (8, 1, 64)])
def test_kv_write(slots: list[int], block_size: int, heads: int, size: int) -> None:
    """Each row should land in its slot of both caches, padding rows nowhere, and nothing else change."""
    actual = torch.full((5, 2, block_size, heads, size), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    expected = actual.clone()
    rows = torch.randn(4, 2 * heads + 1, size).bfloat16().to(DEVICE)
    key, value = rows[:, :heads], rows[:, heads : 2 * heads]
    at = WriteSlots(torch.tensor(slots).to(DEVICE), block_size)
    kv_write_triton(key, value, actual[:, 0], actual[:, 1], at)
    kv_write_reference(key, value, expected[:, 0], expected[:, 1], at)
    assert torch.equal(expected.view(torch.int16), actual.view(torch.int16))


@pytest.mark.parametrize("dtype", list(LIMITS))
@pytest.mark.parametrize(("block_size", "heads", "size"), [(7, 3, 80), (8, 1, 64)])
def test_quantized_kv_write(dtype: torch.dtype, block_size: int, heads: int, size: int) -> None:
    """Numbers and scales should have the reference's bits, in their slots only; zeros, numbers of all sizes, infinities
    and NaN among them."""
    rows = torch.randn(6, 2 * heads + 1, size, generator=torch.Generator().manual_seed(4))
    rows *= torch.logspace(-8, 8, 6)[:, None, None]
    rows[0, 0], rows[1, 0, 1], rows[2, 0, 5], rows[3, 0] = 0.0, torch.inf, torch.nan, 3e38
    rows[4] *= torch.logspace(-6, 0, size)
    numbers = torch.full((5, 2, block_size, heads, size), 85, dtype=torch.int8).view(dtype)
    scales = torch.full((5, 2, heads, block_size), -1.0, dtype=torch.float16).transpose(2, 3)
    found = [(numbers.clone().to(DEVICE), scales.clone().to(DEVICE)) for _ in range(2)]
    at = WriteSlots(torch.tensor([0, 5, 17, -1, 34, 9]).to(DEVICE), block_size)
    key, value = rows[:, :heads].to(DEVICE), rows[:, heads : 2 * heads].to(DEVICE)
    for write, (cache, own) in zip((kv_write_reference, kv_write_triton), found, strict=True):
        write(key, value, cache[:, 0], cache[:, 1], at, scales=KvScales(own[:, 0], own[:, 1]))
    (expected, expected_scales), (actual, actual_scales) = found
    assert torch.equal(expected.view(torch.int8), actual.view(torch.int8))
    assert torch.equal(expected_scales.nan_to_num(7.0), actual_scales.nan_to_num(7.0))
    assert bool(actual_scales.isnan().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_kv_copy(dtype: torch.dtype) -> None:
    """Blocks should be copied whole, padding pairs not at all, within a cache and between two; in any dtype."""
    shape = (9, 2, 8, 3, 100)
    source = torch.randint(-100, 100, shape).to(dtype).to(DEVICE)
    for target in (source.clone(), torch.randint(-100, 100, shape).to(dtype).to(DEVICE)):
        expected = target.clone()
        ids = torch.tensor([[1, 8, 4], [0, 7, -1]]).to(DEVICE)
        kv_copy_reference(source, expected, ids[0], ids[1])
        kv_copy_triton(source, target, ids[0], ids[1])
        assert torch.equal(expected, target)


def test_block_ids_beyond_32_bits() -> None:
    """Blocks whose offsets in elements do not fit into 32 bits should be written and copied where they lie."""
    far = 2**31 // 4096 + 3
    blocks = map_blocks(far + 2, 2, 16, 2, 64)
    key = torch.randn(1, 2, 64).bfloat16().to(DEVICE)
    slot = torch.tensor([far * 16 + 5]).to(DEVICE)
    kv_write_triton(key, 2 * key, blocks[:, 0], blocks[:, 1], WriteSlots(slot, 16))
    assert torch.equal(key[0], blocks[far, 0, 5])
    assert torch.equal(2 * key[0], blocks[far, 1, 5])
    kv_copy_triton(blocks, blocks, torch.tensor([far]).to(DEVICE), torch.tensor([far + 1]).to(DEVICE))
    assert torch.equal(blocks[far], blocks[far + 1])

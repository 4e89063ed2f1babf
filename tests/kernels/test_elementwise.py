"""Linear, norm, rotary, gate and cache write against their references, and row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import linear as linear_module
from kernels.gelu_mul import gelu_mul, gelu_mul_reference
from kernels.kv_write import WriteSlots, kv_write
from kernels.linear import LinearWeight, linear, linear_reference, pack_weight
from kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from kernels.rotary import make_cos_sin, rotary, rotary_reference, take_turns
from kernels.silu_mul import silu_mul, silu_mul_reference
from kernels.softcap import softcap, softcap_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
ROWS = (0, 1, 2, 3, 8, 31, 33, 63, 100)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [(64, 128), (1536, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_reference(dtype: torch.dtype, size: tuple[int, int], has_bias: bool) -> None:
    """Packed products should equal the dense formula at all row counts."""
    weight = (torch.randn(size[1], size[0]) / size[0] ** 0.5).to(dtype)
    bias = torch.randn(size[1]).to(dtype) if has_bias else None
    packed = pack_weight(weight)
    for rows in ROWS:
        x = torch.randn(rows, size[0]).to(dtype)
        torch.testing.assert_close(
            linear(x, packed, bias), linear_reference(x, weight, bias), rtol=0, atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_linear_rows_are_independent(num_threads: int) -> None:
    """In float32 a row should have the same bits at whatever row count, packed or in tiles."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        weight = torch.randn(300, 1536)
        tiled = LinearWeight(weight, is_packed=False, row_tile=linear_module.ROW_TILE)
        x = torch.randn(100, 1536)
        for packed in (pack_weight(weight), tiled):
            whole = linear(x, packed)
            for rows in ROWS:
                assert torch.equal(whole[:rows], linear(x[:rows], packed))
                assert torch.equal(whole[50 : 50 + rows], linear(x[50 : 50 + rows], packed))
        torch.testing.assert_close(linear(x, tiled), linear(x, pack_weight(weight)), rtol=0, atol=1e-3)
    finally:
        torch.set_num_threads(before)


def test_linear_refuses_other_sizes() -> None:
    """A wrong number of columns should be refused with both sizes."""
    with pytest.raises(ValueError, match=r"\[2, 5\]; the weight takes \[rows, 4\]"):
        linear(torch.zeros(2, 5), pack_weight(torch.zeros(3, 4)))
    with pytest.raises(ValueError, match="out, in"):
        pack_weight(torch.zeros(3))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rms_norm(dtype: torch.dtype) -> None:
    """The norm should equal torch's own; the fused form should leave the sum in the residual."""
    x, residual, weight = torch.randn(63, 576).to(dtype), torch.randn(63, 576).to(dtype), torch.randn(576).to(dtype)
    expected = torch.nn.functional.rms_norm(x.float(), (576,), weight.float(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).float(), expected, rtol=1e-2, atol=TOLERANCE[dtype])
    total = x + residual
    assert torch.equal(add_rms_norm(x, residual, weight, 1e-5), rms_norm_reference(total, weight, 1e-5))
    assert torch.equal(residual, total)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, weight[:100], 1e-5)


def test_norm_and_gate_rows_are_independent() -> None:
    """In float32 a row should have the same bits wherever it lies, for odd sizes too."""
    x, gate_up, weight = torch.randn(257, 577), torch.randn(257, 2 * 577), torch.randn(577)
    normed, gated = rms_norm(x, weight, 1e-6), silu_mul(gate_up)
    for row in range(257):
        assert torch.equal(normed[row], rms_norm(x[row : row + 1], weight, 1e-6)[0])
        assert torch.equal(gated[row], silu_mul(gate_up[row : row + 1])[0])


@pytest.mark.parametrize("gated", [silu_mul, gelu_mul])
def test_gate_elements_are_independent(gated: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In float32 an element should have the same bits in a wide row, in a narrow one, and alone."""
    gate, up = torch.randn(1, 2000) * 4, torch.randn(1, 2000)
    whole = gated(torch.cat((gate, up), dim=-1))
    for start in range(0, 2000, 7):
        for width in (1, 5):
            part = slice(start, start + width)
            assert torch.equal(whole[:, part], gated(torch.cat((gate[:, part], up[:, part]), dim=-1)))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gelu_mul(dtype: torch.dtype) -> None:
    """The gate should equal torch's gelu times up, and stay finite for large inputs."""
    gate_up = (torch.randn(63, 200) * 10).to(dtype)
    torch.testing.assert_close(gelu_mul(gate_up), gelu_mul_reference(gate_up), rtol=2e-2, atol=TOLERANCE[dtype])
    assert gelu_mul(torch.tensor([[-1e4, 1e4, 1.0, 1.0]])).tolist() == [[0.0, 1e4]]
    with pytest.raises(ValueError, match="not even"):
        gelu_mul(torch.zeros(1, 3))


def test_softcap() -> None:
    """Capped numbers should equal the formula, keep their sign and be the same bits alone."""
    x = torch.cat((torch.randn(1001) * 40, torch.tensor([0.0, 1e9, -1e9, -torch.inf])))
    capped = softcap(x, 30.0)
    torch.testing.assert_close(capped, softcap_reference(x, 30.0), rtol=0, atol=5e-6)
    assert capped[1001:].tolist() == [0.0, 30.0, -30.0, -30.0]
    assert all(torch.equal(capped[i : i + 1], softcap(x[i : i + 1], 30.0)) for i in range(0, 1005, 9))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_silu_mul(dtype: torch.dtype) -> None:
    """The gate should equal torch's silu times up, and stay finite for large inputs."""
    gate_up = (torch.randn(63, 200) * 30).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(
        silu_mul(gate_up).float(), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=TOLERANCE[dtype]
    )
    torch.testing.assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), rtol=2e-2, atol=TOLERANCE[dtype])
    assert silu_mul(torch.tensor([[-1e4, 1e4, 1.0, 1.0]])).tolist() == [[0.0, 1e4]]
    with pytest.raises(ValueError, match="not even"):
        silu_mul(torch.zeros(1, 3))


def test_rotary() -> None:
    """A rotation should keep lengths, leave position 0 alone, and make products depend on distance only."""
    table = make_cos_sin(1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32), 64)
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def product(query_position: int, key_position: int) -> float:
        turned = [x.clone() for x in (query, key)]
        for x, position in zip(turned, (query_position, key_position), strict=True):
            rotary(x, take_turns(table, torch.tensor([position])))
        return float((turned[0] * turned[1]).sum())

    assert torch.equal(query, rotary_reference(query, torch.tensor([0]), table))
    assert product(9, 4) == pytest.approx(product(55, 50), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotary_in_place(dtype: torch.dtype) -> None:
    """A view should be rotated to the very bits of the reference, and what lies beside it left alone."""
    table = make_cos_sin(1.0 / 10000.0 ** (torch.arange(0, 32, 2) / 32), 640)
    positions = torch.arange(63) * 10
    whole = torch.randn(63, 3, 32).to(dtype)
    expected, beside = rotary_reference(whole[:, :2], positions, table), whole[:, 2].clone()
    rotary(whole[:, :2], take_turns(table, positions))
    assert torch.equal(expected, whole[:, :2])
    assert torch.equal(beside, whole[:, 2])
    with pytest.raises(ValueError, match="turns"):
        rotary(whole, take_turns(table, positions[:9]))


@pytest.mark.parametrize("slots", [[0, 5, 17, 34], [33, -1, 2, -1], [-1, -1, -1, -1]])
def test_kv_write(slots: list[int]) -> None:
    """Each row should land in its slot of both caches, padding rows nowhere, and nothing else change."""
    storage = torch.full((5, 2, 7, 2, 16), torch.nan)
    key, value = torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    kv_write(key, value, storage[:, 0], storage[:, 1], WriteSlots(torch.tensor(slots), 7))
    written = {slot: row for row, slot in enumerate(slots) if slot >= 0}
    for slot in range(35):
        for half, rows in ((0, key), (1, value)):
            cell = storage[slot // 7, half, slot % 7]
            assert torch.equal(cell, rows[written[slot]]) if slot in written else bool(cell.isnan().all())

"""The C rotary embedding and KV write against their torch references, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.attention import AttentionShape, HeadNorms, rotary_kv
from kernels.cpu.kv_cache import KvShape, pack_blocks, unpack_blocks, unpack_scales
from kernels.cpu.program import Pool
from kernels.kv_quantize import LIMITS, quantize_kv
from kernels.kv_write import WriteSlots, kv_write_reference
from kernels.rms_norm import rms_norm_reference
from kernels.rotary import make_cos_sin, rotary_reference
from tests.kernels.cpu.conftest import Machine

DTYPES = (torch.float32, torch.bfloat16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
NUM_BLOCKS, NUM_POSITIONS, SCALE = 40, 500, 0.3


@pytest.fixture
def pools(machine: Machine) -> dict[int, Pool]:
    return machine.pools


def make_shape(dtype: torch.dtype, *, block_size: int = 16, head_size: int = 64, group: int = 4) -> AttentionShape:
    kv = KvShape(kv_heads=2, head_size=head_size, block_size=block_size, dtype=dtype)
    return AttentionShape(heads=2 * group, kv=kv)


def make_inputs(shape: AttentionShape, rows: int) -> tuple[Tensor, ...]:
    """qkv, table, positions, and slots in any order, each sixth row unwritten."""
    size, num_slots = shape.kv.head_size, NUM_BLOCKS * shape.kv.block_size
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(rows, shape.qkv_width, generator=generator) * 3
    table = make_cos_sin(1e4 ** (-torch.arange(0, size, 2) / size), NUM_POSITIONS)
    positions = torch.randint(NUM_POSITIONS, (rows,), generator=generator)
    slots = torch.randperm(max(num_slots, rows), generator=generator)[:rows]
    slots[slots >= num_slots] = -1
    slots[5::6] = -1
    return qkv, table, positions, slots


def run(pool: Pool, shape: AttentionShape, inputs: tuple[Tensor, ...], cache: Tensor) -> Tensor:
    """The queries."""
    qkv, table, positions, slots = inputs
    return rotary_kv(pool, shape, qkv, cos_sin=table, cache=cache, scale=SCALE, positions=positions, slots=slots)


def expected_of(shape: AttentionShape, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys' cache and values' cache as torch computes them; unwritten slots hold NaN."""
    qkv, table, positions, slots = inputs
    kv = shape.kv
    parts = qkv.unflatten(1, (-1, kv.head_size)).split([shape.heads, kv.kv_heads, kv.kv_heads], dim=1)
    factor = torch.tensor(SCALE * math.log2(math.e))
    query = (rotary_reference(parts[0], positions, table) * factor).to(kv.dtype)
    caches = [
        torch.full((NUM_BLOCKS, kv.block_size, kv.kv_heads, kv.head_size), torch.nan, dtype=kv.dtype) for _ in range(2)
    ]
    key = rotary_reference(parts[1], positions, table).to(kv.dtype)
    kv_write_reference(key, parts[2].to(kv.dtype), caches[0], caches[1], WriteSlots(slots, kv.block_size))
    return query, caches[0], caches[1]


def empty_cache(shape: AttentionShape, *, stride: int = 0) -> Tensor:
    """Blocks full of NaN, `stride` elements or none apart."""
    plain = (NUM_BLOCKS, shape.kv.block_size, shape.kv.kv_heads, shape.kv.head_size)
    nan = torch.full(plain, torch.nan, dtype=shape.kv.dtype)
    packed = pack_blocks(nan, nan, shape.kv)
    wide = torch.full((NUM_BLOCKS, stride or packed.shape[1]), torch.nan, dtype=shape.kv.dtype)
    wide[:, : packed.shape[1]] = packed
    return wide[:, : packed.shape[1]]


def check(shape: AttentionShape, rows: int, pool: Pool) -> None:
    inputs = make_inputs(shape, rows)
    cache = empty_cache(shape)
    query = run(pool, shape, inputs, cache)
    for expected, actual in zip(expected_of(shape, inputs), (query, *unpack_blocks(cache, shape.kv)), strict=True):
        assert torch.equal(expected.nan_to_num(7e7), actual.nan_to_num(7e7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 100])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 32])
def test_equals_torch(dtype: torch.dtype, rows: int, block_size: int, pools: dict[int, Pool]) -> None:
    """Queries and the whole cache, untouched slots included, should have the bits that torch gives them."""
    check(make_shape(dtype, block_size=block_size), rows, pools[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_head_sizes(dtype: torch.dtype, head_size: int, group: int, pools: dict[int, Pool]) -> None:
    """Every head size and group should do."""
    check(make_shape(dtype, head_size=head_size, group=group), 20, pools[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype, pools: dict[int, Pool]) -> None:
    """Rows that share a pair of keys but not a thread should not disturb each other."""
    shape = make_shape(dtype)
    qkv, table, positions, _ = make_inputs(shape, 300)
    slots = torch.arange(600).view(2, -1).T.flatten()[:300]  # neighbouring rows far apart, neighbouring slots too
    results = []
    for num_threads in (1, 2, 3, 3, 3):
        cache = empty_cache(shape)
        query = run(pools[num_threads], shape, (qkv, table, positions, slots), cache)
        results.append((query, cache.nan_to_num(7e7)))
    for query, cache in results[1:]:
        assert torch.equal(results[0][0], query)
        assert torch.equal(results[0][1], cache)


def test_blocks_may_be_part_of_larger_ones(pools: dict[int, Pool]) -> None:
    """A layer's part of blocks that hold other layers, too, should be written and nothing beside it."""
    shape = make_shape(torch.bfloat16)
    inputs = make_inputs(shape, 50)
    own = shape.kv.block_elements
    wide = empty_cache(shape, stride=own + 64)
    dense = empty_cache(shape)
    for cache in (wide, dense):
        run(pools[2], shape, inputs, cache)
    assert torch.equal(dense.nan_to_num(7e7), wide.nan_to_num(7e7))
    assert wide.as_strided((NUM_BLOCKS, 64), (own + 64, 1), own).isnan().all()


def test_wrong_tensors_are_refused(pools: dict[int, Pool]) -> None:
    """Rows of another width or dtype should be refused before their addresses reach C."""
    shape = make_shape(torch.bfloat16)
    qkv, *others = make_inputs(shape, 4)
    with pytest.raises(ValueError, match="are needed"):
        run(pools[1], shape, (qkv[:, 1:], *others), empty_cache(shape))
    with pytest.raises(ValueError, match="are needed"):
        run(pools[1], shape, (qkv, *others), empty_cache(shape).float())


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(("rows", "block_size", "head_size"), [(1, 16, 64), (63, 1, 16), (100, 24, 80), (9, 17, 256)])
def test_quantized_equals_torch(
    dtype: torch.dtype, rows: int, block_size: int, head_size: int, pools: dict[int, Pool]
) -> None:
    """Numbers, scales and queries should have the bits that torch gives them, and the rest stay; the extremes, too:
    zeros, what is nearly 0, numbers of all sizes, infinities, and NaN."""
    shape = make_shape(dtype, block_size=block_size, head_size=head_size, group=3)
    qkv, table, positions, slots = make_inputs(shape, rows)
    values = qkv[:, -2 * head_size :].unflatten(1, (2, head_size))
    values *= torch.logspace(-9, 9, rows)[:, None, None]
    values[::7, 0], values[1::7, 0], values[2::7, 0, 3] = 0.0, 1e-9, torch.inf
    values[3::7, 0, 5], values[4::7, 1] = torch.nan, 3e38
    values[::3, 1] *= torch.logspace(-6, 0, head_size)
    cache = torch.full((NUM_BLOCKS, shape.kv.block_elements), 0x55, dtype=torch.uint8)
    stale = cache.clone()
    query = run(pools[2], shape, (qkv, table, positions, slots), cache)

    parts = qkv.unflatten(1, (-1, head_size)).split([shape.heads, 2, 2], dim=1)
    expected_query = rotary_reference(parts[0], positions, table) * torch.tensor(SCALE * math.log2(math.e))
    assert torch.equal(expected_query, query)
    scales = unpack_scales(stale, shape.kv)
    key_cache, value_cache = unpack_blocks(stale, shape.kv)
    key = rotary_reference(parts[1], positions, table)
    kv_write_reference(key, parts[2], key_cache, value_cache, WriteSlots(slots, block_size), scales=scales)
    actual = (*unpack_blocks(cache, shape.kv), unpack_scales(cache, shape.kv))
    for ours, own in ((key_cache, actual[0]), (value_cache, actual[1])):
        assert torch.equal(ours.view(torch.uint8), own.view(torch.uint8))
    for ours, own in ((scales.key, actual[2].key), (scales.value, actual[2].value)):
        assert torch.equal(ours.nan_to_num(7e4), own.nan_to_num(7e4))
        assert torch.equal(ours.isnan(), own.isnan())


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_every_quantized_number_is_reached(dtype: torch.dtype, pools: dict[int, Pool]) -> None:
    """All numbers of the format, and what lies between neighbours, should be rounded as torch rounds them."""
    shape = make_shape(dtype, head_size=256, group=1)
    limit = LIMITS[dtype]
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.abs() <= limit].sort().values
    between = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat((grid, between, between.nextafter(between + 1), between.nextafter(between - 1)))
    numbers = F.pad(numbers, (0, -len(numbers) % 255), value=0.0).view(-1, 255)
    heads = F.pad(numbers, (0, 1), value=limit)  # the last number makes the scale 1
    qkv = torch.zeros(len(heads), shape.qkv_width)
    qkv[:, -256:] = heads
    slots, table = torch.arange(len(heads)), make_cos_sin(torch.zeros(128), 1)
    cache = torch.zeros((NUM_BLOCKS, shape.kv.block_elements), dtype=torch.uint8)
    run(pools[1], shape, (qkv, table, torch.zeros(len(heads), dtype=torch.int64), slots), cache)
    values = unpack_blocks(cache, shape.kv)[1].flatten(0, 1)[: len(heads), 1]
    assert torch.equal(quantize_kv(heads, dtype)[0].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.parametrize("head_size", [16, 48, 128])
def test_heads_are_normed_first(head_size: int, pools: dict[int, Pool]) -> None:
    """With weights for it, the heads of queries and keys should be normed before they are turned, and values not; a
    row's bits should not depend on the threads."""
    shape = make_shape(torch.float32, head_size=head_size)
    qkv, table, positions, slots = make_inputs(shape, 37)
    norms = HeadNorms(torch.rand(head_size) + 0.5, torch.rand(head_size) + 0.5, 1e-3)
    heads = qkv.unflatten(1, (-1, head_size)).clone()
    first_value = shape.heads + shape.kv.kv_heads
    heads[:, : shape.heads] = rms_norm_reference(heads[:, : shape.heads], norms.query, norms.eps)
    heads[:, shape.heads : first_value] = rms_norm_reference(heads[:, shape.heads : first_value], norms.key, norms.eps)
    expected = expected_of(shape, (heads.flatten(1), table, positions, slots))
    results = []
    for pool in pools.values():
        cache = empty_cache(shape)
        query = rotary_kv(
            pool, shape, qkv, cos_sin=table, cache=cache, scale=SCALE, positions=positions, slots=slots,
            head_norms=norms,
        )  # fmt: skip
        for actual, wanted in zip((query, *unpack_blocks(cache, shape.kv)), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        results.append((query, cache))
    for query, cache in results[1:]:
        assert torch.equal(query, results[0][0])
        assert torch.equal(cache.nan_to_num(), results[0][1].nan_to_num())

"""The C attention against the formula, and its promise that a row's bits depend on its own sequence only."""

from __future__ import annotations

import ctypes
import math
import mmap

import pytest
import torch
from torch import Tensor

from kernels.cpu.attention import SPLIT, AttentionShape, make_buffers, paged_attention, plan_bytes
from kernels.cpu.build import CpuKernelsUnavailable
from kernels.cpu.kv_cache import KvShape, pack_blocks, unpack_blocks, unpack_scales
from kernels.cpu.program import Pool
from kernels.kv_quantize import KvScales
from kernels.paged_attention import PagedBatch
from tests.kernels.cpu.attention_case import Case, make_case
from tests.kernels.cpu.conftest import Machine

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.int8: 1e-5, torch.float8_e4m3fn: 1e-5}
KEY_TILE = 128
SIZES = (1, 15, 16, 17, 63, 100, KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 300)
BLOCK_SIZES = (1, 8, 16, 24, 32)
# contexts and chunk lengths of one batch with decode rows, a whole prompt, later chunks, and contexts of several splits
CONTEXTS, LENGTHS = [200, 17, 130, 1, 2 * SPLIT + 3, 200, SPLIT, SPLIT + 20], [1, 1, 40, 1, 1, 200, 3, 30]


@pytest.fixture
def pools(machine: Machine) -> dict[int, Pool]:
    return machine.pools


@pytest.fixture
def pool(pools: dict[int, Pool]) -> Pool:
    return pools[2]


def check_against_reference(case: Case, pool: Pool) -> None:
    torch.testing.assert_close(case.run(pool), case.reference(), rtol=0, atol=TOLERANCE[case.keys.dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "block_size"), [*((g, 16) for g in (1, 3, 4, 8)), *((7, b) for b in BLOCK_SIZES)])
def test_equals_reference(dtype: torch.dtype, group: int, block_size: int, pool: Pool) -> None:
    """Decode rows, whole prompts and later chunks of all awkward sizes should equal the formula."""
    wholes, parts = [size if size < 150 else 20 for size in SIZES], [min((size + 1) // 2, 20) for size in SIZES]
    lengths = [*(1 for _ in SIZES), *wholes, *parts]
    check_against_reference(make_case([*SIZES] * 3, lengths, group=group, block_size=block_size, dtype=dtype), pool)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(dtype: torch.dtype, head_size: int, pool: Pool) -> None:
    """Every head size that is a multiple of 16 should work, with more heads a group than a tile has rows, too."""
    check_against_reference(make_case(CONTEXTS, LENGTHS, head_size=head_size, dtype=dtype), pool)
    check_against_reference(make_case([40, 3], [1, 3], head_size=head_size, kv_heads=1, group=71, dtype=dtype), pool)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("context", [SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT, 3 * SPLIT + 65])
def test_several_splits(dtype: torch.dtype, context: int, pool: Pool) -> None:
    """Contexts of about one split and of more should equal the formula, for a row and for some."""
    for length in (1, 5, 40):
        check_against_reference(make_case([context], [length], dtype=dtype), pool)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("context", [64, 2 * SPLIT + 40])
@pytest.mark.parametrize("length", [1, 5, 40])
def test_threads_change_no_bits(dtype: torch.dtype, context: int, length: int, pools: dict[int, Pool]) -> None:
    """One, two and three threads should give the same bits: alone (split among tiles) and in a batch."""
    for case in (
        make_case([context], [length], dtype=dtype),
        make_case([context, *CONTEXTS], [length, *LENGTHS], dtype=dtype),
    ):
        expected = case.run(pools[1])
        assert not expected.isnan().any()
        for num_threads in (2, 3):
            assert torch.equal(expected, case.run(pools[num_threads]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_alone_equals_in_a_batch(dtype: torch.dtype, group: int, pools: dict[int, Pool]) -> None:
    """A sequence should get the same bits alone and among others."""
    whole = make_case(CONTEXTS, LENGTHS, group=group, dtype=dtype)
    for i, together in enumerate(whole.run(pools[3]).split(LENGTHS)):
        assert torch.equal(together, whole.part(i, slice(None)).run(pools[2]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [1, 7])
def test_chunks_equal_the_whole(dtype: torch.dtype, group: int, pool: Pool) -> None:
    """The rows of a prompt should have the same bits in whatever chunks it is computed, one row at a time included."""
    context = SPLIT + 150
    case = make_case([context], [context], group=group, dtype=dtype)
    whole = case.run(pool)
    for chunk in (1, 7, 16, 100):
        for start in (*range(0, context, 5 * chunk + 61), SPLIT - 1, SPLIT, context - 1):
            rows = slice(start, min(start + chunk, context))
            assert torch.equal(whole[rows], case.part(0, rows).run(pool))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_blocks_may_lie_anywhere(dtype: torch.dtype, pool: Pool) -> None:
    """Another order of blocks, and other block sizes, read in place or copied, should give the same bits."""
    expected = make_case(CONTEXTS, LENGTHS, dtype=dtype).run(pool)
    assert torch.equal(expected, make_case(CONTEXTS, LENGTHS, dtype=dtype, shuffle_seed=9).run(pool))
    for block_size in (1, 3, 8, 17, 24, 32, 256):
        assert torch.equal(expected, make_case(CONTEXTS, LENGTHS, dtype=dtype, block_size=block_size).run(pool))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_later_keys_change_nothing(dtype: torch.dtype, pool: Pool) -> None:
    """A row should not see keys and values behind its own, however large."""
    case = make_case([100], [20], dtype=dtype)
    expected = case.run(pool)[:5]
    for position in range(85, 100):
        slot = case.batch.block_tables[0, position // 16], position % 16
        if case.scales is None:
            case.keys[slot], case.values[slot] = 1e30, -1e30
        else:
            case.scales.key[slot], case.scales.value[slot] = 65504.0, 65504.0
    assert torch.equal(expected, case.run(pool)[:5])


def test_weights_are_right_over_their_whole_range(pool: Pool) -> None:
    """With one-hot values the result is the weights themselves: 2^score / total, to some units in the last place from
    scores near the best to those 140 binary orders below it, and equal ones exactly so."""
    scores = torch.cat((torch.linspace(-140.0, 0.0, 60), torch.tensor([0.0, -1.0, -2.0, -126.0])))
    keys = torch.zeros(4, 16, 1, 64)
    keys[:, :, 0, 0] = scores.view(4, 16)
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 1.0
    batch = PagedBatch(torch.tensor([0, 1]), torch.tensor([64]), torch.arange(4)[None], 16)
    case = Case(query=query, keys=keys, values=torch.eye(64).view(4, 16, 1, 64), batch=batch)
    weights = case.run(pool)[0, 0]
    expected = torch.exp2(scores.double()) / torch.exp2(scores.double()).sum()
    torch.testing.assert_close(weights.double(), expected, rtol=4e-7, atol=2**-149)
    assert weights[59] == weights[60] == 2 * weights[61] == 4 * weights[62]


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_result_may_be_a_part_of_wider_rows(out_dtype: torch.dtype, pool: Pool) -> None:
    """Results should go where they belong, rounded to the result's dtype, and nothing should be written beside them or
    for rows that belong to no chunk."""
    case = make_case([40, 2 * SPLIT], [3, 1])
    wide = torch.full((4, 8 * 64 + 32), torch.nan, dtype=out_dtype)
    case.run(pool, wide[:, : 8 * 64])
    assert torch.equal(case.run(pool).to(out_dtype).flatten(1), wide[:, : 8 * 64])
    assert wide[:, 8 * 64 :].isnan().all()
    batch = PagedBatch(torch.tensor([0, 3]), *(x[:1] for x in (case.batch.context_lens, case.batch.block_tables)), 16)
    fewer = Case(query=case.query, keys=case.keys, values=case.values, batch=batch).run(pool)
    assert fewer[3].isnan().all()


def test_cache_may_be_larger_than_int32_counts(pool: Pool) -> None:
    """Offsets past 2³¹ elements should be computed in 64 bits (the pages between are never touched)."""
    case = make_case([300], [3], kv_heads=1, head_size=16)
    kv = KvShape(kv_heads=1, head_size=16, block_size=16, dtype=torch.bfloat16)
    blocks = pack_blocks(case.keys, case.values, kv)
    stride = 2**31 // (len(blocks) - 4)
    cache = torch.empty(stride * len(blocks), dtype=torch.bfloat16).view(len(blocks), stride)[:, : kv.block_elements]
    cache.copy_(blocks)
    out = torch.empty(3, 4 * 16)
    paged_attention(pool, AttentionShape(heads=4, kv=kv), case.query, cache=cache, batch=case.batch, out=out)
    assert torch.equal(case.run(pool), out.unflatten(1, (4, 16)))


def before_a_guarded_page(tensor: Tensor) -> Tensor:
    """A copy of `tensor` whose last byte is the last of a page; reading the next one ends the process."""
    num_bytes, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    size = -(-num_bytes // page) * page
    pages = torch.frombuffer(mmap.mmap(-1, size + page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(pages.data_ptr() + size), ctypes.c_size_t(page), 0) == 0
    made = pages[size - num_bytes : size].view(tensor.dtype).view(tensor.shape)
    return made.copy_(tensor)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("block_size", [1, 16, 17, 32])
def test_nothing_outside_the_cache_is_read(dtype: torch.dtype, head_size: int, block_size: int, pool: Pool) -> None:
    """A cache that fills its pages to the last byte should be read without a look beyond."""
    context = 2 * block_size + (block_size + 1) // 2
    case = make_case([context, context], [1, context], head_size=head_size, block_size=block_size, dtype=dtype)
    tables = case.batch.block_tables
    last = int(tables[tables < len(case.keys)].max())
    cache = before_a_guarded_page(case.pack()[: last + 1])
    out = torch.empty(len(case.query), 8 * head_size)
    paged_attention(pool, AttentionShape(heads=8, kv=case.kv), case.query, cache=cache, batch=case.batch, out=out)
    assert torch.equal(out, case.run(pool).flatten(1))


def test_no_room_for_splits_changes_no_bits(pools: dict[int, Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that needs more room for splits than there is should leave sequences whole, with the same bits."""
    case = make_case([4 * SPLIT, 3 * SPLIT], [1, 40])
    expected = case.run(pools[3])
    monkeypatch.setattr("kernels.cpu.attention._MIN_PARTIALS", 1)
    assert torch.equal(expected, case.run(pools[3]))


def test_plan_has_the_size_that_c_expects(machine: Machine) -> None:
    """Python's size of a plan should be C's."""
    size_in_c = machine.library.attention_plan_bytes
    size_in_c.restype, size_in_c.argtypes = ctypes.c_int64, (ctypes.c_int64, ctypes.c_int64)
    for max_rows, max_partials in ((1, 0), (8192, 1024), (3, 77)):
        assert size_in_c(max_rows, max_partials) == plan_bytes(max_rows, max_partials)


def test_memory_stays_bounded() -> None:
    """Buffers should have no part for splits where contexts have one, and a bounded one for very long contexts."""
    kv = KvShape(kv_heads=2, head_size=64, block_size=16, dtype=torch.bfloat16)
    shape = AttentionShape(heads=14, kv=kv)
    assert make_buffers(shape, 256, SPLIT).partial.numel() == 0
    assert make_buffers(shape, 4096, 131072).partial.numel() * 4 < 8 << 20


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_blocks_pack_and_unpack(dtype: torch.dtype, block_size: int) -> None:
    """Unpacking should give what was packed."""
    kv = KvShape(kv_heads=3, head_size=32, block_size=block_size, dtype=dtype)
    keys, values = (torch.randn(5, block_size, 3, 32).to(dtype) for _ in range(2))
    scales = KvScales(*torch.randn(2, 5, block_size, 3).half()) if kv.is_quantized else None
    packed = pack_blocks(keys, values, kv, scales)
    assert packed.shape == (5, kv.block_elements)
    for expected, actual in zip((keys, values), unpack_blocks(packed, kv), strict=True):
        assert torch.equal(expected.float(), actual.float())
    if scales is not None:
        found = unpack_scales(packed, kv)
        assert torch.equal(scales.key, found.key)
        assert torch.equal(scales.value, found.value)


def test_unknown_sizes_are_refused() -> None:
    """Head sizes and dtypes that the kernels lack, and heads that fit no group, should be refused with their values."""
    with pytest.raises(CpuKernelsUnavailable, match="72"):
        KvShape(kv_heads=2, head_size=72, block_size=16, dtype=torch.bfloat16)
    with pytest.raises(CpuKernelsUnavailable, match="272"):
        KvShape(kv_heads=2, head_size=272, block_size=16, dtype=torch.bfloat16)
    with pytest.raises(CpuKernelsUnavailable, match="float16"):
        KvShape(kv_heads=2, head_size=64, block_size=16, dtype=torch.float16)
    kv = KvShape(kv_heads=2, head_size=64, block_size=16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="7 heads"):
        AttentionShape(heads=7, kv=kv)
    with pytest.raises(ValueError, match="not of"):
        pack_blocks(torch.zeros(1, 16, 2, 32), torch.zeros(1, 16, 2, 32), kv)
    assert math.isclose(kv.block_bytes, 16 * 2 * 64 * 2 * 2)

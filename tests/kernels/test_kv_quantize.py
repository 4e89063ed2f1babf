"""What int8 and fp8 keep of keys and values, and that the cache holds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.kv_quantize import LIMITS, MAX_SCALE, KvScales, dequantize_kv, quantize_kv
from kernels.kv_write import WriteSlots, kv_write
from kernels.paged_attention import PagedBatch, paged_attention, paged_attention_reference

DTYPES = list(LIMITS)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALF_STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}
"""Most that a number can be off, over the head's largest."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 1e4])
def test_numbers_come_back(dtype: torch.dtype, scale: float) -> None:
    """Every number should come back to within half a step, the largest of a head to within fp16's rounding."""
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1)) * scale
    largest = x.abs().amax(-1, keepdim=True)
    error = (dequantize_kv(*quantize_kv(x, dtype)) - x).abs() / largest
    assert float(error.max()) <= HALF_STEP[dtype] * 1.01
    assert float((error * (x.abs() == largest)).max()) < 2**-10


def test_int8_rounds_ties_to_even() -> None:
    """With a scale of one, halves should go to the even neighbour."""
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.0, -127.0]])
    numbers, scales = quantize_kv(x, torch.int8)
    assert scales.tolist() == [1.0]
    assert numbers.tolist() == [[0, 2, 2, 0, -2, 126, 127, -127]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_heads(dtype: torch.dtype) -> None:
    """Zeros and what is nearly zero should give zeros; huge numbers the largest scale; NaN should stay NaN, and nothing
    should reach another head."""
    limit = LIMITS[dtype]
    x = torch.ones(6, 16)
    x[0], x[1] = 0.0, 1e-9
    x[2, 3], x[3, 3], x[4, 3] = 3e38, -torch.inf, torch.nan
    numbers, scales = quantize_kv(x, dtype)
    back = dequantize_kv(numbers, scales)
    assert not back[:2].any()
    assert scales[2:4].tolist() == [MAX_SCALE, MAX_SCALE]
    assert [back[2, 3].item(), back[3, 3].item()] == [limit * MAX_SCALE, -limit * MAX_SCALE]
    assert back[4].isnan().all()
    torch.testing.assert_close(back[5], x[5], rtol=2**-10, atol=0)


def empty_cache(num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, KvScales]:
    """Caches of two heads of 64 whose scales are NaN."""
    keys, values = (torch.full((num_blocks, block_size, 2, 64), 77, dtype=torch.int8).view(dtype) for _ in range(2))
    scales = torch.full((2, num_blocks, 2, block_size), torch.nan, dtype=torch.float16).transpose(2, 3)
    return keys, values, KvScales(scales[0], scales[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("float_dtype", FLOATS)
@pytest.mark.parametrize("block_size", [7, 16])
def test_attention_equals_the_formula(dtype: torch.dtype, float_dtype: torch.dtype, block_size: int) -> None:
    """Attention over what was written should equal the formula over what it comes back as, whatever stale slots hold;
    in float32 a row should have the same bits alone."""
    contexts, lengths = [1, 63, 100, block_size + 1, 300], [1, 1, 40, block_size + 1, 2]
    generator = torch.Generator().manual_seed(block_size)
    num_blocks = sum(-(-context // block_size) for context in contexts) + 2
    ids, tables = torch.randperm(num_blocks, generator=generator), torch.full((5, 300), 2**30, dtype=torch.int32)
    keys, values, scales = empty_cache(num_blocks, block_size, dtype)
    for i, context in enumerate(contexts):
        own, ids = ids[: -(-context // block_size)], ids[-(-context // block_size) :]
        tables[i, : len(own)] = own
        at = torch.arange(context)
        slots = WriteSlots(own[at // block_size] * block_size + at % block_size, block_size)
        key, value = torch.randn(2, context, 2, 64, generator=generator).to(float_dtype)
        kv_write(key, value, keys, values, slots, scales=scales)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    query = torch.randn(sum(lengths), 8, 64, generator=generator).to(float_dtype)
    batch = PagedBatch(starts, torch.tensor(contexts), tables, block_size)
    actual = paged_attention(query, keys, values, batch, 0.125, kv_scales=scales)
    expected = paged_attention_reference(query, keys, values, batch, 0.125, kv_scales=scales)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[float_dtype]
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    if float_dtype == torch.float32:
        alone = PagedBatch(torch.tensor([0, 1]), torch.tensor(contexts[1:2]), tables[1:2], block_size)
        assert torch.equal(actual[1:2], paged_attention(query[1:2], keys, values, alone, 0.125, kv_scales=scales))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_rows_are_not_written(dtype: torch.dtype) -> None:
    """A row without a slot should leave numbers and scales alone."""
    keys, values, scales = empty_cache(2, 4, dtype)
    row = torch.ones(3, 2, 64)
    kv_write(row, 2 * row, keys, values, WriteSlots(torch.tensor([-1, 6, -1]), 4), scales=scales)
    is_written = torch.zeros(2, 4, dtype=torch.bool)
    is_written[1, 2] = True
    for cache, own_scales in ((keys, scales.key), (values, scales.value)):
        assert torch.equal(is_written, ~own_scales.isnan().any(-1))
        assert bool((cache.view(torch.int8)[~is_written] == 77).all())


@pytest.mark.parametrize("cache_dtype", FLOATS)
def test_a_cache_of_another_float_dtype(cache_dtype: torch.dtype) -> None:
    """Keys and values should be rounded to the cache's dtype, and attention should read them as they are there."""
    key, value, query = torch.randn(3, 20, 2, 64, generator=torch.Generator().manual_seed(3))
    keys, values = (torch.full((2, 16, 2, 64), torch.nan, dtype=cache_dtype) for _ in range(2))
    kv_write(key, value, keys, values, WriteSlots(torch.arange(20), 16))
    batch = PagedBatch(torch.tensor([0, 1]), torch.tensor([20]), torch.tensor([[0, 1]]), 16)
    expected = paged_attention_reference(query[:1], keys, values, batch, 0.125)
    torch.testing.assert_close(paged_attention(query[:1], keys, values, batch, 0.125), expected, rtol=0, atol=1e-5)
    assert torch.equal(key.to(cache_dtype), keys.flatten(0, 1)[:20])

"""Bounds against figures that were worked out by hand."""

from __future__ import annotations

import pytest

from quire.bench import workloads
from quire.bench.bounds import STORAGES, Bounds
from quire.bench.limits import Limits
from quire.bench.model_shapes import SHAPES, ModelShape
from quire.bench.rows import lengths

SMALL = ModelShape(
    architecture="LlamaForCausalLM", hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=8,
    vocab_size=10, tokenizer_size=10, max_model_len=64, is_tied=True,
)  # fmt: skip
# A layer: q and o 4 × 4, k and v 4 × 2, gate, up and down 4 × 8: 144 weights; two layers 288; the head 40.
SLOW_MEMORY = Limits(threads=1, read_one=10, read=10, f32=1e9, bf16=1e9, int8=1e9)
SLOW_PRODUCTS = Limits(threads=1, read_one=1e9, read=1e9, f32=1, bf16=10, int8=20)


def test_weights_and_kv_are_counted() -> None:
    """Weights should be counted as they are stored; KV as keys and values of 16 bits."""
    assert Bounds(SMALL, STORAGES["bf16"], SLOW_MEMORY).weight_bytes == 2 * (288 + 40)
    assert Bounds(SMALL, STORAGES["int8"], SLOW_MEMORY).weight_bytes == 288 + 40
    assert Bounds(SMALL, STORAGES["int4"], SLOW_MEMORY).weight_bytes == 288 * 0.5625 + 40
    assert Bounds(SMALL, STORAGES["int8"], SLOW_MEMORY).kv_token_bytes == 2 * 2 * 2 * 2


def test_a_step_is_bound_by_memory_or_by_products() -> None:
    """A step should take the larger of reading everything once and of multiplying each row with everything."""
    slow_memory = Bounds(SMALL, STORAGES["bf16"], SLOW_MEMORY)
    assert slow_memory.step(3, 5) == pytest.approx((656 + 3 * 5 * 16) / 10)
    slow_products = Bounds(SMALL, STORAGES["int8"], SLOW_PRODUCTS)
    weights, attention = 3 * 2 * 328 / 20, 3 * 4 * 4 * 2 * 5 / 10
    assert slow_products.step(3, 5) == pytest.approx(weights + attention)


def test_a_prompt_needs_the_head_once() -> None:
    """All tokens should pass the layers, the last one of each prompt the head; half the prompt is the mean context."""
    bounds = Bounds(SMALL, STORAGES["bf16"], SLOW_PRODUCTS)
    layers = 2 * 288 * (6 + 2) / 10
    attention = (6 * 32 * 3 + 2 * 32 * 1) / 10
    head = 2 * 40 * 2 / 10
    assert bounds.prefill([6, 2]) == pytest.approx(layers + attention + head)


def test_a_wall_is_prompts_then_steps_of_whoever_is_left() -> None:
    """Each step should hold those that still need tokens, with the contexts they have then."""
    bounds = Bounds(SMALL, STORAGES["bf16"], SLOW_MEMORY)
    expected = bounds.prefill([4, 6]) + bounds.step(2, 6) + bounds.step(1, 6)
    assert bounds.wall([(4, 3), (6, 2)]) == pytest.approx(expected)
    assert bounds.time_per_output_token((4, 3)) == pytest.approx((bounds.step(1, 5) + bounds.step(1, 6)) / 2)


def test_known_machine_gives_the_known_bounds() -> None:
    """The 0.5B shape at 35.4 GB/s and 473 · 941 G operations/s should give the bounds that were published for it."""
    machine = Limits(threads=2, read_one=24e9, read=35.4e9, f32=238e9, bf16=473e9, int8=941e9)
    bf16, int8, int4 = (Bounds(SHAPES["q05b"], STORAGES[name], machine) for name in ("bf16", "int8", "int4"))
    assert [round(1000 * bf16.step(rows, 256), 1) for rows in (1, 8, 32)] == [28.0, 28.6, 68.3]
    assert [round(1000 * bounds.time_per_output_token((128, 128)), 1) for bounds in (int8, int4)] == [14.0, 9.6]
    assert (round(1000 * bf16.prefill([128])), round(bf16.prefill([2048]), 2)) == (203, 3.49)
    num_out = sum(request.max_tokens for request in workloads.build("w2").requests)
    assert [round(num_out / bounds.wall(lengths("w2"))) for bounds in (bf16, int8)] == [260, 509]

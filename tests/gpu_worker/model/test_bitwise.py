"""The CPU paths that promise it: a row's bits depend on its own tokens only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.runner import DecoderRunner
from tests.gpu_worker.model.plans import advance, generate, give_blocks, make_runner, make_sequence, plan_step

PROMPT_LEN = 150
PROMPT = [random.Random(5).randrange(500) for _ in range(PROMPT_LEN)]


def prompt_logits(
    runner: DecoderRunner, chunk_size: int, neighbours: list[Sequence], block_ids: list[int]
) -> torch.Tensor:
    """Logits after `PROMPT`, computed in chunks of `chunk_size` beside `neighbours`, which decode meanwhile."""
    sequence = make_sequence(PROMPT, block_ids=block_ids)
    while True:
        plan = plan_step([*neighbours[::2], sequence, *neighbours[1::2]], chunk_size)
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.is_sampling]
        if sequence in sampling:
            return runner.compute_logits(plan)[sampling.index(sequence)].clone()
        advance(runner, plan)


def own_blocks(runner: DecoderRunner, order: random.Random | None = None) -> list[int]:
    """Blocks at the end of the cache for `PROMPT`."""
    count = -(-(PROMPT_LEN + 32) // runner.block_size)
    ids = list(range(runner.num_blocks - count, runner.num_blocks))
    if order is not None:
        order.shuffle(ids)
    return ids


def make_neighbours(count: int, block_size: int) -> list[Sequence]:
    """Other prompts of mixed length."""
    draw = random.Random(count)
    neighbours = [make_sequence([draw.randrange(500) for _ in range(draw.randrange(1, 90))]) for _ in range(count)]
    give_blocks(neighbours, block_size, 300, draw)
    return neighbours


WAYS = ("float32 off", "float32 on", "bfloat16 on", "int8 on", "int4 on", "float32 off kv int8", "float32 off kv fp8",
        "float32 on kv int8", "bfloat16 on kv fp8", "int4 on kv int8")  # fmt: skip


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How it is computed: with torch (float32 only: README says what bfloat16 does there), and with the C kernels; and
    what keys and values are kept in."""
    precision, kernels, *cache = request.param.split()
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    settings = {"cpu_kernels": kernels, "kv_cache_dtype": cache[-1] if cache else "auto"}
    if precision in ("int8", "int4"):
        return settings | {"quantization": precision, "dtype": "bfloat16"}
    return settings | {"dtype": precision}


@pytest.fixture(scope="module")
def expected(llama_folder: Path, way: dict[str, Any]) -> torch.Tensor:
    """Logits of the prompt alone, at once, one thread, block size 16."""
    runner = make_runner(llama_folder, **way)
    return prompt_logits(runner, 512, [], own_blocks(runner))


@pytest.mark.parametrize(("num_threads", "block_size"), [(1, 8), (1, 16), (1, 32), (2, 16)])
def test_logits_do_not_depend_on_chunks(
    num_threads: int, block_size: int, llama_folder: Path, way: dict[str, Any], expected: torch.Tensor
) -> None:
    """Cutting a prompt into chunks of 1, 7, 16, 100 or not at all should give the same bits, in any blocks."""
    runner = make_runner(llama_folder, num_threads=num_threads, block_size=block_size, **way)
    order = random.Random(block_size)
    for chunk_size in (1, 7, 16, 100, 512) if num_threads == 1 else (7, 100, 512):
        assert torch.equal(expected, prompt_logits(runner, chunk_size, [], own_blocks(runner, order)))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_logits_do_not_depend_on_batch(
    num_threads: int, llama_folder: Path, way: dict[str, Any], expected: torch.Tensor
) -> None:
    """0 to 32 neighbours, prefilling and decoding, should not change a bit of a sequence's logits."""
    runner = make_runner(llama_folder, num_threads=num_threads, **way)
    for count in range(33) if num_threads == 1 else (1, 2, 4, 6, 8, 32):
        neighbours = make_neighbours(count, runner.block_size)
        assert torch.equal(expected, prompt_logits(runner, 50, neighbours, own_blocks(runner)))


def test_decode_does_not_depend_on_batch(qwen2_folder: Path, way: dict[str, Any]) -> None:
    """Decoding in batches of 1 to 33 should give the bits of decoding alone, at each step, for queries in groups."""
    runner = make_runner(qwen2_folder, **way)

    def decode(count: int) -> list[torch.Tensor]:
        sequence, steps = make_sequence(PROMPT[:20], block_ids=own_blocks(runner)), []
        batch = [*make_neighbours(count, runner.block_size), sequence]
        while sequence.num_output < 3:
            plan = plan_step(batch, 40)
            if plan.chunks[-1].sequence is sequence and plan.chunks[-1].is_sampling:
                steps.append(runner.compute_logits(plan)[-1].clone())
            advance(runner, plan)
        return steps

    alone = decode(0)
    for count in (1, 2, 3, 4, 6, 8, 15, 16, 31, 32):
        for mine, expected in zip(decode(count), alone, strict=True):
            assert torch.equal(expected, mine)


def test_seeded_sampling_does_not_depend_on_batch(llama_folder: Path, way: dict[str, Any]) -> None:
    """A seeded sequence should draw the same tokens alone, in a batch, and in other chunks."""
    runner = make_runner(llama_folder, **way)
    settings = {"seed": 11, "temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
    alone = make_sequence(PROMPT, block_ids=own_blocks(runner), **settings)
    (expected,) = generate(runner, [alone], 12)
    for count, chunk_size in ((5, 512), (12, 33)):
        again = make_sequence(PROMPT, block_ids=own_blocks(runner), **settings)
        batch = [*make_neighbours(count, runner.block_size), again]
        assert expected == generate(runner, batch, 12, chunk_size)[-1]


def test_resumed_sequence_goes_on_the_same(llama_folder: Path, way: dict[str, Any]) -> None:
    """A sequence that lost its blocks and is computed anew from its tokens should go on as if nothing had happened."""
    runner = make_runner(llama_folder, **way)
    settings = {"seed": 3, "temperature": 1.0, "frequency_penalty": 0.5, "choice": 2}
    undisturbed = make_sequence(PROMPT, block_ids=own_blocks(runner), **settings)
    (expected,) = generate(runner, [undisturbed], 16)
    resumed = make_sequence(PROMPT, block_ids=own_blocks(runner), **settings)
    generate(runner, [resumed], 6)
    resumed.num_computed = 0
    assert expected == generate(runner, [resumed], 16, chunk_size=60)[0]

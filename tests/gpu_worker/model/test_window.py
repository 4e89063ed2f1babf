"""Models whose layers see a window: the tokens are those of `transformers`, and what is freed changes no bit."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.runner import DecoderRunner
from gpu_worker.service import make_engine
from quire.bench.model_shapes import SHAPES
from quire.bench.random_model import write_random_model
from shared.clock import ManualClock
from shared.config import EngineConfig
from shared.errors import ConfigError
from shared.ids import RequestId
from shared.log import TokenEntry
from shared.messages import SamplingParams
from tests.gpu_worker.model.plans import give_blocks, make_runner, make_sequence, plan_step
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, reference

WINDOW, MAX_LEN, NUM_TOKENS = 40, 240, 20
PROMPT_LENS = (3, 39, 40, 41, 90, 200)
SHAPE = replace(SHAPES["test"], architecture="MistralForCausalLM", window=WINDOW)
MODELS = {
    "mistral": SHAPE,
    "qwen2": replace(SHAPES["test_qwen2"], window=WINDOW),
    "mixed": replace(SHAPES["test_qwen2"], window=WINDOW, num_full_layers=1),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windows")
    return {name: write_random_model(shape, root / name) for name, shape in MODELS.items()}


def make_prompts() -> list[list[int]]:
    """Several windows long, some with a beginning in common."""
    rng = random.Random(4)
    text = [rng.randrange(500) for _ in range(max(PROMPT_LENS))]
    return [[*text[: length - 2], rng.randrange(500), 7] for length in PROMPT_LENS]


def serve(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of each prompt, all served at the same time."""
    sampling = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0)
    for rank, prompt in enumerate(prompts):
        engine.add(
            Sequence(
                request_id=RequestId(f"r{rank}"), attempt=1, choice=0, rank=rank, token_ids=prompt,
                num_prompt_tokens=len(prompt), sampling=sampling,
            )
        )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for new in engine.step(lambda: True).entries:
            tokens[int(new.request_id[1:])] += [e.token_id for e in new.entries if isinstance(e, TokenEntry)]
        engine.check_integrity()
    return tokens


def load(folder: Path, num_blocks: int, **settings: Any) -> tuple[DecoderRunner, Engine]:
    """A runner with a pool of `num_blocks` blocks, and an engine over it as a worker makes it."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 24} | settings
    measured = make_runner(folder, max_model_len=MAX_LEN, **settings)
    num_bytes = num_blocks * int(measured.kv_bytes_per_token * measured.block_size)
    runner = make_runner(folder, max_model_len=MAX_LEN, **settings | {"kv_cache_memory_bytes": num_bytes})
    assert runner.num_blocks == num_blocks
    limits = EngineConfig(**settings)
    return runner, make_engine(runner, limits, max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k")


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize(("name", "num_blocks"), [("mistral", 11), ("qwen2", 11), ("mixed", 32)])
def test_greedy_equals_transformers(
    kernels: str, name: str, num_blocks: int, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Prompts several windows long, cut into chunks, found in the prefix cache and, where blocks are freed, evicted in
    a pool that holds fewer tokens than the longest of them has, should get the tokens they get alone there."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    runner, engine = load(folders[name], num_blocks, block_size=8, cpu_kernels=kernels)
    prompts = make_prompts()
    first = serve(engine, prompts)
    for prompt, output in zip(prompts, first, strict=True):
        assert_same_tokens(*reference(folders[name], prompt, NUM_TOKENS), output)
    assert serve(engine, prompts) == first
    view = engine.view()
    assert view.num_prefix_hits > 0
    if name != "mixed":
        assert view.num_evictions > 0
        assert runner.num_blocks * runner.block_size < max(PROMPT_LENS)


@pytest.mark.parametrize(
    "way", ["float32 off auto", "float32 on auto", "bfloat16 on auto", "float32 off int8", "bfloat16 on fp8"]
)
@pytest.mark.parametrize("name", ["mistral", "mixed"])
def test_logits_do_not_depend_on_chunks_or_what_was_freed(
    way: str, name: str, folders: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """Any chunks, block sizes, neighbours and threads should give the same bits, with all blocks kept and with those
    that fell out of the window in the hands of others."""
    dtype, kernels, cache = way.split()
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    prompt, expected = make_prompts()[-1], None
    for chunk_size, block_size, is_freed in ((512, 16, False), (7, 8, False), (50, 16, True), (1, 8, True)):
        runner = make_runner(
            folders[name], dtype=dtype, cpu_kernels=kernels, kv_cache_dtype=cache, block_size=block_size,
            num_threads=1 + is_freed,
        )  # fmt: skip
        torch.set_num_threads(1)
        logits = prompt_logits(runner, prompt, chunk_size, is_freed=is_freed and name == "mistral")
        expected = logits if expected is None else expected
        assert torch.equal(expected, logits)


def prompt_logits(runner: DecoderRunner, prompt: list[int], chunk_size: int, *, is_freed: bool) -> torch.Tensor:
    """Logits behind `prompt` beside a neighbour, which with `is_freed` owns and has written each block that fell out of
    the window."""
    sequence, neighbour = make_sequence(prompt), make_sequence([5, *prompt])
    give_blocks([sequence, neighbour], runner.block_size, len(prompt) + 1, random.Random(block := runner.block_size))
    own = list(sequence.block_ids)
    while True:
        plan = plan_step([sequence, neighbour], chunk_size)
        if is_freed:
            first = max(0, sequence.num_computed - WINDOW + 1) // block
            taken, sequence.block_ids = own[:first], [neighbour.block_ids[0]] * first + own[first:]
            for cache in runner._cache._layers:
                cache.view(torch.uint8)[taken] = 255  # NaN in every float dtype
        if plan.chunks[0].is_sampling:
            return runner.compute_logits(plan)[0].clone()
        runner.run(plan)
        for chunk in plan.chunks:
            chunk.sequence.num_computed += chunk.length


def test_what_windows_are_good_for_is_said(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    """A line at the start should say whether blocks before the window are freed."""
    caplog.set_level(logging.INFO)
    assert make_runner(folders["mistral"]).window == WINDOW
    assert "blocks before the window" in caplog.text
    caplog.clear()
    assert make_runner(folders["mixed"]).window == 0
    assert "nothing: other layers see the whole context" in caplog.text


def test_swap_is_refused_where_blocks_are_freed(folders: dict[str, Path]) -> None:
    """A worker should say at its start that a model with a window does not swap; one that frees nothing may."""
    with pytest.raises(
        ConfigError, match=r"--swap-space=0\.01: not for a model that frees blocks before its window of 40"
    ):
        make_runner(folders["mistral"], max_model_len=MAX_LEN, swap_space=0.01)
    assert make_runner(folders["mixed"], max_model_len=MAX_LEN, swap_space=0.01).host_memory is not None

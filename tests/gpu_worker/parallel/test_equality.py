"""Several ranks compute what one does: the same tokens in float32, through the whole engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model.runner import DecoderRunner
from gpu_worker.model.split import Split
from gpu_worker.service import make_engine
from quire.bench.model_shapes import SHAPES
from quire.bench.random_model import write_random_model
from shared.clock import ManualClock
from shared.config import EngineConfig
from tests.gpu_worker.model import test_embeddings as embeddings
from tests.gpu_worker.model import test_swap as swap
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.test_speculation import make_taciturn
from tests.gpu_worker.model.test_window import prompt_logits, serve
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model
from tests.gpu_worker.parallel.team_of_threads import ranks_of

MAX_LEN, NUM_BLOCKS = 160, 21
LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": 8}
SMOLLM2 = replace(SHAPES["test"], hidden_size=576, num_heads=9, num_kv_heads=3, intermediate_size=1536,
                  vocab_size=1000, is_tied=True)  # fmt: skip
"""Its sizes, but for fewer layers and ids, of which three ranks have 334, 334 and 332."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {name: write_tiny_model(config, root / name) for name, config in FAMILIES.items()}
    biased = replace(SHAPES["test_qwen2"], num_kv_heads=2)
    return models | {
        "smollm2": write_random_model(SMOLLM2, root / "smollm2"),
        "qwen2": write_random_model(biased, root / "qwen2"),
    }


def _prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(300) for _ in range(length)] for length in (3, 41, 90, 130)]


def _settings(folder: Path, **settings: Any) -> dict[str, Any]:
    """Such that a cache of all ranks together has `NUM_BLOCKS` blocks, 168 tokens: some are evicted."""
    whole = make_runner(folder, cpu_kernels="off", max_model_len=MAX_LEN, **LIMITS | settings)
    num_bytes = NUM_BLOCKS * int(whole.kv_bytes_per_token * whole.block_size)
    return {"cpu_kernels": "off", "max_model_len": MAX_LEN, "kv_cache_memory_bytes": num_bytes} | LIMITS | settings


def _serve(runner: DecoderRunner) -> tuple[list[list[int]], int]:
    """What the engine draws for all prompts at once, and how many it evicted."""
    engine = make_engine(runner, EngineConfig(**LIMITS), max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k")
    return serve(engine, _prompts()), engine.view().num_evictions


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in FAMILIES), ("qwen2", 2), ("smollm2", 3)])
def test_ranks_draw_what_one_draws(name: str, size: int, folders: dict[str, Path]) -> None:
    """Every family, cut into chunks, batched, and evicted from a small pool should have the tokens of one rank, and a
    cache of as many blocks in the same memory."""
    settings = _settings(folders[name])
    expected, _ = _serve(make_runner(folders[name], **settings))
    with ranks_of(folders[name], size, **settings) as (runner, parts):
        tokens, num_evictions = _serve(runner)
    assert tokens == expected
    assert num_evictions > 0
    assert all(len(set(output)) > 4 for output in tokens), "a text that repeats itself shows little"
    assert [part.cache.num_blocks for part in parts] == [NUM_BLOCKS] * size


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_more_ranks_than_key_heads_share_them(name: str, folders: dict[str, Path]) -> None:
    """Four ranks over two key heads should each have one, twice the memory in all, and draw the same."""
    settings = _settings(folders[name])
    expected, _ = _serve(make_runner(folders[name], **settings))
    settings["kv_cache_memory_bytes"] *= 2
    with ranks_of(folders[name], 4, **settings) as (runner, parts):
        assert _serve(runner)[0] == expected
    assert [part.cache.keys(0).shape[2] for part in parts] == [1] * 4
    assert [part.cache.num_blocks for part in parts] == [NUM_BLOCKS] * 4


def test_swapped_blocks_come_back_on_all_ranks(llama_folder: Path, tmp_path: Path) -> None:
    """With prefix cache, samples, drafts, and preemption by swap and by recompute in a tiny pool, each request should
    give the tokens that it gives alone on one rank."""
    folder = make_taciturn(llama_folder, tmp_path / "llama")
    whole = swap.load(folder, cpu_kernels="off")
    expected, _ = swap.serve(swap.make_engine(whole, is_disturbed=False), together=1)
    settings: dict[str, Any] = {
        "cpu_kernels": "off", "block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 40,
        "max_model_len": swap.MAX_MODEL_LEN, "speculative_config": swap.CONFIG,
        "kv_cache_memory_bytes": swap.NUM_BLOCKS * whole._cache.block_bytes,
        "swap_space": (swap.NUM_SWAP_BLOCKS + 0.5) * whole._cache.block_bytes / 2**30,
    }  # fmt: skip
    with ranks_of(folder, 2, **settings) as (runner, _):
        engine = swap.make_engine(runner, is_disturbed=True)
        tokens, view = swap.serve(engine, together=swap.NUM_REQUESTS)
        drafted, drafts = swap.serve(
            swap.make_engine(runner, is_disturbed=True, is_drafting=True), together=swap.NUM_REQUESTS
        )
    assert tokens == drafted == expected
    assert view.num_swapped_in >= 5
    assert view.num_prefix_hits > 100
    assert view.free_swap_blocks == swap.NUM_SWAP_BLOCKS
    assert drafts.num_draft_tokens > 0


def test_bits_do_not_depend_on_chunks(folders: dict[str, Path]) -> None:
    """Of three ranks in float32, too, logits should be the same bits however a prompt is cut."""
    prompt = _prompts()[-1]
    with ranks_of(folders["smollm2"], 3, cpu_kernels="off", block_size=8, max_model_len=MAX_LEN) as (runner, _):
        logits = [prompt_logits(runner, prompt, size, is_freed=False) for size in (512, 7, 50)]
    assert logits[0].shape == (1000,)
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}]
)
@pytest.mark.parametrize(("name", "size"), [("smollm2", 3), ("qwen3_moe", 2), ("phi3", 2)])
def test_other_precisions_are_near(name: str, size: int, other: dict[str, str], folders: dict[str, Path]) -> None:
    """In bfloat16, with weights quantized at load (each rank its part) and with a quantized cache logits should be
    about as far from those in float32 as those of one rank are."""
    prompt = _prompts()[1]
    settings: dict[str, Any] = {"cpu_kernels": "off", "block_size": 8, "max_model_len": MAX_LEN}
    exact = prompt_logits(make_runner(folders[name], **settings), prompt, 16, is_freed=False)
    near = prompt_logits(make_runner(folders[name], **settings | other), prompt, 16, is_freed=False)
    with ranks_of(folders[name], size, **settings | other) as (runner, _):
        logits = prompt_logits(runner, prompt, 16, is_freed=False)
    assert (logits - exact).norm() < 1.5 * (near - exact).norm()


def test_embeddings_are_those_of_one_rank(folders: dict[str, Path]) -> None:
    """Prompts in chunks, beside others that generate, should give what one rank gives, whatever runs beside."""
    settings: dict[str, Any] = {"cpu_kernels": "off", "max_num_seqs": 8, "max_num_batched_tokens": 24}
    asking = [embeddings.make_sequence(f"e{i}", p, i, is_pooled=True) for i, p in enumerate(embeddings.prompts())]
    expected = embeddings.serve(make_runner(folders["smollm2"], **settings), asking)
    with ranks_of(folders["smollm2"], 3, **settings) as (runner, _):
        for beside in (0, 3):
            sequences = [
                embeddings.make_sequence(f"{kind}{i}", prompt, 9 * is_pooled + i, is_pooled=is_pooled)
                for kind, is_pooled, count in (("w", False, beside), ("e", True, len(asking)))
                for i, prompt in enumerate(embeddings.prompts()[:count])
            ]
            found = embeddings.serve(runner, sequences)
            for name, entries in expected.items():
                vector = embeddings.vector_of(found[name])
                torch.testing.assert_close(vector, embeddings.vector_of(entries), rtol=0, atol=2e-6)


def test_each_rank_holds_its_part(folders: dict[str, Path]) -> None:
    """The weights of the ranks should add up to those of one, but for norms."""
    with ranks_of(folders["smollm2"], 3, cpu_kernels="off", max_model_len=MAX_LEN) as (_, parts):
        own = [part.decoder.model._layers[0]._attention for part in parts]  # type: ignore[attr-defined]
    sizes = [attention._qkv._weight.out_features for attention in own]
    assert sizes == [(9 + 2 * 3) // 3 * 64] * 3
    ids = [Split(rank, 3).vocabulary_share(1000).own for rank in range(3)]
    assert [len(part.decoder.model._embedding) for part in parts] == list(map(len, ids)) == [334, 334, 332]  # type: ignore[attr-defined]
    assert [(r.start, r.stop) for r in ids] == [(0, 334), (334, 668), (668, 1000)]


def test_the_size_is_part_of_the_arithmetic(folders: dict[str, Path]) -> None:
    """Sums of two ranks differ in their last bits, so no sequence should move between workers of one and two."""
    one = make_runner(folders["qwen2"], cpu_kernels="off")
    with ranks_of(folders["qwen2"], 2, cpu_kernels="off") as (two, _):
        assert one.fingerprint != two.fingerprint

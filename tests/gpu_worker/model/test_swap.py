"""A real model under everything at once: what was swapped, shared, cut, forked or computed again changes no token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.view import EngineView
from gpu_worker.model.runner import DecoderRunner
from shared.ids import RequestId
from shared.log import TokenEntry
from shared.messages import SamplingParams
from shared.speculation import parse_speculative_config
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, reference
from tests.gpu_worker.model.test_speculation import CONFIG, NUM_WORDS, make_taciturn

NUM_REQUESTS = 10
MAX_MODEL_LEN = 96
NUM_BLOCKS = 14
NUM_SWAP_BLOCKS = 6

Tokens = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def llama(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It says few words, and so repeats itself: there are drafts."""
    return make_taciturn(llama_folder, tmp_path_factory.mktemp("taciturn") / "llama")


def make_requests() -> list[list[Sequence]]:
    """Cuts of two texts, which repeat themselves, with tails of their own; each third has two samples, each fourth is
    not drawn greedily."""
    rng = random.Random(3)
    texts = [4 * [rng.randrange(NUM_WORDS) for _ in range(15)] for _ in range(2)]
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = texts[number % 2][: rng.randrange(61)] + [rng.randrange(NUM_WORDS) for _ in range(rng.choice((1, 4)))]
        sampling = SamplingParams(seed=number, max_tokens=rng.randint(20, 32), temperature=0.8 * (number % 4 == 3))
        requests.append(
            [
                Sequence(request_id=RequestId(f"r{number}"), attempt=1, choice=choice, rank=number, token_ids=prompt,
                         num_prompt_tokens=len(prompt), sampling=sampling)
                for choice in range(2 if number % 3 == 0 else 1)
            ]
        )  # fmt: skip
    return requests


def make_engine(runner: DecoderRunner, *, is_disturbed: bool, is_drafting: bool = False) -> Engine:
    """With everything on, or nothing."""
    return Engine(
        runner, max_model_len=MAX_MODEL_LEN, max_num_seqs=6, max_num_batched_tokens=40, has_prefix_cache=is_disturbed,
        host_memory=runner.host_memory if is_disturbed else None, preemption_mode="swap",
        speculation=parse_speculative_config(CONFIG if is_drafting else ""),
    )  # fmt: skip


def serve(engine: Engine, together: int) -> tuple[Tokens, EngineView]:
    """Tokens of all requests of which `together` are there at the same time, and one, now and then, is set aside if
    these are several."""
    rng, coming, tokens = random.Random(1), make_requests(), Tokens()
    while coming or engine.has_work:
        while coming and engine.view().num_held < together:
            for sequence in coming.pop(0):
                engine.add(sequence)
        if together > 1 and rng.random() < 0.2:
            engine.preempt(RequestId(f"r{rng.randrange(NUM_REQUESTS)}"), keeps=True)
        for new in engine.step(lambda: True).entries:
            drawn = tokens.setdefault((new.request_id, new.choice), [])
            drawn += [entry.token_id for entry in new.entries if isinstance(entry, TokenEntry)]
        engine.check_integrity()
    return tokens, engine.view()


def load(folder: Path, **settings: object) -> DecoderRunner:
    """A runner whose cache and host memory have few blocks, whatever these take."""
    block_bytes = make_runner(folder, block_size=8, **settings)._cache.block_bytes  # type: ignore[arg-type]
    return make_runner(
        folder, block_size=8, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=MAX_MODEL_LEN,
        speculative_config=CONFIG, kv_cache_memory_bytes=NUM_BLOCKS * block_bytes,
        swap_space=(NUM_SWAP_BLOCKS + 0.5) * block_bytes / 2**30,
        **settings,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernels", "dtype", "kv_dtype", "is_drafting"),
    [
        ("off", "float32", "auto", False),
        ("off", "float32", "int8", True),
        ("transformers", "float32", "auto", False),
        ("transformers", "float32", "fp8", True),
        ("on", "float32", "auto", False),
        ("on", "float32", "auto", True),
        ("on", "float32", "int8", False),
        ("on", "float32", "bf16", True),
        ("on", "bfloat16", "auto", False),
    ],
)
def test_tokens_should_be_those_of_an_undisturbed_run(
    kernels: str, dtype: str, kv_dtype: str, llama: Path, request: pytest.FixtureRequest, *, is_drafting: bool
) -> None:
    """With prefix cache, chunking, samples, preemption by swap and by recompute and drafts in a tiny pool, each request
    should give the tokens that it gives alone, and in float32 those of `transformers`."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    way = {"model_impl": kernels} if kernels == "transformers" else {"cpu_kernels": kernels}
    runner = load(llama, dtype=dtype, kv_cache_dtype=kv_dtype, **way)
    expected, _ = serve(make_engine(runner, is_disturbed=False), together=1)
    tokens, view = serve(make_engine(runner, is_disturbed=True, is_drafting=is_drafting), together=NUM_REQUESTS)
    assert tokens == expected
    assert view.num_swapped_in >= 5
    assert view.num_preemptions - view.num_swap_preemptions >= 3
    assert view.num_prefix_hits > 100
    assert view.num_evictions >= 3
    assert (view.num_draft_tokens > 0) == is_drafting
    assert (view.free_swap_blocks, view.free_blocks) == (NUM_SWAP_BLOCKS, NUM_BLOCKS)
    assert view.block_copy_s > 0.0
    if (dtype, kv_dtype) == ("float32", "auto") and not is_drafting:
        for sequences in make_requests()[:2]:
            prompt, sampling = sequences[0].token_ids, sequences[0].sampling
            wanted = reference(llama, prompt, sampling.max_tokens)
            for sequence in sequences:
                assert_same_tokens(*wanted, tokens[sequence.request_id, sequence.choice])


def test_a_wrong_copy_should_change_tokens(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a block came back with other bits, the tokens of the test above would not be the same: it can fail."""
    runner = load(llama_folder, cpu_kernels="off")
    expected, _ = serve(make_engine(runner, is_disturbed=False), together=1)
    memory = runner.host_memory
    assert memory is not None
    copy = memory.copy

    def copy_and_spoil(copies: list[object]) -> None:
        copy(copies)  # type: ignore[arg-type]
        memory._host[:, 0] = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(memory, "copy", copy_and_spoil)
    tokens, _ = serve(make_engine(runner, is_disturbed=True), together=NUM_REQUESTS)
    assert tokens != expected

"""Speculation on real models: drafts are computed, some are right, and the tokens are those of single steps."""

from __future__ import annotations

import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.engine.view import EngineView
from gpu_worker.model.runner import DecoderRunner
from shared.log import TokenEntry
from shared.messages import SamplingParams
from shared.speculation import parse_speculative_config
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, reference

CONFIG = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
NUM_WORDS = 5
NUM_TOKENS = 40
KV_BYTES = 16 << 20
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.2, "seed": 3},
    {"temperature": 0.5, "top_k": 2, "seed": 4},
    {"temperature": 0.3, "top_p": 0.7, "seed": 5, "num_logprobs": 2},
    {"temperature": 0.0, "logit_bias": ((1, 0.05),)},
    {"temperature": 0.3, "seed": 6, "min_tokens": 9, "stop_token_ids": (0, 2)},
    {"temperature": 0.2, "seed": 8, "repetition_penalty": 1.2},
)


def make_prompts(count: int) -> list[list[int]]:
    """Prompts of 30 to 90 tokens that say the same few tokens again and again."""
    rng = random.Random(11)
    phrases = [[rng.randrange(NUM_WORDS) for _ in range(rng.randint(3, 9))] for _ in range(count)]
    return [(phrase * 30)[: rng.randint(30, 90)] for phrase in phrases]


def make_taciturn(folder: Path, target: Path) -> Path:
    """The model in `folder`, but it hardly ever says another token than the first `NUM_WORDS`: random weights repeat
    themselves only where there is little to say."""
    shutil.copytree(folder, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        for name in {"model.embed_tokens.weight", "lm_head.weight"} & tensors.keys():
            tensors[name][NUM_WORDS:] *= 0.02
        save_file(tensors, file, metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def llama(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_taciturn(llama_folder, tmp_path_factory.mktemp("taciturn") / "llama")


@pytest.fixture(scope="module")
def qwen2(qwen2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_taciturn(qwen2_folder, tmp_path_factory.mktemp("taciturn") / "qwen2")


def generate(
    runner: DecoderRunner, prompts: list[list[int]], samplings: list[dict[str, Any]], config: str, **engine: Any
) -> tuple[list[list[TokenEntry]], EngineView]:
    """What each prompt draws, all of them in one engine, and how the engine stands at its end."""
    settings = {"max_num_seqs": 64, "max_num_batched_tokens": 64} | engine
    speculation = parse_speculative_config(config)
    stepped = Engine(runner, max_model_len=runner.max_model_len, speculation=speculation, **settings)
    for rank, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        params = SamplingParams(**{"seed": 1, "max_tokens": NUM_TOKENS} | sampling)
        stepped.add(
            Sequence(
                request_id=f"r{rank}", attempt=1, choice=0, rank=rank, token_ids=prompt,  # type: ignore[arg-type]
                num_prompt_tokens=len(prompt), sampling=params,
            )
        )  # fmt: skip
    entries: dict[str, list[TokenEntry]] = defaultdict(list)
    while stepped.has_work:
        output = stepped.step()
        assert not output.failed
        stepped.check_integrity()
        for new in output.entries:
            entries[new.request_id] += [entry for entry in new.entries if isinstance(entry, TokenEntry)]
    return [entries[f"r{rank}"] for rank in range(len(prompts))], stepped.view()


@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_greedy_equals_transformers(kernels: str, name: str, request: pytest.FixtureRequest) -> None:
    """Prompts that repeat themselves should get the tokens they get alone there, several in a step."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    folder: Path = request.getfixturevalue(name)
    prompts = make_prompts(6)
    runner = make_runner(folder, cpu_kernels=kernels, speculative_config=CONFIG)
    outputs, view = generate(runner, prompts, [{"temperature": 0.0}] * len(prompts), CONFIG)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(*reference(folder, prompt, NUM_TOKENS), [entry.token_id for entry in output])
    assert view.num_accepted_tokens > 50


@pytest.mark.parametrize("way", ["float32 off", "float32 on", "bfloat16 on", "int8 on", "int4 on"])
def test_tokens_and_logprobs_are_those_of_single_steps(way: str, llama: Path, request: pytest.FixtureRequest) -> None:
    """Greedy and seeded, with filters, bias, logprobs, bans and penalties, in a batch: what is drawn should be the same
    to the bit with and without speculation, also where sequences are evicted and computed again."""
    precision, kernels = way.split()
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    settings = {"quantization": precision, "dtype": "bfloat16"} if precision.startswith("int") else {"dtype": precision}
    samplings = [*SAMPLINGS] * 2
    prompts = make_prompts(len(samplings))
    runner = make_runner(
        llama, cpu_kernels=kernels, speculative_config=CONFIG, kv_cache_memory_bytes=KV_BYTES, **settings
    )
    expected, _ = generate(runner, prompts, samplings, "")
    drafted, view = generate(runner, prompts, samplings, CONFIG)
    assert drafted == expected
    assert view.num_accepted_tokens > 50

    small = make_runner(
        llama, cpu_kernels=kernels, speculative_config=CONFIG, max_model_len=160,
        kv_cache_memory_bytes=KV_BYTES * 13 // runner.num_blocks, **settings,
    )  # fmt: skip
    drafted, view = generate(small, prompts, samplings, CONFIG, max_num_batched_tokens=48)
    assert drafted == expected
    assert view.num_evictions > 0
    assert view.num_accepted_tokens > 50

"""Every model family against `transformers`, token for token, through the whole engine."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker.engine.engine import Engine
from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.llama import Llama
from gpu_worker.model.runner import DecoderRunner
from gpu_worker.service import make_engine
from shared.clock import ManualClock
from shared.config import EngineConfig
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import make_runner
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, greedy_tokens
from tests.gpu_worker.model.test_window import prompt_logits, serve
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model

BLOCK_SIZE, MAX_LEN, NUM_TOKENS = 8, 160, 20
PROMPT_LENS = (3, 41, 90, 130)
LONG_PROMPT_LENS = (66, 70, 100, 130)
"""For longrope: long from the start. transformers changes its mind where a text gets long."""
NUM_BLOCKS = 21
"""168 tokens of 344: some are evicted."""
ON_TORCH_ONLY = {
    "gemma2": "Gemma2.* has softcaps",
}
ON_C = ("phi3", "phi4_mini", "qwen3", "gemma3", "mixtral", "qwen3_moe")


class Families:
    """The tiny models and what `transformers` draws from them, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._expected: dict[str, list[tuple[list[int], list[float]]]] = {}

    def folder(self, name: str) -> Path:
        path = self._root / name
        return path if path.exists() else write_tiny_model(FAMILIES[name], path)

    def expected(self, name: str) -> list[tuple[list[int], list[float]]]:
        if name not in self._expected:
            model = AutoModelForCausalLM.from_pretrained(
                self.folder(name), dtype=torch.float32, attn_implementation="eager"
            )
            self._expected[name] = [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in prompts_of(name)]
        return self._expected[name]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))


def prompts_of(name: str) -> list[list[int]]:
    rng = random.Random(11)
    lengths = LONG_PROMPT_LENS if name == "phi4_mini" else PROMPT_LENS
    return [[rng.randrange(300) for _ in range(length)] for length in lengths]


def load(folder: Path, *, model_impl: str = "auto", **settings: Any) -> tuple[DecoderRunner, Engine]:
    """A runner with a pool of `NUM_BLOCKS` blocks, and an engine over it as a worker makes it."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE} | settings
    model = {"max_model_len": MAX_LEN, "model_impl": model_impl}
    measured = make_runner(folder, **model, **settings)
    num_bytes = NUM_BLOCKS * int(measured.kv_bytes_per_token * BLOCK_SIZE)
    runner = make_runner(folder, **model, **settings | {"kv_cache_memory_bytes": num_bytes})
    return runner, make_engine(
        runner, EngineConfig(**settings), max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k"
    )


@pytest.mark.parametrize(("name", "kernels"), [(name, "off") for name in FAMILIES] + [(name, "on") for name in ON_C])
def test_greedy_equals_transformers(
    name: str, kernels: str, families: Families, request: pytest.FixtureRequest
) -> None:
    """Prompts cut into chunks, batched, and evicted from a small pool should get the tokens they get alone there."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    runner, engine = load(families.folder(name), cpu_kernels=kernels)
    assert isinstance(runner._model, CpuDecoder) == (kernels == "on")
    outputs = serve(engine, prompts_of(name))
    for expected, output in zip(families.expected(name), outputs, strict=True):
        assert len(set(output)) > 4, "a text that repeats itself shows little"
        assert_same_tokens(*expected, output)
    assert engine.view().num_evictions > 0


@pytest.mark.parametrize("name", ON_TORCH_ONLY)
def test_torch_computes_what_the_kernels_do_not(
    name: str, families: Families, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the CPU kernels do not fit a family, `auto` should say why and take torch, and `on` refuse."""
    folder = families.folder(name)
    assert isinstance(make_runner(folder, cpu_kernels="auto")._model, Llama)
    assert re.search(f"kernels.unavailable .*{ON_TORCH_ONLY[name]}.*instead=torch", caplog.text)
    with pytest.raises(ConfigError, match=f"--cpu-kernels=on: .*{ON_TORCH_ONLY[name]}.*; the CPU kernels have not"):
        make_runner(folder, cpu_kernels="on")


@pytest.mark.parametrize("name", FAMILIES)
def test_bits_do_not_depend_on_chunks(name: str, families: Families) -> None:
    """On the torch path in float32 logits should be the same bits however a prompt is cut and whoever runs beside;
    in bfloat16, and with int8 weights, they should be near."""
    prompt = prompts_of(name)[-1]
    settings: dict[str, Any] = {"cpu_kernels": "off", "max_model_len": MAX_LEN}
    runner = make_runner(families.folder(name), block_size=BLOCK_SIZE, **settings)
    expected = prompt_logits(runner, prompt, 512, is_freed=False)
    assert torch.equal(expected, prompt_logits(runner, prompt, 7, is_freed=False))
    for other in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        logits = prompt_logits(make_runner(families.folder(name), **settings, **other), prompt, 512, is_freed=False)
        assert torch.cosine_similarity(expected, logits, dim=0) > 0.9


def test_shards_of_experts_are_read(families: Families, tmp_path: Path) -> None:
    """A checkpoint in several files should give the tokens of one in a single file."""
    folder = write_tiny_model(FAMILIES["mixtral"], tmp_path / "sharded", max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    _, engine = load(folder, cpu_kernels="off")
    _, whole = load(families.folder("mixtral"), cpu_kernels="off")
    prompts = prompts_of("mixtral")[:2]
    assert serve(whole, prompts) == serve(engine, prompts)

"""Quantized checkpoints in every format, against `transformers` on the floats that their integers stand for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.service import make_engine
from shared.clock import ManualClock
from shared.config import EngineConfig
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence, plan_step
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, greedy_tokens
from tests.gpu_worker.model.test_window import serve
from tests.gpu_worker.model.tiny_families import FAMILIES, SIZES
from tests.gpu_worker.quant.checkpoints import FORMS, awq, gptq, write_quantized

PROMPT = [random.Random(4).randrange(300) for _ in range(50)]
NUM_TOKENS, MAX_LEN, BLOCK_SIZE = 12, 100, 8
QWEN2 = SIZES | {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128}
OTHERS = {
    "qwen2": (QWEN2, awq(32)),
    "phi4_mini": (FAMILIES["phi4_mini"] | {"intermediate_size": 128}, gptq(64, desc_act=True)),
    "mixtral": (FAMILIES["mixtral"], awq(32)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quantized")


def folder_of(root: Path, name: str) -> Path:
    """The quantized checkpoint of one of `FORMS` or `OTHERS`, made once."""
    folder = root / name
    if (folder / "quantized").exists():
        return folder / "quantized"
    if name in OTHERS:
        model, form = OTHERS[name]
        return write_quantized(form, folder, model)
    return write_quantized(FORMS[name], folder)


def floats_of(folder: Path) -> Any:
    """`transformers`' model with the floats of the checkpoint in `folder`."""
    return AutoModelForCausalLM.from_pretrained(
        folder.parent / "floats", dtype=torch.float32, attn_implementation="eager"
    )


def logits_of(folder: Path, **settings: Any) -> Tensor:
    """Of the token after `PROMPT`."""
    runner = make_runner(folder, max_model_len=MAX_LEN, **settings)
    sequence = make_sequence(PROMPT)
    give_blocks([sequence], runner.block_size, len(PROMPT) + 1)
    return runner.compute_logits(plan_step([sequence], 512))[0].clone()


def expected_logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = floats_of(folder)(torch.tensor([PROMPT])).logits[0, -1]
    return logits


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_logits_are_those_of_the_floats(name: str, root: Path, cpu_kernels: Path) -> None:
    """Torch should compute with the very floats that a checkpoint stands for (int8: times activations of int8), the
    CPU kernels with activations of int8, as near as these are."""
    folder = folder_of(root, name)
    expected = expected_logits(folder)
    actual = logits_of(folder, cpu_kernels="off")
    if "int8" not in name:
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
    assert torch.cosine_similarity(expected, actual, dim=0) > 0.999
    if name != "mixtral":
        kernels = logits_of(folder, cpu_kernels="on", cache_dir=str(cpu_kernels))
        assert torch.cosine_similarity(expected, kernels, dim=0) > 0.998


@pytest.mark.parametrize("name", ["awq 32", "gptq desc_act", "fp8 channel", "qwen2", "mixtral"])
def test_greedy_equals_transformers(name: str, root: Path) -> None:
    """Prompts cut into chunks and batched by the engine should get the tokens that the floats get in `transformers`."""
    folder = folder_of(root, name)
    model = floats_of(folder)
    prompts = [PROMPT[:3], PROMPT[:30], PROMPT]
    outputs = run_engine(folder, prompts, cpu_kernels="off")
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(*greedy_tokens(model, prompt, NUM_TOKENS), output)


@pytest.mark.parametrize("name", ["awq 128", "gptq 64", "gptq desc_act", "int4 channel", "int8", "fp8 tensor", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_give_each_prompt_its_own_tokens(name: str, dtype: str, root: Path, cpu_kernels: Path) -> None:
    """Through the whole engine on the CPU kernels prompts should get, cut and batched, what each gets alone."""
    folder = folder_of(root, name)
    settings: dict[str, Any] = {"cpu_kernels": "on", "cache_dir": str(cpu_kernels), "dtype": dtype}
    prompts = [PROMPT[:3], PROMPT[:30], PROMPT]
    outputs = run_engine(folder, prompts, **settings)
    runner = make_runner(folder, max_model_len=MAX_LEN, **settings)
    assert isinstance(runner._model, CpuDecoder)
    for prompt, output in zip(prompts, outputs, strict=True):
        sequence = make_sequence(list(prompt))
        give_blocks([sequence], runner.block_size, len(prompt) + NUM_TOKENS)
        assert generate(runner, [sequence], NUM_TOKENS) == [output]


def run_engine(folder: Path, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Greedy tokens of each prompt, served together in small steps."""
    engine_settings = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE}
    runner = make_runner(folder, max_model_len=MAX_LEN, **engine_settings, **settings)
    engine = make_engine(
        runner, EngineConfig(**engine_settings), max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k"
    )
    return [output[:NUM_TOKENS] for output in serve(engine, prompts)]


def test_half_precision_of_a_quantized_checkpoint_is_widened(
    tmp_path: Path, cpu_kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A float16 checkpoint, as AutoAWQ writes, should run on the CPU kernels in bfloat16, and a line should say so."""
    folder = write_quantized(awq(32), tmp_path, dtype="float16")
    runner = make_runner(folder, dtype="auto", cpu_kernels="on", cache_dir=str(cpu_kernels))
    assert (runner.dtype, type(runner._model)) == ("bfloat16", CpuDecoder)
    assert runner.quantization == "awq", "what `quire advise` is told"
    assert "dtype.chosen" in caplog.text
    assert make_runner(folder, dtype="float16", cache_dir=str(cpu_kernels)).dtype == "float32", "as any float16"

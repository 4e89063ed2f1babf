"""Which way a CPU computes, and what is kept of packed weights."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model import cpu_kernels
from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.llama import Llama
from gpu_worker.model.runner import DecoderRunner
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence, plan_step
from tests.gpu_worker.model.tiny_families import FAMILIES, write_tiny_model


@pytest.fixture(autouse=True)
def keep_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the packed weights of models as small as these, too."""
    monkeypatch.setattr(cpu_kernels, "MIN_KEPT_BYTES", 0)


PROMPT = [random.Random(3).randrange(500) for _ in range(60)]
NUM_TOKENS = 12


def draw(runner: DecoderRunner) -> list[int]:
    """Tokens after `PROMPT`."""
    sequence = make_sequence(PROMPT)
    give_blocks([sequence], runner.block_size, len(PROMPT) + NUM_TOKENS)
    return generate(runner, [sequence], NUM_TOKENS)[0]


@pytest.fixture
def experts_folder(tmp_path: Path) -> Path:
    """A tiny Qwen3-MoE: of its three layers the middle one is dense."""
    sizes = {"vocab_size": 512, "max_position_embeddings": 512}
    return write_tiny_model(FAMILIES["qwen3_moe"] | sizes, tmp_path / "qwen3-moe")


@pytest.mark.parametrize("name", ["llama_folder", "qwen2_folder", "experts_folder"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_packed_weights_are_read_back_the_same(
    name: str, quantization: str, cache_dir: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A second start should read the packed weights, not the checkpoint's, and give the same tokens."""
    caplog.set_level(logging.INFO)
    settings: dict[str, Any] = {"dtype": "bfloat16", "quantization": quantization, "cache_dir": cache_dir}
    folder: Path = request.getfixturevalue(name)
    first = draw(make_runner(folder, cpu_kernels="on", **settings))
    assert "weights.packed" in caplog.text
    assert "weights.read" not in caplog.text
    assert first == draw(make_runner(folder, cpu_kernels="on", **settings))
    assert "weights.read" in caplog.text


def test_a_broken_file_of_packed_weights_is_made_again(llama_folder: Path, cache_dir: str) -> None:
    """A file cut short by a full disk should cost time, not the start."""
    expected = draw(make_runner(llama_folder, cpu_kernels="on", cache_dir=cache_dir))
    (file,) = (Path(cache_dir) / "packed").iterdir()
    file.write_bytes(file.read_bytes()[:1000])
    assert draw(make_runner(llama_folder, cpu_kernels="on", cache_dir=cache_dir)) == expected
    assert draw(make_runner(llama_folder, cpu_kernels="on", cache_dir=cache_dir)) == expected


@pytest.mark.usefixtures("cpu_kernels")
def test_a_cache_that_cannot_be_written_stops_nothing(llama_folder: Path, tmp_path: Path) -> None:
    """Without a folder for compiled kernels torch should compute; `on` should say what is wrong."""
    file = tmp_path / "file"
    file.write_text("")
    assert isinstance(make_runner(llama_folder, cache_dir=str(file))._model, Llama)
    with pytest.raises(ConfigError, match=r"--cpu-kernels=on: can't write"):
        make_runner(llama_folder, cpu_kernels="on", cache_dir=str(file))


@pytest.mark.usefixtures("cpu_kernels")
def test_what_the_kernels_do_not_have_is_computed_by_torch(llama_folder: Path) -> None:
    """Without the kernels torch should compute."""
    assert isinstance(make_runner(llama_folder)._model, CpuDecoder)
    assert isinstance(make_runner(llama_folder, cpu_kernels="off")._model, Llama)


@pytest.mark.usefixtures("cpu_kernels")
def test_half_precision_is_widened(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """float16, of the model and of its cache, should be computed as float32, bit by bit, with one warning."""
    expected = draw(make_runner(llama_folder, dtype="float32", cpu_kernels="on"))
    caplog.clear()
    runner = make_runner(llama_folder, dtype="float16", kv_cache_dtype="fp16", cpu_kernels="on")
    assert expected == draw(runner)
    assert (runner.card.dtype, runner._cache.keys(0).dtype) == ("float32", torch.float32)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "half.widened dtype=float16 kv_cache_dtype=fp16 instead=float32" in warnings[0]


@pytest.mark.usefixtures("cpu_kernels")
def test_a_machine_without_a_compiler_computes_with_torch(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler and no library made before: torch, with a line that says why; the same float32 tokens."""
    expected = draw(make_runner(llama_folder, cpu_kernels="on"))
    monkeypatch.setenv("PATH", str(tmp_path))
    runner = make_runner(llama_folder, cache_dir=str(tmp_path))
    assert isinstance(runner._model, Llama)
    assert "no C compiler" in caplog.text
    assert draw(runner) == expected


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", ["qwen2_folder", "experts_folder"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_logits_are_those_of_torch(name: str, quantization: str, request: pytest.FixtureRequest) -> None:
    """Both ways should quantize the same weights the same; what they round elsewhere may tip single values."""
    logits, folder = [], request.getfixturevalue(name)
    for kernels in ("on", "off"):
        runner = make_runner(folder, cpu_kernels=kernels, quantization=quantization)
        sequence = make_sequence(PROMPT)
        give_blocks([sequence], runner.block_size, len(PROMPT) + 1)
        logits.append(runner.compute_logits(plan_step([sequence], 512))[0].clone())
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.999

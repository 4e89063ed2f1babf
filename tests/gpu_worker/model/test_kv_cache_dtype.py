"""`--kv-cache-dtype` from the flag to the tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.runner import DecoderRunner
from shared.config import WorkerConfig
from shared.errors import ConfigError
from shared.flags import parse
from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence, plan_step

PROMPT = [random.Random(4).randrange(500) for _ in range(120)]
LEAST_COSINE = {"fp32": 0.99999, "bf16": 0.9999, "fp16": 0.99999, "int8": 0.999, "fp8": 0.99}


def prompt_logits(runner: DecoderRunner) -> torch.Tensor:
    """Logits after `PROMPT`."""
    sequence = make_sequence(PROMPT)
    give_blocks([sequence], runner.block_size, len(PROMPT) + 1)
    return runner.compute_logits(plan_step([sequence], 512))[0].clone()


@pytest.mark.parametrize("name", LEAST_COSINE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_serves_every_model_on_torch(name: str, dtype: str, qwen2_folder: Path) -> None:
    """Logits should be near those of a plain cache, and the same where the cache's dtype holds all of the model's."""
    plain, own = (
        prompt_logits(make_runner(qwen2_folder, dtype=dtype, cpu_kernels="off", kv_cache_dtype=kept))
        for kept in ("auto", name)
    )
    assert torch.nn.functional.cosine_similarity(plain, own, dim=0) > min(LEAST_COSINE[name], 0.9999)
    holds_all = {"float32": {"fp32"}, "bfloat16": {"fp32", "bf16"}, "float16": {"fp32", "fp16"}}[dtype]
    assert torch.equal(plain, own) or name not in holds_all
    assert not torch.equal(plain, own) or name not in ("int8", "fp8")


def test_names_of_vllm_are_known(llama_folder: Path) -> None:
    """Both spellings of a dtype should give the same cache and fingerprint, and no two dtypes the same."""
    fingerprints = {}
    for names in (("fp32", "float32", "auto"), ("bf16", "bfloat16"), ("fp8", "fp8_e4m3"), ("int8",)):
        own = {make_runner(llama_folder, cpu_kernels="off", kv_cache_dtype=name).fingerprint for name in names}
        assert len(own) == 1
        fingerprints[names[0]] = own.pop()
    assert len(set(fingerprints.values())) == len(fingerprints)
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype"):
        parse(WorkerConfig, ["--kv-cache-dtype=int3"], {}, program="worker")


def test_the_same_bytes_hold_more_tokens(qwen2_folder: Path) -> None:
    """A quantized cache should have the more blocks the fewer bytes its layout says a block takes."""
    plain, own = (make_runner(qwen2_folder, cpu_kernels="off", kv_cache_dtype=name) for name in ("bf16", "int8"))
    head_size = plain._cache.keys(0).shape[-1]
    assert own.num_blocks == pytest.approx(plain.num_blocks * 2 * head_size / (head_size + 2), rel=0.01)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "fp8"])
@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_the_kernels_give_what_torch_gives(name: str, settings: dict[str, Any], qwen2_folder: Path) -> None:
    """Both ways should read and write the same cache for every model that the kernels have, up to roundings."""
    runners = [make_runner(qwen2_folder, cpu_kernels=way, kv_cache_dtype=name, **settings) for way in ("on", "off")]
    assert isinstance(runners[0]._model, CpuDecoder)
    assert runners[0].num_blocks == runners[1].num_blocks
    ours, expected = map(prompt_logits, runners)
    least = 0.9999 if settings == {"dtype": "float32"} and name in ("fp32", "int8") else 0.999
    assert torch.nn.functional.cosine_similarity(ours, expected, dim=0) > least


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("chunk_size", [1, 33])
def test_tokens_do_not_depend_on_how_they_were_computed(name: str, chunk_size: int, llama_folder: Path) -> None:
    """A resumed sequence, cut into other chunks, should go on with the tokens of the undisturbed one."""
    runner = make_runner(llama_folder, kv_cache_dtype=name)
    undisturbed, resumed = make_sequence(PROMPT), make_sequence(PROMPT)
    give_blocks([undisturbed, resumed], runner.block_size, len(PROMPT) + 20)
    (expected,) = generate(runner, [undisturbed], 16)
    generate(runner, [resumed], 6)
    resumed.num_computed = 0
    assert expected == generate(runner, [resumed], 16, chunk_size)[0]

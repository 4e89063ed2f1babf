"""Requests with adapters against `transformers` with the adapter merged into its weights, token for token."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.lora.adapter import Adapter
from gpu_worker.model.cpu_decoder import CpuDecoder
from gpu_worker.model.runner import DecoderRunner
from gpu_worker.service import make_engine
from shared.clock import ManualClock
from shared.config import EngineConfig
from shared.ids import RequestId
from shared.log import TokenEntry
from shared.messages import SamplingParams
from shared.prefix import scope_of
from tests.gpu_worker.lora.peft_files import ATTENTION, load_model, merge, write_adapter
from tests.gpu_worker.model.plans import give_blocks, make_runner, make_sequence, plan_step
from tests.gpu_worker.model.test_runner_equality import assert_same_tokens, greedy_tokens
from tests.gpu_worker.model.tiny_families import FAMILIES, SIZES, write_tiny_model

BLOCK_SIZE, MAX_LEN, NUM_TOKENS, NUM_BLOCKS = 8, 160, 16, 26
PROMPT_LENS = (66, 70, 90)
MODELS = {"llama": SIZES | {"model_type": "llama"}, **FAMILIES}
ON_C = ("llama", "phi3", "phi4_mini", "qwen3")
ADAPTERS: list[dict[str, Any]] = [
    {"rank": 4},
    {"rank": 20, "use_rslora": True, "lora_alpha": 9, "targets": ("q_proj", "v_proj", "qkv_proj", "down_proj")},
    {"rank": 8, "targets": ATTENTION, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 5}},
]
Expected = list[tuple[list[int], list[float]]]


class Adapted:
    """A tiny model, three adapters of it, and what each of the four draws."""

    def __init__(self, name: str, root: Path) -> None:
        self.folder = write_tiny_model(MODELS[name], root / name)
        self.adapters: list[Path] = []
        self.expected: list[Expected] = [self._draw(load_model(self.folder))]
        for seed, settings in enumerate(ADAPTERS):
            path = write_adapter(load_model(self.folder), root / f"{name}-{seed}", seed=seed, **settings)
            self.adapters.append(path)
            self.expected.append(self._draw(merge(load_model(self.folder), path)))

    def _draw(self, model: Any) -> Expected:
        return [greedy_tokens(model, prompt, NUM_TOKENS) for prompt in make_prompts()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapted]:
    return {}


def adapted(name: str, models: dict[str, Adapted], factory: pytest.TempPathFactory) -> Adapted:
    if name not in models:
        models[name] = Adapted(name, factory.mktemp("adapted"))
    return models[name]


def make_prompts() -> list[list[int]]:
    """With a beginning in common."""
    rng = random.Random(11)
    text = [rng.randrange(300) for _ in range(max(PROMPT_LENS))]
    return [[*text[: length - 2], rng.randrange(300), 7] for length in PROMPT_LENS]


def load(folder: Path, *, num_blocks: int = NUM_BLOCKS, **settings: Any) -> tuple[DecoderRunner, Engine]:
    """A runner with a small pool, and an engine over it as a worker makes it."""
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 24, "block_size": BLOCK_SIZE, "enable_lora": True,
                "max_lora_rank": 24} | settings  # fmt: skip
    measured = make_runner(folder, max_model_len=MAX_LEN, **settings)
    num_bytes = num_blocks * int(measured.kv_bytes_per_token * BLOCK_SIZE)
    runner = make_runner(folder, max_model_len=MAX_LEN, **settings | {"kv_cache_memory_bytes": num_bytes})
    limits = EngineConfig(**settings)
    return runner, make_engine(runner, limits, max_model_len=MAX_LEN, clock=ManualClock(), prefix_key=b"k")


def read(runner: DecoderRunner, paths: list[Path]) -> list[Adapter | None]:
    """No adapter, then those in `paths`."""
    assert runner.adapters is not None
    return [None, *(runner.adapters.store.load(path) for path in paths)]


def serve(engine: Engine, requests: list[tuple[list[int], Adapter | None]]) -> list[list[int]]:
    """Greedy tokens of each, all served at the same time."""
    for rank, (prompt, adapter) in enumerate(requests):
        engine.add(
            Sequence(
                request_id=RequestId(f"r{rank}"), attempt=1, choice=0, rank=rank, token_ids=prompt,
                num_prompt_tokens=len(prompt), adapter=adapter,
                sampling=SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0),
                cache_scope=scope_of("t", "", adapter.content if adapter is not None else ""),
            )
        )  # fmt: skip
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_work:
        for new in engine.step(lambda: True).entries:
            tokens[int(new.request_id[1:])] += [e.token_id for e in new.entries if isinstance(e, TokenEntry)]
        engine.check_integrity()
    return tokens


def logits(runner: DecoderRunner, adapters: list[Adapter | None]) -> torch.Tensor:
    """Of the same prompt with each adapter, computed in one step."""
    sequences = [make_sequence(make_prompts()[0][:20]) for _ in adapters]
    for sequence, adapter in zip(sequences, adapters, strict=True):
        sequence.adapter = adapter
    give_blocks(sequences, BLOCK_SIZE, 24)
    return runner.compute_logits(plan_step(sequences, 512)).clone()


@pytest.mark.parametrize(
    ("name", "kernels", "max_loras"),
    [(name, "off", 4) for name in MODELS]
    + [(name, "on", 4) for name in ON_C]
    + [("llama", "off", 1), ("llama", "on", 1)],
)
def test_each_request_is_as_with_its_adapter_merged(
    name: str, kernels: str, max_loras: int, models: dict[str, Adapted], request: pytest.FixtureRequest
) -> None:
    """Requests of three adapters and of none, mixed in one batch, cut into chunks, evicted from a small pool and again
    from the prefix cache, should each get what its own merged model draws."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    made = adapted(name, models, request.getfixturevalue("tmp_path_factory"))
    runner, engine = load(made.folder, cpu_kernels=kernels, max_loras=max_loras)
    assert isinstance(runner._model, CpuDecoder) == (kernels == "on")
    adapters = read(runner, made.adapters)
    which = list(itertools.product(range(len(PROMPT_LENS)), range(len(adapters))))
    prompts = make_prompts()
    for _ in range(2):
        outputs = serve(engine, [(prompts[prompt], adapters[adapter]) for prompt, adapter in which])
        for (prompt, adapter), output in zip(which, outputs, strict=True):
            assert_same_tokens(*made.expected[adapter][prompt], output)
    assert engine.view().num_evictions > 0 or max_loras == 1
    drawn = {tuple(tokens) for of_adapter in made.expected for tokens, _ in of_adapter}
    assert len(drawn) == len(which), "adapters that change nothing show nothing"


@pytest.mark.parametrize("kernels", ["off", "on"])
def test_an_adapter_leaves_others_bit_by_bit(
    kernels: str, models: dict[str, Adapted], request: pytest.FixtureRequest
) -> None:
    """The logits of requests with and without adapters should be the same bits alone and in a mix."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    made = adapted("llama", models, request.getfixturevalue("tmp_path_factory"))
    runner = make_runner(
        made.folder, cpu_kernels=kernels, enable_lora=True, max_model_len=MAX_LEN, block_size=BLOCK_SIZE
    )
    adapters = read(runner, made.adapters)
    mixed = logits(runner, adapters)
    assert len({tuple(row.tolist()) for row in mixed}) == len(adapters)
    for row, adapter in zip(mixed, adapters, strict=True):
        assert torch.equal(row, logits(runner, [adapter])[0])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_models_take_adapters(
    quantization: str, models: dict[str, Adapted], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over quantized weights both ways of computing should move logits alike, with int8 about as over plain ones."""
    made = adapted("llama", models, tmp_path_factory)

    def moved(quantized: str, kernels: str) -> torch.Tensor:
        runner = make_runner(made.folder, quantization=quantized, enable_lora=True, cpu_kernels=kernels,
                             max_model_len=MAX_LEN, block_size=BLOCK_SIZE)  # fmt: skip
        plain, changed = logits(runner, read(runner, made.adapters[:1]))
        return changed - plain

    by_torch = moved(quantization, "off")
    assert torch.cosine_similarity(by_torch, moved(quantization, "on"), dim=0) > 0.99
    if quantization == "int8":
        assert torch.cosine_similarity(by_torch, moved("none", "off"), dim=0) > 0.9

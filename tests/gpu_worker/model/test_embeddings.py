"""Embeddings: the normed hidden state of a prompt's last token, whatever runs beside it, in each way to compute."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.runner import DecoderRunner
from shared.ids import RequestId
from shared.log import FinishEntry, LogEntry
from shared.messages import SamplingParams
from shared.speculation import parse_speculative_config
from tests.gpu_worker.model.plans import make_runner

LENGTHS = (1, 3, 24, 41, 90)
CPU_KERNELS = [("off", "float32", "none"), ("on", "float32", "none"), ("on", "bfloat16", "none"),
               ("on", "bfloat16", "int8"), ("off", "bfloat16", "none")]  # fmt: skip


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(300) for _ in range(length)] for length in LENGTHS]


def make_sequence(name: str, prompt: list[int], rank: int, *, is_pooled: bool) -> Sequence:
    sampling = SamplingParams(seed=1, max_tokens=1 if is_pooled else 30, temperature=0.0 if rank % 2 else 1.0)
    return Sequence(request_id=RequestId(name), attempt=1, choice=0, rank=rank, token_ids=prompt,
                    num_prompt_tokens=len(prompt), sampling=sampling, is_pooled=is_pooled)  # fmt: skip


def serve(runner: DecoderRunner, sequences: list[Sequence], **settings: Any) -> dict[str, list[LogEntry]]:
    """All that each request gains."""
    engine = Engine(runner, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=24, **settings)
    gained: dict[str, list[LogEntry]] = {sequence.request_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for new in engine.step(lambda: True).entries:
            gained[new.request_id] += new.entries
        engine.check_integrity()
    return gained


def vector_of(entries: list[LogEntry]) -> torch.Tensor:
    (entry,) = entries
    assert isinstance(entry, FinishEntry)
    assert entry.reason == "stop"
    return torch.tensor(array("f", entry.embedding))


@pytest.mark.parametrize(
    ("kernels", "dtype", "quantization"), [*CPU_KERNELS, ("transformers", "float32", "none")], ids=str
)
def test_embeddings_equal_transformers(
    kernels: str, dtype: str, quantization: str, llama_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Prompts cut into chunks, beside others that generate and others like them, should give what transformers gives;
    where a row's bits are its own, the very same as alone. Who generates should get the tokens as ever."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    way = {"model_impl": kernels} if kernels == "transformers" else {"cpu_kernels": kernels}
    runner = make_runner(llama_folder, dtype=dtype, quantization=quantization, max_num_seqs=8,
                         max_num_batched_tokens=24, **way)  # fmt: skip
    writing = [make_sequence(f"w{i}", prompt, i, is_pooled=False) for i, prompt in enumerate(prompts()[2:])]
    asking = [make_sequence(f"e{i}", prompt, 9 + i, is_pooled=True) for i, prompt in enumerate(prompts())]
    together = serve(runner, [*writing, *asking], has_prefix_cache=True)
    model = AutoModel.from_pretrained(llama_folder, dtype=torch.float32, attn_implementation="eager")
    for index, prompt in enumerate(prompts()):
        vector = vector_of(together[f"e{index}"])
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = F.normalize(hidden, dim=-1)
        if dtype == "float32":
            torch.testing.assert_close(vector, expected, rtol=0, atol=2e-5)
        assert torch.dot(vector, expected) > 0.98
        assert abs(float(vector.norm()) - 1.0) < 1e-5
        if (kernels, dtype) != ("off", "bfloat16"):
            alone = serve(runner, [make_sequence("alone", prompt, 1, is_pooled=True)])
            assert torch.equal(vector_of(alone["alone"]), vector)
    again = [make_sequence(f"w{i}", prompt, i, is_pooled=False) for i, prompt in enumerate(prompts()[2:])]
    if (kernels, dtype) != ("off", "bfloat16"):
        assert serve(runner, again) == {name: together[name] for name in ("w0", "w1", "w2")}


@pytest.mark.parametrize("settings", [{"is_static": True}, {"reserved_tokens": 128}, {"has_drafts": True}], ids=str)
def test_embeddings_come_from_every_kind_of_batch(settings: dict[str, Any], llama_folder: Path) -> None:
    """Static batches, reserved memory and drafts should change nothing."""
    if settings.pop("has_drafts", False):
        text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
        settings["speculation"] = parse_speculative_config(text)
    runner = make_runner(llama_folder, cpu_kernels="off", max_num_seqs=8, max_num_batched_tokens=24)
    texts = [[7, 8, 9] * 8, [7, 8, 9, 7, 8], [5] * 20]
    expected = [vector_of(serve(runner, [make_sequence("e", text, 1, is_pooled=True)])["e"]) for text in texts]
    sequences = [make_sequence(f"e{i}", text, i, is_pooled=True) for i, text in enumerate(texts)]
    writing = make_sequence("w", texts[0], 1, is_pooled=False)
    gained = serve(runner, [writing, *sequences], **settings)
    assert all(torch.equal(vector_of(gained[f"e{i}"]), vector) for i, vector in enumerate(expected))

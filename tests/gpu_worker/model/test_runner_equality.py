"""The runner against `transformers`, token for token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.model.plans import generate, give_blocks, make_runner, make_sequence

PROMPT_LENS = (1, 2, 15, 16, 17, 63, 100, 140)
NUM_TOKENS = 24
SHOWN_MARGIN = 1e-4


def reference(folder: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of `transformers` (float32, eager attention) and the margin of each over the second best."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return greedy_tokens(model, prompt, num_tokens)


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of a model of `transformers` and the margin of each over the second best."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def assert_same_tokens(expected: list[int], margins: list[float], actual: list[int]) -> None:
    """Equal, or different at a position where the reference itself hardly decides."""
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        if want != got:
            print(f"token {i}: {got} instead of {want}, reference margin {margins[i]:.2e}")
            assert margins[i] <= SHOWN_MARGIN
            return


@pytest.mark.parametrize(("chunk_size", "block_size"), [(512, 16), (32, 8), (7, 32)])
@pytest.mark.parametrize("name", ["llama_folder", "qwen2_folder"])
@pytest.mark.parametrize("kernels", ["off", "on"])
def test_greedy_equals_transformers(
    kernels: str, name: str, chunk_size: int, block_size: int, request: pytest.FixtureRequest
) -> None:
    """Ragged batches that mix prompt chunks and decodes should give each prompt the tokens it gets alone there."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    folder: Path = request.getfixturevalue(name)
    runner = make_runner(folder, block_size=block_size, cpu_kernels=kernels)
    draw = random.Random(7)
    prompts = [[draw.randrange(500) for _ in range(length)] for length in PROMPT_LENS]
    sequences = [make_sequence(prompt) for prompt in prompts]
    give_blocks(sequences, block_size, max(PROMPT_LENS) + NUM_TOKENS, draw)
    outputs = generate(runner, sequences, NUM_TOKENS, chunk_size)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(*reference(folder, prompt, NUM_TOKENS), output)

"""What is found in the prefix cache never changes a token of a real model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.runner import DecoderRunner
from shared.ids import RequestId
from shared.log import TokenEntry
from shared.messages import SamplingParams
from tests.gpu_worker.model.plans import make_runner

NUM_REQUESTS = 16
MAX_MODEL_LEN = 120


def make_sequences() -> list[Sequence]:
    """Cuts of two texts, each with a tail of its own, drawn greedily or not."""
    rng = random.Random(3)
    texts = [[rng.randrange(500) for _ in range(90)] for _ in range(2)]
    made = []
    for number in range(NUM_REQUESTS):
        prompt = texts[number % 2][: rng.randrange(91)] + [rng.randrange(500) for _ in range(rng.choice((1, 4)))]
        sampling = SamplingParams(seed=number, max_tokens=rng.randint(1, 24), temperature=rng.choice((0.0, 0.8)))
        made.append(
            Sequence(
                request_id=RequestId(f"r{number:02}"), attempt=1, choice=0, rank=number, token_ids=prompt,
                num_prompt_tokens=len(prompt), sampling=sampling,
            )
        )  # fmt: skip
    return made


def serve(runner: DecoderRunner, *, has_prefix_cache: bool, together: int) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how many tokens were found; `together` are served at the same time."""
    engine = Engine(runner, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=40,
                    has_prefix_cache=has_prefix_cache)  # fmt: skip
    coming = make_sequences()
    tokens: dict[str, list[int]] = {sequence.request_id: [] for sequence in coming}
    while coming or engine.has_work:
        while coming and engine.view().num_held < together:
            engine.add(coming.pop(0))
        for new in engine.step(lambda: True).entries:
            tokens[new.request_id] += [entry.token_id for entry in new.entries if isinstance(entry, TokenEntry)]
        engine.check_integrity()
    return tokens, engine.view().num_prefix_hits


@pytest.mark.parametrize(("kernels", "dtype"), [("off", "float32"), ("on", "float32"), ("on", "bfloat16")], ids=str)
@pytest.mark.parametrize("block_size", [8, 16])
def test_what_is_found_should_not_change_a_token(
    kernels: str, dtype: str, block_size: int, llama_folder: Path, request: pytest.FixtureRequest
) -> None:
    """Prompts that share beginnings should give the same tokens one by one without a cache as all at once with one, in
    a pool that is too small for them."""
    if kernels == "on":
        request.getfixturevalue("cpu_kernels")
    settings = {"cpu_kernels": kernels, "dtype": dtype, "num_threads": 2, "block_size": block_size}
    runner = make_runner(llama_folder, **settings, max_num_seqs=8, max_num_batched_tokens=40,
                         kv_cache_memory_bytes=(1 << 18) // (2 if dtype == "bfloat16" else 1))  # fmt: skip
    torch.set_num_threads(1)  # the pool has two; torch's would meet in barriers, which take long on a busy machine
    expected, num_hits = serve(runner, has_prefix_cache=False, together=1)
    assert num_hits == 0
    alone, hits_alone = serve(runner, has_prefix_cache=True, together=1)
    crowded, hits_crowded = serve(runner, has_prefix_cache=True, together=NUM_REQUESTS)
    assert (alone, crowded) == (expected, expected)
    assert min(hits_alone, hits_crowded) > 200

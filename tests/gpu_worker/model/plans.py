"""Hand-made plans: what an engine would do, small enough to see."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.assembly import load_runner
from gpu_worker.model.runner import DecoderRunner
from shared.config import EngineConfig, ModelConfig, WorkerConfig
from shared.ids import RequestId
from shared.messages import SamplingParams


def make_runner(
    folder: Path, *, dtype: str = "float32", quantization: str = "none", max_model_len: int | None = None,
    model_impl: str = "auto", tokenizer: str = "", **engine: Any,
) -> DecoderRunner:  # fmt: skip
    """A runner on the CPU with one thread unless said otherwise."""
    settings = {"device": "cpu", "num_threads": 1, "kv_cache_memory_bytes": 16 << 20} | engine
    model = ModelConfig(
        model=str(folder), dtype=dtype, quantization=quantization, max_model_len=max_model_len, model_impl=model_impl,
        tokenizer=tokenizer,
    )  # fmt: skip
    return load_runner(WorkerConfig(model=model, engine=EngineConfig(**settings)))


def make_sequence(
    token_ids: list[int], *, block_ids: list[int] | None = None, choice: int = 0, **sampling: Any
) -> Sequence:
    """A sequence of prompt `token_ids`, greedy unless said otherwise."""
    settings = {"seed": 1, "max_tokens": 1000, "temperature": 0.0} | sampling
    sequence = Sequence(
        request_id=RequestId("cmpl-test"),
        attempt=1,
        choice=choice,
        rank=0,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(**settings),
    )
    sequence.block_ids = list(block_ids or [])
    return sequence


def give_blocks(
    sequences: list[Sequence], block_size: int, max_tokens: int, order: random.Random | None = None
) -> None:
    """Give each sequence blocks for `max_tokens` tokens; in a mixed-up order if `order` is given."""
    per_sequence = -(-max_tokens // block_size)
    ids = list(range(per_sequence * len(sequences)))
    if order is not None:
        order.shuffle(ids)
    for i, sequence in enumerate(sequences):
        sequence.block_ids = ids[i * per_sequence : (i + 1) * per_sequence]


def plan_step(sequences: list[Sequence], chunk_size: int, budget: int = 512) -> BatchPlan:
    """Chunks of at most `chunk_size` tokens for each sequence in order, within `budget`."""
    chunks = []
    for sequence in sequences:
        length = min(chunk_size, sequence.num_uncomputed, budget)
        if length:
            is_sampling = length == sequence.num_uncomputed
            chunks.append(PlannedChunk(sequence, sequence.num_computed, length, is_sampling))
            budget -= length
    return BatchPlan(tuple(chunks))


def advance(runner: DecoderRunner, plan: BatchPlan) -> None:
    """Run `plan`, and add what it drew to its sequences."""
    drawn = iter(runner.run(plan))
    for chunk in plan.chunks:
        chunk.sequence.num_computed += chunk.length
        if chunk.is_sampling:
            chunk.sequence.token_ids.append(next(drawn).token_id)


def generate(
    runner: DecoderRunner, sequences: list[Sequence], num_tokens: int, chunk_size: int = 512
) -> list[list[int]]:
    """Output tokens of each sequence, all stepped together until each has `num_tokens`."""
    while open_ones := [s for s in sequences if s.num_output < num_tokens]:
        advance(runner, plan_step(open_ones, chunk_size))
    for sequence in sequences:
        runner.forget(sequence)
    return [s.token_ids[s.num_prompt_tokens :] for s in sequences]

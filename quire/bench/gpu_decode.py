"""Decode with a model alone, no engine or service around it: what a worker's step costs at the least."""

from __future__ import annotations

import random
import statistics
import time

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.sequence import Sequence
from gpu_worker.model.assembly import load_runner
from gpu_worker.model.runner import DecoderRunner
from shared.config import WorkerConfig
from shared.errors import ConfigError
from shared.ids import RequestId
from shared.messages import SamplingParams


def decode(config: WorkerConfig, *, num_seqs: int, context: int, steps: int) -> dict[str, float]:
    """Compute `num_seqs` random prompts of `context` tokens, then `steps` greedy steps: medians.

    Raises:
        ConfigError: the model's cache or its longest context do not allow it.
    """
    runner = load_runner(config)
    sequences = _make_sequences(runner, num_seqs, context, steps + 1)
    started_at = time.perf_counter()
    for sequence in sequences:
        _compute_prompt(runner, sequence, config.engine.max_num_batched_tokens)
    prompt_s = time.perf_counter() - started_at
    taken_s = []
    for _ in range(steps):
        started_at = time.perf_counter()
        plan = BatchPlan(tuple(PlannedChunk(s, s.num_computed, 1, is_sampling=True) for s in sequences))
        _run(runner, plan)
        taken_s.append(time.perf_counter() - started_at)
    step_s = statistics.median(taken_s)
    return {
        "step_ms": step_s * 1e3,
        "tokens_per_s": num_seqs / step_s,
        "prompt_tokens_per_s": num_seqs * context / prompt_s,
    }


def _make_sequences(runner: DecoderRunner, num_seqs: int, context: int, num_drawn: int) -> list[Sequence]:
    if context + num_drawn > runner.max_model_len:
        raise ConfigError(f"{context + num_drawn} tokens: the model's longest context is {runner.max_model_len}")
    blocks_each = -(-(context + num_drawn) // runner.block_size)
    if blocks_each * num_seqs > runner.num_blocks:
        raise ConfigError(f"{num_seqs} sequences need {blocks_each * num_seqs} blocks; there are {runner.num_blocks}")
    ids = list(range(runner.num_blocks))
    source = random.Random(0)
    source.shuffle(ids)
    sequences = []
    for index in range(num_seqs):
        sequence = Sequence(
            request_id=RequestId(f"bench-{index}"),
            attempt=0,
            choice=0,
            rank=index,
            token_ids=[source.randrange(runner.vocab_size) for _ in range(context)],
            num_prompt_tokens=context,
            sampling=SamplingParams(seed=0, max_tokens=num_drawn, temperature=0.0),
        )
        sequence.block_ids = ids[index * blocks_each : (index + 1) * blocks_each]
        sequences.append(sequence)
    return sequences


def _compute_prompt(runner: DecoderRunner, sequence: Sequence, max_tokens: int) -> None:
    while sequence.num_output == 0:
        length = min(sequence.num_uncomputed, max_tokens)
        is_last = length == sequence.num_uncomputed
        _run(runner, BatchPlan((PlannedChunk(sequence, sequence.num_computed, length, is_sampling=is_last),)))


def _run(runner: DecoderRunner, plan: BatchPlan) -> None:
    """One step; its tokens become known (drawing waits for the card)."""
    drawn = iter(runner.run(plan))
    for chunk in plan.chunks:
        chunk.sequence.num_computed += chunk.length
        if chunk.is_sampling:
            chunk.sequence.token_ids.append(next(drawn).token_id)

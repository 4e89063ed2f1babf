"""Decode graphs without a card: a capture that calls the recorded function again, over the same buffers.

What is left to a card is that a graph's replay does what its function did.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_worker.model.graphs import Captured, DecodeGraphs, graph_sizes
from gpu_worker.model.runner import DecoderRunner
from quire.bench.random_model import write_random_model
from tests.gpu_worker.model.plans import advance, give_blocks, make_runner, make_sequence, plan_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("tiny", tmp_path_factory.mktemp("graphs") / "tiny")


def add_graphs(runner: DecoderRunner, sizes: list[int], max_total_context: int = 1000) -> list[int]:
    """Give `runner` graphs of `sizes`; the sizes that are replayed are appended to the list, which is returned."""
    replayed: list[int] = []

    def compute() -> Tensor:
        return runner._model.logits(runner._model.forward(runner._inputs, runner._cache))

    def capture(run: Callable[[], Tensor]) -> Captured:
        logits = run()

        def replay() -> None:
            replayed.append(logits.shape[0])
            logits.copy_(run())

        return Captured(replay, logits)

    with torch.inference_mode():
        runner._graphs = DecodeGraphs(
            compute, runner._inputs, sizes, max_context=64, max_total_context=max_total_context, capture=capture
        )
    return replayed


def test_replayed_steps_equal_launched_ones(folder: Path) -> None:
    """Padded decode steps should give the same logits as steps of the true size, also after a larger step, and write
    the same keys and values; steps with prompt chunks should not be replayed."""
    tokens: list[list[list[int]]] = []
    last_logits: list[Tensor] = []
    for has_graphs in (False, True):
        runner = make_runner(folder, cpu_kernels="off", max_num_seqs=8)
        replayed = add_graphs(runner, [4, 8]) if has_graphs else []
        sequences = [make_sequence(list(range(3 + i, 9 + 2 * i))) for i in range(5)]
        give_blocks(sequences, runner.block_size, 40)
        advance(runner, plan_step(sequences, 32))
        assert replayed == []
        for num_running in (5, 3, 4, 1):
            running = sequences[:num_running]
            plan = plan_step(running, 32)
            logits = runner.compute_logits(plan).clone()
            assert logits.shape[0] == num_running
            advance(runner, plan)
        assert replayed == ([8, 8, 4, 4, 4, 4, 4, 4] if has_graphs else [])
        tokens.append([sequence.token_ids for sequence in sequences])
        last_logits.append(logits)
    assert torch.equal(*last_logits)
    assert tokens[0] == tokens[1]


def test_what_exceeds_the_bounds_is_launched(folder: Path) -> None:
    """More sequences than any size, or more keys than launches were sized for, should run without a graph."""
    runner = make_runner(folder, cpu_kernels="off", max_num_seqs=8)
    sequences = [make_sequence(list(range(6))) for _ in range(3)]
    give_blocks(sequences, runner.block_size, 40)
    advance(runner, plan_step(sequences, 32))
    replayed = add_graphs(runner, [2])
    advance(runner, plan_step(sequences, 32))
    assert replayed == []
    replayed = add_graphs(runner, [4], max_total_context=3 * 7)
    advance(runner, plan_step(sequences, 32))
    assert replayed == []


def test_capturing_writes_nothing_into_the_cache(folder: Path) -> None:
    """Graphs are captured with padding only, so a cache should be as it was."""
    runner = make_runner(folder, cpu_kernels="off", max_num_seqs=8)
    add_graphs(runner, [1, 8])
    assert not bool(runner._cache.keys(0).any())


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [(1, [1]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16]), (40, [1, 2, 4, 8, 16, 24, 32, 40]), (1000, 256)],
)
def test_sizes(max_num_seqs: int, expected: list[int] | int) -> None:
    """Sizes should reach the largest step exactly, without too much padding or too many graphs."""
    sizes = graph_sizes(max_num_seqs)
    assert expected == (sizes if isinstance(expected, list) else sizes[-1])
    assert len(sizes) <= 14

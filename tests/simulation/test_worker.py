"""A simulated worker by itself should do with its sequences what the engine does with its own."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_svc.simulated_worker import SimulatedSequence, SimulatedWorker
from shared.ids import RequestId, WorkerId
from shared.messages import WorkerHello
from shared.preemption import MAX_PLANS_ASIDE


def make_worker(**hello: Any) -> SimulatedWorker:
    known = {"num_blocks": 40, "block_size": 4, "max_num_seqs": 8, "max_model_len": 160, "pid": 1, "host": "h"}
    texts = {"model": "m", "fingerprint": "f", "dtype": "float32", "device": "cpu"}
    return SimulatedWorker(WorkerHello(worker_id=WorkerId("w:0"), **known, **texts | hello))


def add(worker: SimulatedWorker, name: str, rank: int = 0, num_prompt: int = 6, **more: Any) -> SimulatedSequence:
    sequence = SimulatedSequence(
        request_id=RequestId(name),
        attempt=1,
        choice=0,
        order=(0, rank, 0),
        num_prompt=num_prompt,
        num_known=num_prompt,
        end=num_prompt + 90,
        **more,
    )
    worker.add(sequence)
    return sequence


def step(worker: SimulatedWorker) -> dict[str, int]:
    """Make a step; the tokens computed of each request."""
    worker.admit()
    chunks = worker.plan()
    for sequence, length in chunks:
        sequence.num_computed += length
        if sequence.num_computed == sequence.num_known:
            sequence.num_known += 1
            sequence.is_decoding = True
    worker.num_steps += 1
    return {str(sequence.request_id): length for sequence, length in chunks}


@pytest.mark.parametrize("num_swap_blocks", [0, 40])
def test_a_kept_sequence_should_stay_aside_for_some_steps(num_swap_blocks: int) -> None:
    """Set aside for one that never comes it should be back in the step in which the engine's planner lets it in."""
    worker = make_worker(num_swap_blocks=num_swap_blocks)
    first, second = add(worker, "first"), add(worker, "second", 1)
    step(worker)
    worker.keep(second.request_id)
    for _ in range(MAX_PLANS_ASIDE - 1):
        assert step(worker).keys() == {"first"}
    assert step(worker).keys() == {"first", "second"}
    worker.keep(first.request_id)
    worker.keep(second.request_id)
    assert "first" in step(worker), "nobody runs for whom it could stay aside"


def test_a_kept_sequence_should_come_back_when_one_leaves() -> None:
    """An end, not an eviction, should call back whoever stays aside."""
    worker = make_worker()
    first, second, third = (add(worker, name, rank) for rank, name in enumerate(("first", "second", "third")))
    step(worker)
    worker.keep(third.request_id)
    worker.keep(second.request_id)
    assert step(worker).keys() == {"first"}
    worker.drop(first.request_id)
    fourth = add(worker, "fourth", 4)
    assert step(worker).keys() == {"second", "third", "fourth"}
    worker.keep(third.request_id)
    worker._evict(fourth)
    assert step(worker).keys() == {"second"}

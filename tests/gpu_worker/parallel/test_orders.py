"""What the first rank tells the others, and what happens when one of them has gone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.engine.chunks import BatchPlan, PlannedChunk
from gpu_worker.engine.engine import EngineBroken
from gpu_worker.engine.swap import BlockCopy
from gpu_worker.model.assembly import load_parts, make_runner
from gpu_worker.model.inputs import StepCapacity, StepInputs
from gpu_worker.model.split import Split
from gpu_worker.parallel.leader import lead
from gpu_worker.parallel.orders import HEAD, Kind, Orders, hear, to_copies
from gpu_worker.parallel.team import Team
from gpu_worker.service import make_engine
from shared.clock import ManualClock
from shared.config import EngineConfig, ModelConfig, WorkerConfig
from shared.errors import ConfigError
from tests.gpu_worker.model.plans import give_blocks, make_sequence, plan_step
from tests.gpu_worker.parallel.team_of_threads import each_rank

CAPACITY = StepCapacity(max_tokens=900, max_sequences=8, max_wanted=12, max_blocks=64, block_size=16)


def _inputs() -> StepInputs:
    return StepInputs(CAPACITY, torch.device("cpu"))


def _plan(lengths: list[int]) -> BatchPlan:
    """Prompts of `lengths`; the first has a draft behind it, and of the last one the end is missing."""
    rng = random.Random(len(lengths))
    sequences = [make_sequence([rng.randrange(500) for _ in range(length)]) for length in lengths]
    give_blocks(sequences, 16, 400, rng)
    first, *rest = plan_step(sequences, 400, budget=sum(lengths) - 1).chunks
    return BatchPlan((PlannedChunk(first.sequence, 0, first.length, is_sampling=True, draft=(8, 9)), *rest))


def _contents(inputs: StepInputs) -> dict[str, torch.Tensor]:
    batch = inputs.batch
    width = -(-int(batch.context_lens.max()) // 16)
    return {
        "token_ids": inputs.token_ids, "positions": inputs.positions, "slots": inputs.slots,
        "wanted_rows": inputs.wanted_rows, "query_starts": batch.query_starts, "context_lens": batch.context_lens,
        "block_tables": batch.block_tables[:, :width],
    }  # fmt: skip


def test_a_step_arrives_as_it_was_sent() -> None:
    """Steps small and large, one after another, should be in the other rank's inputs what they are in the first's."""
    plans = [_plan(lengths) for lengths in ([3, 5], [300, 40, 7, 380], [1, 9, 2], [2])]

    def talk(team: Team) -> list[dict[str, torch.Tensor]]:
        inputs, orders, seen = _inputs(), Orders(team), []
        for plan in plans:
            if team.rank == 0:
                inputs.fill(plan)
                orders.step(inputs)
                orders.over()
            else:
                kind, numbers = hear(team)
                assert kind is Kind.STEP
                inputs.unpack(numbers)
            seen.append({name: tensor.clone() for name, tensor in _contents(inputs).items()})
        return seen

    said, heard = each_rank(2, talk)
    for sent, arrived in zip(said, heard, strict=True):
        assert sent.keys() == arrived.keys()
        assert all(torch.equal(sent[name], arrived[name]) for name in sent)
    assert sum(map(len, said[1].values())) > HEAD > sum(map(len, said[0].values())), "one and two messages"


def test_copies_wait_for_the_step() -> None:
    """Copies asked for while a step computes should be told behind it, in order, and in front of the next."""
    copies = [BlockCopy(i, 1000 + i, is_back=i % 3 == 0) for i in range(400)]

    def talk(team: Team) -> list[Any]:
        inputs, orders = _inputs(), Orders(team)
        inputs.fill(_plan([4]))
        if team.rank:
            return [hear(team) for _ in range(6)]
        orders.copy(copies[:2])
        orders.step(inputs)
        orders.copy(copies[2:10])
        orders.copy(copies[10:])
        orders.over()
        orders.step(inputs)
        orders.copy(copies[:1])  # of a step that failed here before it was over
        orders.step(inputs)
        return []

    _, heard = each_rank(2, talk)
    assert [kind for kind, _ in heard] == [Kind.COPY, Kind.STEP, Kind.COPY, Kind.STEP, Kind.COPY, Kind.STEP]
    assert [to_copies(heard[i][1]) for i in (0, 2, 4)] == [copies[:2], copies[2:], copies[:1]]


def test_sums_have_one_order() -> None:
    """Of three ranks an element's sum should be the same bits on all of them, wherever it lies in an array of whatever
    size: those of adding the ranks' numbers in float32, one after another."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(3, 40, 33, generator=generator) * 10.0 ** torch.randint(
        -4, 4, (3, 1, 33), generator=generator
    )
    for dtype in (torch.float32, torch.bfloat16):
        addends = numbers.to(dtype)
        wide = addends.float()
        expected = (wide[0] + wide[1] + wide[2]).to(dtype)

        def add(team: Team, addends: torch.Tensor = addends) -> list[torch.Tensor]:
            return [team.add_up(addends[team.rank, :rows].clone()) for rows in (40, 1, 7)]

        for sums in each_rank(3, add):
            assert all(torch.equal(part, expected[: len(part)]) for part in sums)


def test_the_least_is_agreed_on() -> None:
    """Each rank should hear the least number of all."""
    assert each_rank(3, lambda team: team.least([7 << 40, 5 << 40, 6 << 40][team.rank])) == [5 << 40] * 3


def test_a_lost_rank_breaks_the_engine_and_fails_no_request(llama_folder: Path) -> None:
    """Where the others do not answer any more, no request should be blamed for it."""
    config = WorkerConfig(
        model=ModelConfig(model=str(llama_folder), dtype="float32"),
        engine=EngineConfig(device="cpu", num_threads=1, tensor_parallel_size=2, kv_cache_memory_bytes=1 << 20),
    )

    def start(team: Team) -> Any:
        parts = load_parts(config, Split(team.rank, 2, team))
        return None if team.rank else (team, parts)  # the other one goes, as if it were killed

    (team, parts), _ = each_rank(2, start)
    runner = make_runner(lead(parts, Orders(team)), config.engine)
    engine = make_engine(
        runner, config.engine, max_model_len=runner.max_model_len, clock=ManualClock(), prefix_key=b"k"
    )
    engine.add(make_sequence([1, 2, 3]))
    with pytest.raises(EngineBroken, match="the ranks of this worker can't go on together"):
        engine.step()
    with pytest.raises(RuntimeError):
        Orders(team).end()


def test_the_cpu_kernels_are_refused(llama_folder: Path) -> None:
    """`--cpu-kernels on` should say that it does not go with several ranks."""
    config = WorkerConfig(
        model=ModelConfig(model=str(llama_folder), dtype="float32"),
        engine=EngineConfig(device="cpu", cpu_kernels="on", tensor_parallel_size=2),
    )
    with pytest.raises(ConfigError, match="--cpu-kernels=on: --tensor-parallel-size=2; the CPU kernels are for one"):
        load_parts(config, Split(0, 2))

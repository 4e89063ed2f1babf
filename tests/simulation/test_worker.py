"""A simulated worker by itself should do with its sequences what the engine does with its own."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from scheduler_svc.simulated_prefix_cache import SharedNames
from scheduler_svc.simulated_worker import SimulatedSequence, SimulatedWorker
from scheduler_svc.simulation_trace import SimulatedPrefix, SimulatedRequest
from shared.ids import RequestId, WorkerId
from shared.messages import WorkerHello
from shared.preemption import MAX_PLANS_ASIDE
from shared.prefix import SHORT_BYTES, PrefixNames, unpack
from tests.gpu_worker.engine.workload import Driver, make_engine, make_sequence
from tests.scripted_runner import ScriptedRunner
from tests.simulation.test_properties import assert_sound

SIZE = 4
NAMES = SharedNames()


def make_worker(step_tokens: int = 400, **hello: Any) -> SimulatedWorker:
    known = {"num_blocks": 40, "block_size": SIZE, "max_num_seqs": 8, "max_model_len": 160, "pid": 1, "host": "h"}
    texts = {"model": "m", "fingerprint": "f", "dtype": "float32", "device": "cpu"}
    return SimulatedWorker(
        WorkerHello(worker_id=WorkerId("w:0"), **known | texts | hello), max_num_batched_tokens=step_tokens
    )


def named(number: int, num_blocks: int, num_prompt: int) -> tuple[bytes, ...]:
    """Names of a prefix of so many blocks that such a prompt may find."""
    prefix = SimulatedPrefix(number, num_blocks * SIZE)
    request = SimulatedRequest(arrival_s=0.0, prompt_len=num_prompt, max_tokens=1, output_len=1, prefix=prefix)
    return NAMES.of(request, SIZE)


def add(
    worker: SimulatedWorker, name: str, rank: int = 0, num_prompt: int = 6, *, output_len: int = 90, **more: Any
) -> SimulatedSequence:
    sequence = SimulatedSequence(
        request_id=RequestId(name),
        attempt=1,
        choice=0,
        order=(0, rank, 0),
        num_prompt=num_prompt,
        num_known=num_prompt,
        end=num_prompt + output_len,
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
            if sequence.num_known == sequence.end:
                worker.finish(sequence)
    assert_sound(worker)
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


class Twins:
    """A simulated worker and an engine that are told the same; `names` maps the engine's names of prefixes to ours."""

    def __init__(self) -> None:
        self.worker = make_worker(has_prefix_cache=True)
        runner = ScriptedRunner(40, SIZE)
        self.driver = Driver(
            make_engine(runner, max_num_seqs=8, max_num_batched_tokens=400, has_prefix_cache=True), runner, budget=400
        )
        self.names: dict[bytes, bytes] = {}
        self.held: tuple[set[bytes], set[bytes]] = set(), set()
        self.num_found = 0

    def add(self, rank: int, num_blocks: int, num_own: int, num_output: int) -> None:
        """A request that brings prefix number `num_blocks` of so many blocks. It should grow into no further block: an
        engine gives those out before it admits anybody, the simulated worker afterwards."""
        prompt = [num_blocks] * (num_blocks * SIZE) + [(rank * 7 + i * i) % 90 + 6 for i in range(num_own)]
        maker, names = PrefixNames(b"", SIZE), list[bytes]()
        maker.extend(names, maker.root(()), prompt[: num_blocks * SIZE])
        ours = named(num_blocks, num_blocks, len(prompt))
        self.names |= zip((name[:SHORT_BYTES] for name in names), ours, strict=True)
        add(self.worker, f"r{rank}", rank, len(prompt), output_len=num_output, prefix=ours)
        self.driver.engine.add(make_sequence(f"r{rank}", prompt, rank=rank, max_tokens=num_output))

    def drop(self, rank: int) -> None:
        self.worker.drop(RequestId(f"r{rank}"))
        self.driver.engine.drop(RequestId(f"r{rank}"))

    def step(self) -> None:
        """Both make a step and should have done the same, and hold the same afterwards."""
        before = {s.request_id for s in self.worker.running}
        computed = step(self.worker)
        self.num_found += sum(s.num_found for s in self.worker.running if s.request_id not in before)
        self.driver.step()
        chunks = self.driver.runner.plans[-1].chunks
        assert Counter({str(c.sequence.request_id): c.length for c in chunks}) == Counter(computed)
        view = self.driver.engine.view()
        assert (view.free_blocks, view.num_evictions) == (self.worker.free_blocks, 0)
        self._take_names()
        assert self.held[0] == self.held[1]

    def _take_names(self) -> None:
        report = self.worker.report(0.0)
        changes = [(name, True) for name in unpack(report.prefixes_here)]
        changes += [(name, False) for name in unpack(report.prefixes_gone)]
        told = self.driver.engine.take_prefix_changes()
        theirs = [(self.names[name[:SHORT_BYTES]], come) for name, come in told if name[:SHORT_BYTES] in self.names]
        for held, news in zip(self.held, (changes, theirs), strict=True):
            for name, has_come in news:
                (held.add if has_come else held.discard)(name)


@pytest.mark.parametrize("seed", range(5))
def test_prefixes_are_found_and_forgotten_as_by_the_engine(seed: int) -> None:
    """Step by step, under requests that come, end and are dropped, the simulated worker should compute as many tokens
    of each as the engine, have as many free blocks, and hold the same blocks of prefixes."""
    rng, twins = random.Random(seed), Twins()
    num_forgotten = 0
    for rank in range(150):
        if rng.random() < 0.8:
            twins.add(rank, rng.choice((0, 2, 2, 3, 4, 5, 6)), 1 + SIZE * rng.randint(0, 4), rng.randint(1, 4))
        if rng.random() < 0.1:
            twins.drop(rank - rng.randint(0, 3))
        if twins.worker.has_work:
            before = set(twins.held[0])
            twins.step()
            num_forgotten += len(before - twins.held[0])
    assert min(twins.num_found, num_forgotten) >= 5, "too easy to tell"


def test_what_a_writer_leaves_uncomputed_is_computed_by_one_who_waits() -> None:
    """Who waits for a prefix should go on behind what its writer had computed when it left, the others wait for it, and
    with nobody left only that be found."""
    worker, prefix = make_worker(8, has_prefix_cache=True), named(1, 6, 26)
    sequences = [add(worker, f"r{i}", i, 26, prefix=prefix) for i in range(3)]
    assert [step(worker), sequences[1].num_found] == [{"r0": 8}, 6]
    worker.drop(RequestId("r0"))
    assert [step(worker), step(worker)] == [{"r1": 8}, {"r1": 8}]
    assert step(worker) == {"r1": 2, "r2": 2}
    worker.drop(RequestId("r1"))
    worker.drop(RequestId("r2"))
    other = named(2, 6, 26)
    add(worker, "r3", 3, 26, prefix=other)
    step(worker)
    worker.drop(RequestId("r3"))
    late, again = add(worker, "r4", 4, 26, prefix=other), add(worker, "r5", 5, 26, prefix=prefix)
    step(worker)
    assert (late.num_found, again.num_found) == (2, 6)


def test_nobody_waits_for_a_less_urgent_writer() -> None:
    """A more urgent sequence should compute on where the writer of its prefix is, and the writer wait for it."""
    worker, prefix = make_worker(8, has_prefix_cache=True), named(1, 6, 26)
    add(worker, "late", 5, 26, prefix=prefix)
    assert step(worker) == {"late": 8}
    early = add(worker, "early", 1, 26, prefix=prefix)
    assert [step(worker), step(worker)] == [{"early": 8}, {"early": 8}]
    assert early.num_found == 2
    assert step(worker) == {"early": 2, "late": 2}


@pytest.mark.parametrize("num_other", [1, 40])
def test_a_swapped_sequence_needs_its_prefix(num_other: int) -> None:
    """What lies in host memory should be copied back if the prefix before it is still there, else be computed again
    with the prefix."""
    worker, prefix = make_worker(has_prefix_cache=True, num_swap_blocks=40), named(1, 6, 30)
    swapped = add(worker, "swapped", 1, 30, prefix=prefix)
    step(worker)
    worker.keep(swapped.request_id)
    assert swapped.num_swapped == 2, "of its 8 blocks 6 are those of the prefix"
    add(worker, "other", 0, num_other * SIZE - 3, output_len=1)
    assert step(worker)["other"] == num_other * SIZE - 3
    assert step(worker) == {"swapped": 1 if num_other == 1 else 31}
    assert worker.num_swapped_in == (2 if num_other == 1 else 0)
    assert worker.free_swap_blocks == 40

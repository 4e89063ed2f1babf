"""Workers that make equal steps in one go should do exactly what workers do that make each step by itself."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_svc import decisions as d
from scheduler_svc.simulated_run import Limits, Run, Start, plan_run
from scheduler_svc.simulation_trace import CostModel, SimulatedPrefix, SimulatedRequest, SimulatedWorkerSpec
from scheduler_svc.simulator import Simulation
from shared.capacity import blocks_for
from tests.simulation.test_properties import assert_sound

UNTIL_S = 90.0
NEVER = Limits(calm_s=1e9, growth_s=1e9, low_blocks=-1)

lengths = st.integers(1, 90)
times = st.floats(0, 6) | st.integers(0, 24).map(lambda quarter: quarter / 4)
requests = st.lists(
    st.builds(
        lambda arrival_s, prompt_len, output_len, cancel_after_s, **more: SimulatedRequest(
            arrival_s=arrival_s,
            prompt_len=prompt_len,
            max_tokens=output_len + 7,
            output_len=output_len,
            cancel_s=None if cancel_after_s is None else arrival_s + cancel_after_s,
            **more,
        ),
        times,
        lengths,
        lengths,
        st.none() | times,
        n=st.sampled_from([1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 1]),
        prefix=st.none() | st.builds(SimulatedPrefix, st.integers(0, 2), st.sampled_from([8, 40])),
        timeout_s=st.sampled_from([600.0, 5.0]),
    ),
    min_size=1,
    max_size=16,
)
workers = st.lists(
    st.builds(
        SimulatedWorkerSpec,
        num_blocks=st.integers(15, 60),
        block_size=st.sampled_from([1, 4, 8, 16]),
        max_num_seqs=st.integers(1, 8),
        num_swap_blocks=st.sampled_from([0, 5, 60]),
        max_num_batched_tokens=st.sampled_from([4, 64]),
        has_prefix_cache=st.booleans(),
        start_s=times,
        death_s=st.none() | st.floats(3, 20),
    ),
    min_size=1,
    max_size=3,
)
# Round durations let steps of several workers, reports and timers fall on one moment.
costs = st.builds(
    CostModel,
    step_s=st.sampled_from([0.0625, 0.125]) | st.floats(0.01, 0.2),
    token_s=st.sampled_from([0.0, 0.03125]) | st.floats(0, 0.01),
    block_copy_s=st.sampled_from([0.0, 0.03125]) | st.floats(0, 0.01),
    report_delay_s=st.sampled_from([0.0, 0.125]) | st.floats(0.001, 0.3),
    inbox_delay_s=st.sampled_from([0.0, 0.125]) | st.floats(0.001, 0.3),
)


def run(can_jump: bool, *trace: Any) -> tuple[Any, ...]:
    """All that can be known of a run: result, each event with its time and decisions, and what is left. Each block is
    accounted for at any time."""
    arrivals, specs, cost, changes_s = trace
    heard: list[Any] = []

    def note(cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        heard.append((cell.now, event, tuple(decisions)))
        for worker in cell.cell.workers.values():
            assert_sound(worker)

    cell = Simulation(
        arrivals,
        specs,
        cost=cost,
        leader_changes_s=tuple(changes_s),
        on_decisions=note,
        can_jump=can_jump,
    )
    result = cell.run(UNTIL_S)
    left = [(worker.num_steps, worker.free_blocks) for worker in cell.cell.workers.values()]
    records = [record.snapshot() for record in cell.cell.records.values()]
    return heard, result, records, left


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(requests, workers, costs, st.lists(times, max_size=2)))
def test_runs_of_steps_equal_single_steps(trace: tuple[Any, ...]) -> None:
    """Every event the policy hears, its moment, each decision and the result should be the same, bit by bit."""
    assert run(False, *trace) == run(True, *trace)


def test_a_message_without_delay_is_read_after_the_step_that_begins_as_it_comes() -> None:
    """A step that ends at the very moment should be over: one that is made by itself would have ended before."""
    run = Run([1.0, 2.0, 3.0])
    assert run.cut_at(1.0, now=1.0)
    assert [1.0, 2.0] == run.ends_s


def test_a_long_answer_takes_few_runs() -> None:
    """The comparison should be one of two ways: steps that nobody needs to see should really not be made singly."""
    arrivals = [SimulatedRequest(arrival_s=0.1, prompt_len=10, max_tokens=900, output_len=900)]
    runs = {}
    for can_jump in (False, True):
        cell = Simulation(arrivals, [SimulatedWorkerSpec(num_blocks=100)], can_jump=can_jump)
        assert cell.run(UNTIL_S).num_steps == 900
        runs[can_jump] = sum(worker.num_runs for worker in cell.cell.workers.values())
    assert runs[False] >= 900
    assert runs[True] < 200


@given(st.lists(st.integers(2, 60), min_size=1, max_size=6), st.integers(0, 12), st.sampled_from([1, 2, 7, 16]))
def test_a_run_ends_before_blocks_run_out(known: list[int], free_blocks: int, block_size: int) -> None:
    """A run should be as long as the blocks last, counted sequence by sequence, and not longer."""

    def taken(num_steps: int) -> int:
        return sum(blocks_for(k - 1 + num_steps, block_size) - blocks_for(k - 1, block_size) for k in known)

    expected = max(steps for steps in range(101) if taken(steps) <= free_blocks)
    start = Start(now_s=0.0, step_s=0.5, free_blocks=free_blocks, block_size=block_size)
    found = plan_run(known, 100, start, NEVER)
    assert expected == (0 if found is None else len(found.ends_s))

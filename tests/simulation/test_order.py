"""Whatever happens in a cell of tiny pools: classes, tenants, seniority and bounds hold, and nobody is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.policy.fairness import QUANTUM_TOKENS
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.simulator import CostModel, SimulatedRequest, SimulatedWorkerSpec, Simulation
from shared.ids import RequestId
from tests.simulation.order_watcher import OrderWatcher
from tests.simulation.traces import TRACES, costs, requests, run_out, worker_specs

MAX_PREEMPTIONS = 3
Workers = list[SimulatedWorkerSpec]
small_ones = st.lists(
    st.builds(
        SimulatedRequest,
        arrival_s=st.floats(0, 6),
        prompt_len=st.just(8),
        max_tokens=st.just(24),
        output_len=st.integers(1, 24),
    ),
    min_size=20,
    max_size=60,
)
MAX_SHARED_LEN = 24
shared_sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6)
workers_lists = st.lists(worker_specs(15), min_size=1, max_size=3)


def run(
    arrivals: list[SimulatedRequest],
    workers: Workers,
    cost: CostModel,
    changes_s: tuple[float, ...] = (),
    **rules: float,
) -> Simulation:
    """A cell that has run out, watched all the way."""
    watcher = OrderWatcher(max_preemptions=MAX_PREEMPTIONS, **rules)
    config = PolicyConfig(max_preemptions=MAX_PREEMPTIONS, max_crashes=10, **rules)  # type: ignore[arg-type]
    cell = Simulation(arrivals, workers, cost=cost, config=config, leader_changes_s=changes_s, on_decisions=watcher)
    run_out(cell, len(arrivals))
    return cell


def holds_order(arrivals: list[SimulatedRequest], workers: Workers, cost: CostModel) -> None:
    """Classes and arrival decide who goes out and who gives way; all finish; preemptions are bounded."""
    cell = run(arrivals, workers, cost)
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == cell.result.ended
    assert all(record.preemptions <= MAX_PREEMPTIONS for record in cell.cell.records.values())


def holds_aging(arrivals: list[SimulatedRequest], workers: Workers, cost: CostModel, aging_s: float) -> None:
    """Nobody rises before its time, nor above everybody; all finish."""
    cell = run(arrivals, workers, cost, aging_s=aging_s)
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == cell.result.ended


def holds_passing(small: list[SimulatedRequest], large_s: float, cost: CostModel, passing_s: float) -> None:
    """One large request among equal small ones is passed for a bounded time only; all finish."""
    large = SimulatedRequest(arrival_s=large_s, prompt_len=90, max_tokens=8, output_len=8)
    arrivals = [*small, large]
    cell = run(arrivals, [SimulatedWorkerSpec(num_blocks=15, block_size=8)], cost, passing_s=passing_s)
    assert {RequestId(f"r{i}"): "finished" for i in range(len(arrivals))} == cell.result.ended


def holds_rising(num_better: int) -> None:
    """A low request is served after its windows though better ones never cease to wait."""
    low = SimulatedRequest(arrival_s=0.3, prompt_len=8, max_tokens=8, output_len=8, priority=9)
    better = [
        SimulatedRequest(arrival_s=i * 0.02, prompt_len=8, max_tokens=10, output_len=10) for i in range(num_better)
    ]
    worker = SimulatedWorkerSpec(num_blocks=40, block_size=8, max_num_seqs=2)
    cell = run([*better, low], [worker], CostModel(step_s=0.006), aging_s=0.5)
    low_s = cell.result.end_s[RequestId(f"r{num_better}")]
    assert low_s < max(cell.result.end_s.values()), "all better ones were served first, also those that came later"


def holds_shares(sizes: list[tuple[int, int]], weight: float) -> None:
    """Two tenants that always wait get tokens by weight, to within a quantum and what runs."""
    arrivals = [
        SimulatedRequest(arrival_s=0.0, prompt_len=prompt, max_tokens=output, output_len=output, tenant=tenant)
        for prompt, output in sizes * (1500 // len(sizes))
        for tenant in "ab"
    ]
    config = PolicyConfig(tenant_weights={"a": weight})
    workers = [SimulatedWorkerSpec(num_blocks=200, block_size=8, max_num_seqs=4)]
    cell = Simulation(arrivals, workers, config=config, cost=CostModel(step_s=0.01, token_s=0.0))
    result = cell.run(7.0)
    served = {"a": 0, "b": 0}
    for request_id in dict(result.dispatched):
        record = cell.cell.records[request_id]
        logged = sum(choice.num_tokens for choice in record.choices)
        served[record.summary.tenant] += record.summary.prompt_lens[0] + logged
    bound = QUANTUM_TOKENS + 5 * 2 * MAX_SHARED_LEN
    assert abs(served["a"] / weight - served["b"]) <= bound, f"{served} with weight {weight}"
    assert min(served["a"] / weight, served["b"]) > 2 * bound, "too short a run to tell"


def holds_deadlines(arrivals: list[SimulatedRequest], cost: CostModel) -> None:
    """Late work ends at its deadline, not before it and not much later."""
    cell = run(arrivals, [SimulatedWorkerSpec(num_blocks=15, block_size=8)], cost)
    for index, request in enumerate(arrivals):
        request_id = RequestId(f"r{index}")
        late_s = cell.result.end_s[request_id] - (request.arrival_s + request.timeout_s)
        assert late_s <= 0.5, f"{request_id} ended {late_s} s after its deadline"
        assert cell.result.ended[request_id] == "finished" or late_s >= 0, f"{request_id} ended early"


@TRACES
@given(requests(is_ordered=True, can_expire=True), costs)
def test_late_work_ends_at_its_deadline(arrivals: list[SimulatedRequest], cost: CostModel) -> None:
    """A deadline should end what waits and what runs, within a scan."""
    holds_deadlines(arrivals, cost)


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 100))
@given(shared_sizes, st.sampled_from([0.5, 1.0, 2.0]))
def test_tenants_share_a_class_by_weighted_tokens(sizes: list[tuple[int, int]], weight: float) -> None:
    """However large their requests are, tenants that always wait should get what their weights say."""
    holds_shares(sizes, weight)


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.integers(60, 100))
def test_a_low_class_is_not_starved(num_better: int) -> None:
    """With better requests that never cease to wait, a low one should still be served before the last of them."""
    holds_rising(num_better)


@TRACES
@given(requests(is_ordered=True), workers_lists, costs)
def test_classes_and_arrival_decide(arrivals: list[SimulatedRequest], workers: Workers, cost: CostModel) -> None:
    """A better class should never wait behind a lower one that it could take the place of, equals should go by
    arrival, and each request finish within its bound of preemptions."""
    holds_order(arrivals, workers, cost)


@TRACES
@given(requests(is_ordered=True), workers_lists, costs, st.floats(0.1, 2.0))
def test_waiting_rises_within_its_windows(
    arrivals: list[SimulatedRequest], workers: Workers, cost: CostModel, aging_s: float
) -> None:
    """A request should never overtake a better class before it has waited a window."""
    holds_aging(arrivals, workers, cost, aging_s)


@TRACES
@given(small_ones, st.floats(0.1, 2.0), costs, st.floats(0.1, 1.0))
def test_passing_is_bounded(small: list[SimulatedRequest], large_s: float, cost: CostModel, passing_s: float) -> None:
    """A request that does not fit should be passed by smaller ones for no longer than the configured time."""
    holds_passing(small, large_s, cost, passing_s)


@TRACES
@given(
    requests(is_ordered=True, can_cancel=True, can_expire=True),
    st.lists(st.floats(0.5, 8), max_size=2),
    st.lists(st.floats(0.2, 12), max_size=3),
    costs,
)
def test_the_order_survives_deaths_deadlines_and_changes_of_leader(
    arrivals: list[SimulatedRequest], deaths_s: list[float], changes_s: list[float], cost: CostModel
) -> None:
    """With one worker that lives, each request should end exactly once, by itself, its client or its deadline, and the
    rules hold for each leader."""
    steady = SimulatedWorkerSpec(num_blocks=15, block_size=8)
    mortal = [replace(steady, start_s=death_s / 2, death_s=death_s) for death_s in deaths_s]
    cell = run(arrivals, [steady, *mortal], cost, tuple(changes_s))
    assert len(arrivals) == len(cell.result.ended)
    for index, request in enumerate(arrivals):
        request_id = RequestId(f"r{index}")
        reason = cell.result.ended[request_id]
        if reason == "deadline":
            assert cell.result.end_s[request_id] >= request.arrival_s + request.timeout_s
        else:
            assert reason == "finished" or (reason == "cancelled" and request.cancel_s is not None)
    assert set() == cell.policy.request_ids


def holds_room(num_swap_blocks: int) -> None:
    """Several that give way in one moment are promised no more host memory than there is."""
    slow = [SimulatedRequest(arrival_s=0.1, prompt_len=30, max_tokens=90, output_len=90, priority=9) for _ in range(4)]
    urgent = [SimulatedRequest(arrival_s=1.5, prompt_len=8, max_tokens=9, output_len=9) for _ in range(4)]
    worker = SimulatedWorkerSpec(num_blocks=60, block_size=8, max_num_seqs=4, num_swap_blocks=num_swap_blocks)
    cell = run(slow + urgent, [worker], CostModel())
    assert ["finished"] * 8 == list(cell.result.ended.values())
    assert cell.result.num_swapped_out > 0, "too easy to tell"


def holds_standing(gap_s: float) -> None:
    """Equals whose growth does not fit: the last in standing gives way, and all finish."""
    arrivals = [
        SimulatedRequest(arrival_s=i * gap_s, prompt_len=8, max_tokens=90, output_len=90, tenant="ab"[i % 2])
        for i in range(30)
    ]
    cell = run(arrivals, [SimulatedWorkerSpec(num_blocks=30, block_size=8, max_num_seqs=5)], CostModel())
    assert ["finished"] * 30 == list(cell.result.ended.values())
    assert len(cell.result.preempted) >= 10, "too easy to tell"


def holds_bounds(urgent_gap_s: float, num_swap_blocks: int) -> None:
    """Urgent arrivals over a pool that preempts anyway: all are served, and nobody gives way too often."""
    slow = [
        SimulatedRequest(arrival_s=i * 0.05, prompt_len=8, max_tokens=90, output_len=90, priority=9) for i in range(30)
    ]
    urgent = [
        SimulatedRequest(arrival_s=1 + i * urgent_gap_s, prompt_len=8, max_tokens=9, output_len=9) for i in range(60)
    ]
    worker = SimulatedWorkerSpec(num_blocks=30, block_size=8, max_num_seqs=5, num_swap_blocks=num_swap_blocks)
    cell = run(slow + urgent, [worker, worker], CostModel())
    assert ["finished"] * 90 == list(cell.result.ended.values())
    assert all(record.preemptions <= MAX_PREEMPTIONS for record in cell.cell.records.values())
    assert len(cell.result.preempted) >= 20, "too easy to tell"


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.integers(12, 40))
def test_room_in_host_memory_is_promised_once(num_swap_blocks: int) -> None:
    """With several told to give way at once, those for whom there is no room should be queued again, and all finish."""
    holds_room(num_swap_blocks)


@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.floats(0.01, 0.1))
def test_the_last_in_standing_gives_way(gap_s: float) -> None:
    """Where blocks run out among equals, no senior one should give way while a junior one stays."""
    holds_standing(gap_s)


@pytest.mark.case(79)
@settings(TRACES, max_examples=max(5, TRACES.max_examples // 10))
@given(st.floats(0.05, 0.15), st.sampled_from([0, 60]))
def test_urgent_requests_over_full_pools_leave_the_cell_sound(urgent_gap_s: float, num_swap_blocks: int) -> None:
    """A flood of urgent arrivals over a pool that preempts anyway should end with everybody served and within bounds,
    and really have preempted."""
    holds_bounds(urgent_gap_s, num_swap_blocks)

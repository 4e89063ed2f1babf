"""Simulated cells whose workers come and go as the scheduler wishes."""

from __future__ import annotations

from scheduler_svc.policy.autoscale import AutoscaleConfig
from scheduler_svc.simulated_autoscaler import Autoscaling
from scheduler_svc.simulation_trace import SimulatedRequest, SimulatedWorkerSpec
from scheduler_svc.simulator import Simulation
from shared.ids import RequestId

SPEC = SimulatedWorkerSpec(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=512)
UNTIL_S = 400.0
BURST = [
    SimulatedRequest(arrival_s=10.0, prompt_len=64, max_tokens=200, output_len=200, tenant=f"t{i % 3}")
    for i in range(200)
]


def run(num_workers: int, autoscaling: Autoscaling | None) -> Simulation:
    cell = Simulation(BURST, [SPEC] * num_workers, autoscaling=autoscaling)
    cell.run(UNTIL_S)
    assert {RequestId(f"r{i}"): "finished" for i in range(200)} == cell.result.ended
    return cell


def scaling(high: int) -> Autoscaling:
    return Autoscaling(config=AutoscaleConfig(min_workers=1, max_workers=high), spec=SPEC, start_s=5.0)


def mean_wait_s(cell: Simulation) -> float:
    return sum(start_s - 10.0 for start_s in cell.result.start_s.values()) / 200


def worker_seconds(cell: Simulation) -> float:
    return 0.5 * sum(sample.num_workers for sample in cell.result.samples)


def test_a_burst_brings_workers_that_leave_again() -> None:
    """All should finish with workers coming within the limit, and only the minimum be left, empty; nothing is lost by
    those that leave."""
    cell = run(1, scaling(6))
    counts = [sample.num_workers for sample in cell.result.samples]
    assert max(counts) == 6
    assert counts[-1] == 1
    (last,) = cell.cell.workers.values()
    assert last.free_blocks == SPEC.num_blocks
    assert cell.policy.num_workers == 1
    assert [choice.num_tokens for record in cell.cell.records.values() for choice in record.choices] == [200] * 200


def test_a_burst_waits_less_than_with_the_minimum_and_costs_less_than_the_maximum() -> None:
    """Between the fixed sizes autoscaling should lie on the better side of both: waits well below one worker's, fewer
    worker-seconds than six that always run."""
    few, many, scaled = run(1, None), run(6, None), run(1, scaling(6))
    assert mean_wait_s(scaled) < mean_wait_s(few) / 2
    assert worker_seconds(scaled) < worker_seconds(many) / 1.5


def test_equal_traces_give_equal_results() -> None:
    """Coming and going should depend on nothing but the inputs."""
    assert run(1, scaling(4)).result == run(1, scaling(4)).result

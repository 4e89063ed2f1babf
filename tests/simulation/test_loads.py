"""What the policy counts report by report, against what follows from the last reports alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc import decisions as d
from scheduler_svc.policy import admission
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.simulator import CostModel, SimulatedRequest, SimulatedWorkerSpec, Simulation
from tests.simulation.traces import TRACES, costs, requests, run_out, worker_specs


@TRACES
@given(
    requests(is_ordered=True, can_cancel=True),
    st.lists(worker_specs(15), min_size=1, max_size=3),
    costs,
    st.sampled_from([None, 0, 1, 20]),
)
def test_a_load_is_the_report_less_all_claims(
    arrivals: list[SimulatedRequest], workers: list[SimulatedWorkerSpec], cost: CostModel, headroom: int | None
) -> None:
    """After each event a worker's load should be its reported free blocks less each request's claim, whichever of them
    were counted in place, again or not at all since its last report."""

    def check(cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        for worker in cell.policy._workers.values():
            if worker.report is not None:
                room = admission.headroom(worker)
                claims = [admission.claim(worker, request, room) for request in worker.assigned.values()]
                free = worker.report.free_blocks - sum(blocks for blocks, _ in claims)
                assert admission.load(worker) == (free, sum(num_seqs for _, num_seqs in claims))

    config = PolicyConfig(admission_headroom=headroom)
    run_out(Simulation(arrivals, workers, config=config, cost=cost, on_decisions=check), len(arrivals))

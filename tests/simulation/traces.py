"""Traces for property tests: arrivals, workers and costs of tiny cells, and how to run one out.

`TRACES` in the environment is how many of them each property is tried on (`make test-policy TRACES=20000`).
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from scheduler_svc.simulator import CostModel, SimulatedRequest, SimulatedWorkerSpec, Simulation, SimulationResult

UNTIL_S = 600.0
TRACES = settings(
    max_examples=int(os.environ.get("TRACES", "40")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def requests(
    draw: st.DrawFn,
    *,
    can_cancel: bool = False,
    max_prompt: int = 60,
    is_ordered: bool = False,
    can_expire: bool = False,
) -> list[SimulatedRequest]:
    """Up to 25 requests within 3 seconds; `is_ordered`: with classes, tenants and users."""
    found = []
    for _ in range(draw(st.integers(1, 25))):
        arrival_s = draw(st.floats(0, 3))
        max_tokens = draw(st.integers(1, 60))
        cancel_s = draw(st.none() | st.floats(0, 6)) if can_cancel else None
        found.append(
            SimulatedRequest(
                arrival_s=arrival_s,
                prompt_len=draw(st.integers(1, max_prompt)),
                max_tokens=max_tokens,
                output_len=draw(st.integers(1, max_tokens)),
                n=draw(st.sampled_from([1, 1, 1, 2, 3])),
                cancel_s=None if cancel_s is None else arrival_s + cancel_s,
                timeout_s=draw(st.sampled_from([0.3, 2.0, 600.0])) if can_expire else 600.0,
                priority=draw(st.sampled_from([0, 0, 1, 5])) if is_ordered else 0,
                tenant=draw(st.sampled_from("ab")) if is_ordered else "t",
                user=draw(st.sampled_from(["", "u"])) if is_ordered else "",
            )
        )
    return found


def worker_specs(min_blocks: int) -> st.SearchStrategy[SimulatedWorkerSpec]:
    """Tiny pools, some with host memory; none dies."""
    return st.builds(
        SimulatedWorkerSpec,
        num_blocks=st.integers(min_blocks, min_blocks + 12),
        block_size=st.just(8),
        max_num_seqs=st.integers(1, 6),
        num_swap_blocks=st.sampled_from([0, 0, 6, 60]),
        preemption_mode=st.sampled_from(["auto", "auto", "swap"]),
        start_s=st.floats(0, 2),
    )


costs = st.builds(
    CostModel,
    step_s=st.floats(0.005, 0.1),
    token_s=st.floats(0, 0.005),
    block_copy_s=st.floats(0, 0.02),
    report_delay_s=st.floats(0.001, 0.3),
    inbox_delay_s=st.floats(0.001, 0.3),
)


def run_out(cell: Simulation, num_requests: int) -> SimulationResult:
    """Run until all have ended and everybody has heard so; for 15 s at least, `UNTIL_S` at most."""
    time_s = 10.0
    while len(cell.result.ended) < num_requests and time_s < UNTIL_S:
        cell.run(time_s)
        time_s += 5.0
    return cell.run(time_s + 5.0)

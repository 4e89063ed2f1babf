"""Small traces and what the policy decides in them, kept as files: a change of the policy is a diff to be read.

`make golden` (`python -m tests.simulation.golden`) writes the files anew.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_svc import decisions as d
from scheduler_svc.decision_lines import encode_step
from scheduler_svc.policy.scheduler import PolicyConfig
from scheduler_svc.simulation_trace import CostModel, SimulatedRequest, SimulatedWorkerSpec
from scheduler_svc.simulator import Simulation

FOLDER = Path(__file__).parent / "golden"
UNTIL_S = 120.0
COST = CostModel(step_s=0.05, token_s=0.0, report_delay_s=0.004, inbox_delay_s=0.002)
SMALL = SimulatedWorkerSpec(num_blocks=12, block_size=8, max_num_seqs=2)


def request(arrival_s: float, tokens: tuple[int, int] = (16, 12), **more: Any) -> SimulatedRequest:
    """`tokens`: of the prompt, and of the output."""
    prompt_len, output_len = tokens
    more = {"max_tokens": output_len} | more
    return SimulatedRequest(arrival_s=arrival_s, prompt_len=prompt_len, output_len=output_len, **more)


def _arrival_order() -> Simulation:
    """Six equal requests, two workers of two slots: who goes where, and who is sent ahead of a slot."""
    return _cell([request(0.1 + 0.01 * i) for i in range(6)], [SMALL, SMALL])


def _wall() -> Simulation:
    """Two that grow beyond what the worker holds: the younger gives way and comes back."""
    return _cell([request(0.1, (16, 60)), request(0.15, (16, 60))], [SMALL])


def _classes() -> Simulation:
    """An urgent request finds all slots taken by less urgent ones, which also wait in line."""
    arrivals = [request(0.1 + 0.01 * i, (8, 40), priority=5) for i in range(4)]
    return _cell([*arrivals, request(0.6, (8, 10), priority=0)], [SMALL])


def _tenants() -> Simulation:
    """One tenant floods, another with twice the weight comes later: shares go by tokens over weight."""
    flood = [request(0.1, (300, 100), tenant="flood") for _ in range(8)]
    late = [request(0.3, (300, 100), tenant="late") for _ in range(5)]
    worker = SimulatedWorkerSpec(num_blocks=150, block_size=8, max_num_seqs=2)
    return _cell([*flood, *late], [worker], PolicyConfig(tenant_weights={"late": 2.0}))


def _large_among_small() -> Simulation:
    """A request that needs nearly the whole worker stands in line, small ones behind it."""
    small = [request(0.2 + 0.05 * i, (8, 8)) for i in range(8)]
    return _cell([request(0.1, (16, 20)), request(0.15, (70, 20)), *small], [SMALL], PolicyConfig(passing_s=0.4))


def _death() -> Simulation:
    """A worker dies with work: its requests are queued again, suspects by now, and run on the other."""
    mortal = SimulatedWorkerSpec(num_blocks=12, block_size=8, max_num_seqs=2, death_s=0.4)
    return _cell([request(0.1 + 0.01 * i, (8, 30)) for i in range(4)], [mortal, SMALL])


def _endings() -> Simulation:
    """One that never fits, one cancelled while it waits, one whose time runs out, and a new leader in between."""
    arrivals = [
        request(0.1, (90, 20)),
        request(0.2, (8, 60)),
        request(0.21, (8, 60)),
        request(0.22, cancel_s=0.5),
        request(0.23, timeout_s=1.2),
    ]
    return _cell(arrivals, [SMALL], leader_changes_s=(2.0,))


SCENARIOS: dict[str, Callable[[], Simulation]] = {
    "arrival_order": _arrival_order,
    "wall": _wall,
    "classes": _classes,
    "tenants": _tenants,
    "large_among_small": _large_among_small,
    "death": _death,
    "endings": _endings,
}


def _cell(
    arrivals: list[SimulatedRequest],
    workers: list[SimulatedWorkerSpec],
    config: PolicyConfig | None = None,
    leader_changes_s: tuple[float, ...] = (),
) -> Simulation:
    return Simulation(arrivals, workers, config=config, cost=COST, leader_changes_s=leader_changes_s)


def record(name: str) -> str:
    """The scenario's decisions, a line for each event that had some, and how it ended."""
    cell = SCENARIOS[name]()
    lines = [json.dumps({"scenario": name, "about": SCENARIOS[name].__doc__})]

    def note(cell: Simulation, event: d.Event, decisions: list[d.Decision]) -> None:
        if decisions:
            line = json.loads(encode_step(round(cell.now, 6), event, decisions))
            del line["is"]
            lines.append(json.dumps(line))

    cell.watch(note)
    result = cell.run(UNTIL_S)
    ends = {"ended": Counter(result.ended.values()), "preempted": len(result.preempted), "at_s": result.end_s}
    lines.append(json.dumps(ends | {"at_s": {i: round(at_s, 6) for i, at_s in result.end_s.items()}}))
    return "\n".join(lines) + "\n"


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.jsonl"


def main() -> None:
    """Write all files, and remove what belongs to no scenario."""
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.jsonl"):
        if path.stem not in SCENARIOS:
            path.unlink()
    for name in SCENARIOS:
        text = record(name)
        state = "same" if path_of(name).exists() and path_of(name).read_text() == text else "written"
        path_of(name).write_text(text)
        print(f"{state}: {path_of(name).relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()

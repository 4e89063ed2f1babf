"""The policy's decisions in a handful of small traces, as they were when somebody last looked at them."""

from __future__ import annotations

import json

import pytest

from tests.simulation.golden import FOLDER, SCENARIOS, path_of, record


@pytest.mark.parametrize("name", SCENARIOS)
def test_decisions_are_those_that_were_looked_at(name: str) -> None:
    """The policy should decide as the file says. If the change is meant: `make golden`, and read the diff."""
    assert path_of(name).read_text() == record(name)


def test_each_file_has_a_scenario_and_decides_something() -> None:
    """No file should be left over, and none be so small that every policy would pass."""
    assert sorted(path.stem for path in FOLDER.glob("*.jsonl")) == sorted(SCENARIOS)
    kinds = set()
    for name in SCENARIOS:
        lines = [json.loads(line) for line in path_of(name).read_text().splitlines()]
        assert len(lines) > 5
        kinds |= {decision for line in lines[1:-1] for decision, _ in line["decisions"]}
    assert {"Dispatch", "Preempt", "Requeue", "Reject", "Abort", "Recheck"} <= kinds

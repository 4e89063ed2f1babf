"""`quire simulate`: seeded traffic, the figures, and the command as a person meets it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quire.simulate.settings import SimulateConfig, TrafficConfig, WorkersConfig
from quire.simulate.summary import Took, fairness, summarize
from quire.simulate.traffic import make_traffic, parse_shared_prefixes, parse_shares, rate_of
from scheduler_svc.simulation_trace import CostModel, Sample, SimulatedRequest, SimulatedWorkerSpec
from scheduler_svc.simulator import Simulation
from shared.errors import ConfigError
from shared.flags import parse


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "simulate", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_one_seed_is_one_traffic() -> None:
    """Equal settings should give equal arrivals, another seed others."""
    workers = WorkersConfig()
    traffic = make_traffic(TrafficConfig(seed=3), workers)
    assert make_traffic(TrafficConfig(seed=3), workers) == traffic
    assert make_traffic(TrafficConfig(seed=4), workers) != traffic


def test_traffic_is_as_it_was_asked_for() -> None:
    """Rate, mean lengths and shares of tenants and classes should come out, as far as 20,000 draws show."""
    traffic = TrafficConfig(
        requests=20_000, rate=50.0, prompt_len=100, output_len=40, tenants=("a", "b:3"), classes=("0:4", "-1:1")
    )
    arrivals = make_traffic(traffic, WorkersConfig())
    assert arrivals[-1].arrival_s == pytest.approx(400, rel=0.05)
    assert sum(r.prompt_len for r in arrivals) / 20_000 == pytest.approx(100, rel=0.05)
    assert sum(r.output_len for r in arrivals) / 20_000 == pytest.approx(40, rel=0.05)
    assert sum(r.tenant == "b" for r in arrivals) / 20_000 == pytest.approx(0.75, abs=0.02)
    assert sum(r.priority == -1 for r in arrivals) / 20_000 == pytest.approx(0.2, abs=0.02)
    assert sorted(r.arrival_s for r in arrivals) == [r.arrival_s for r in arrivals]


def test_bursts_come_together_at_the_same_rate() -> None:
    """With bursts as many requests should arrive at one moment, and no more of them a second than one by one."""
    traffic = TrafficConfig(requests=20_000, rate=50.0, arrivals="bursts", burst=20)
    arrivals = make_traffic(traffic, WorkersConfig())
    assert len({r.arrival_s for r in arrivals}) == 1000
    assert arrivals[-1].arrival_s == pytest.approx(400, rel=0.1)


def test_a_day_has_its_ebb_and_its_flood() -> None:
    """Over a day as many should come as at an even rate, few in its first and last sixths, most in the middle."""
    traffic = TrafficConfig(requests=20_000, rate=50.0, arrivals="daily", day_s=400.0)
    times = [r.arrival_s for r in make_traffic(traffic, WorkersConfig())]
    assert times[-1] == pytest.approx(400, rel=0.05)
    # The integral of 1 - 0.8 cos(2 pi t) over a sixth at the edge is 1/6 - 0.8 sin(pi / 3) / (2 pi) = 0.0564.
    assert sum(t < 400 / 6 for t in times) / 20_000 == pytest.approx(0.0564, abs=0.01)
    assert sum(400 / 3 < t < 800 / 3 for t in times) / 20_000 == pytest.approx(1 / 3 + 2 * 0.1103, abs=0.02)


def test_a_full_load_keeps_all_slots_full() -> None:
    """Requests at load 1 should ask for what workers with full batches give, worked out by hand: 10 + 1 ms a step of 10
    give 500 tokens/s... less the time of prompts."""
    workers = WorkersConfig(workers=2, max_num_seqs=10, step_ms=10.0, token_ms=1.0)
    traffic = TrafficConfig(load=1.0, prompt_len=100, output_len=50)
    # 50 tokens at 20 ms a step of 10, and 100 prompt tokens of 1 ms: 0.2 s of a worker for each request
    assert rate_of(traffic, workers) == pytest.approx(10.0)


def test_prompts_share_prefixes_as_often_as_asked_for() -> None:
    """Prefixes should come by Zipf's law in front of what comes without, and leave all else as it is."""
    plain = make_traffic(TrafficConfig(requests=5000), WorkersConfig())
    traffic = TrafficConfig(requests=5000, shared_prefixes="4:64", prefix_skew=1.0)
    arrivals = make_traffic(traffic, WorkersConfig())
    assert plain == [replace(r, prefix=None, prompt_len=r.prompt_len - 64) for r in arrivals]
    counts = Counter(r.prefix.number for r in arrivals if r.prefix is not None)
    assert counts.total() == 5000
    for number, share in enumerate((12 / 25, 6 / 25, 4 / 25, 3 / 25)):
        assert counts[number] / 5000 == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    "given", ["5", "5:", ":5", "0:5", "5:0", "-1:5", "a:b", "1:2:3", "1:1000000", "1:" + "9" * 5000]
)
def test_bad_prefixes_are_named(given: str) -> None:
    """What is not N:TOKENS should be refused with flag and text, however long."""
    with pytest.raises(ConfigError, match=f"--shared-prefixes={given[:20]}.*: must be N:TOKENS"):
        parse_shared_prefixes(given)


@pytest.mark.parametrize("given", ["", ":1", "a:0", "a:-1", "a:x", "a:inf", "a:nan"])
def test_bad_shares_are_named(given: str) -> None:
    """A share that is no positive number, or nobody's, should be refused with flag and text."""
    with pytest.raises(ConfigError, match=f"--tenants={given}"):
        parse_shares("--tenants", (given,))


def test_figures_of_a_run_worked_out_by_hand() -> None:
    """Two requests one after the other in a single slot: each time, rate and count should be what pencil and paper
    give."""
    arrivals = [SimulatedRequest(arrival_s=1.0, prompt_len=16, max_tokens=4, output_len=4) for _ in range(2)]
    # Messages take no time. A step takes 1 s: a prompt and its first token take one, 4 tokens take 4.
    cost = CostModel(step_s=1.0, token_s=0.0, report_delay_s=0.0, inbox_delay_s=0.0)
    cell = Simulation(arrivals, [SimulatedWorkerSpec(num_blocks=8, max_num_seqs=1)], cost=cost)
    cell.run(20.0)
    figures = summarize(cell, arrivals, Took(wall_s=0.5, cpu_s=0.4), {})
    assert figures["ended"] == {"finished": 2}
    assert figures["simulated_s"] == 8.0
    assert figures["requests_per_s"] == 0.25
    assert figures["tokens_per_s"] == 1.0
    assert figures["steps"] == 8
    row = figures["classes"]["0"]
    assert (row["requests"], row["wait_s_p50"], row["ttft_s_p50"], row["ttft_s_mean"]) == (2, 2.0, 3.0, 3.0)
    assert (row["wait_s_p99"], row["ttft_s_p99"]) == (pytest.approx(3.96), pytest.approx(4.96))
    assert (figures["tokens_computed"], figures["prefix_hit_percent"]) == (2 * (16 + 3), 0.0)
    assert figures["requests_by_worker"] == {"most": 2, "fewest": 2}
    # 16 + 4 tokens: the second block holds the 17th
    assert figures["kv_use_percent"]["max"] == 25.0


def sample(now_s: float, served: dict[str, int], queued: dict[str, int], priority: int = 0) -> Sample:
    return Sample(
        now_s=now_s,
        used_blocks=0,
        num_blocks=1,
        num_workers=1,
        num_running=1,
        served={(tenant, priority): tokens for tenant, tokens in served.items()},
        queued={(tenant, priority): count for tenant, count in queued.items()},
    )


def test_fairness_counts_only_while_all_wait() -> None:
    """Shares should be those of the seconds in which every tenant of a class waits, over their weights."""
    samples = [sample(0, {"a": 0, "b": 0}, {"a": 1, "b": 0})]
    samples.append(sample(1, {"a": 1000, "b": 0}, {"a": 5, "b": 5}))  # b did not wait before: does not count
    samples += [sample(1 + i, {"a": 1000 + 10 * i, "b": 24 * i}, {"a": 5, "b": 5}) for i in range(1, 5)]
    samples.append(sample(6, {"a": 9999, "b": 96}, {"a": 5, "b": 0}))  # b waits no more: does not count
    found = fairness(samples, {"b": 2.0})["0"]
    assert found == {"window_s": 4.0, "weighted_tokens_per_s": {"a": 10.0, "b": 12.0}, "max_over_min": 1.2}


def test_fairness_of_tenants_that_never_waited_together_is_not_known() -> None:
    """Without a window in which all wait there should be no figure, rather than a good one."""
    samples = [sample(i, {"a": i, "b": i}, {"a": i % 2, "b": 1 - i % 2}) for i in range(20)]
    assert math.isnan(fairness(samples, {})["0"]["max_over_min"])


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    """Text, JSON and plot should come from one run, and the same seed give the same figures again."""
    arguments = ("--requests=150", "--load=1.5", "--tenants", "a", "b", "--classes", "0", "1:3", "--seed=5")
    answer = run(*arguments, f"--json={tmp_path / 'x.json'}", f"--plot={tmp_path / 'plots'}")
    assert answer.returncode == 0, answer.stderr
    for word in ("150 finished", "requests/s", "KV cache", "wait p99", "fairness", "decisions/s"):
        assert word in answer.stdout
    figures = json.loads((tmp_path / "x.json").read_text())["figures"]
    assert figures["ended"] == {"finished": 150}
    assert set(figures["classes"]) == {"0", "1"}
    (plot,) = (tmp_path / "plots").glob("*.svg")
    assert plot.read_text().count("<polyline") == 6
    again = run(*arguments, f"--json={tmp_path / 'y.json'}")
    assert again.returncode == 0
    other = json.loads((tmp_path / "y.json").read_text())["figures"]
    timed = {name for name in figures if name in ("wall_s", "cpu_s") or "policy" in name}
    assert {n: v for n, v in figures.items() if n not in timed} == {n: v for n, v in other.items() if n not in timed}


def test_autoscaled_workers_are_counted(tmp_path: Path) -> None:
    """With --autoscale the most workers there were and their hours should be among the figures."""
    path = tmp_path / "x.json"
    answer = run("--requests=200", "--workers=1", "--load=4", "--autoscale=1:3", "--start-s=2", f"--json={path}")
    assert answer.returncode == 0, answer.stderr
    assert "workers        3 at most, 0." in answer.stdout
    figures = json.loads(path.read_text())["figures"]
    assert figures["workers_max"] == 3
    hours = figures["simulated_s"] / 3600
    assert hours < figures["worker_hours"] < 3 * hours + 0.01


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers='0': must be"),
        (["--tenants", "a:x"], "--tenants=a:x: must be NAME or NAME:SHARE"),
        (["--tenants", "a", "a"], "--tenants=a: a is there twice"),
        (["--classes", "high"], "--classes=high: a priority is a whole number"),
        (["--json", "/no/such/x.json"], "--json=/no/such/x.json: its folder"),
        (["--plot", "/dev/null/x"], "--plot=/dev/null/x"),
        (["--max-preemptoins", "1"], "did you mean --max-preemptions?"),
        (["--arrivals", "weekly"], "choose from poisson, bursts, daily"),
        (["--shared-prefixes", "8"], "--shared-prefixes=8: must be N:TOKENS, each 1 to 100000, as 20:512"),
        (["--autoscale", "8:2"], "--autoscale=8:2: must be MIN:MAX"),
    ],
)
def test_wrong_settings_are_named(arguments: list[str], words: str) -> None:
    """A wrong setting should be one line and exit code 2."""
    answer = run(*arguments)
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert words in answer.stderr


def test_help_shows_the_policy_s_flags_too() -> None:
    """What the scheduler's policy can be told should be there to be tried."""
    answer = run("--help")
    assert answer.returncode == 0
    for flag in ("--max-preemptions", "--tenant-weights", "--step-ms", "--classes"):
        assert flag in answer.stdout
    assert parse(SimulateConfig, ["--workers=7"], {}, program="x").fleet.workers == 7

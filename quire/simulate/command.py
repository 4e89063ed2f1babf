"""`quire simulate`: runs the scheduler's own policy on made-up traffic and simulated workers, faster than time passes.

It prints what clients would see (throughput, waits, TTFT), what workers would do (KV cache in use, preemptions), how
tenants share, and what the policy itself costs. There is no model: a step takes what --step-ms and --token-ms say. The
same seed and settings give the same run. All flags of the scheduler's policy can be set. With --replay there is no
traffic: what a scheduler wrote down with --decision-log is decided once more and compared (exit code 1 if it differs
with the log's own settings).
"""

from __future__ import annotations

import time
from pathlib import Path

from quire.bench import machine, report
from quire.bench.svg import render
from quire.simulate.replay import format_replay, replay
from quire.simulate.run import simulate
from quire.simulate.settings import SimulateConfig
from quire.simulate.show import charts, format_summary
from quire.simulate.summary import Took, summarize
from quire.simulate.traffic import make_traffic
from shared import config
from shared.errors import ConfigError, shorten
from shared.paths import expand


def main(argv: list[str]) -> int:
    """Run the command. Raises `ConfigError`; `QuireError` for a run that comes to a standstill or a bad log."""
    settings = config.load(SimulateConfig, argv, program="quire simulate", description=__doc__ or "")
    if settings.replay:
        found = replay(expand("--replay", settings.replay), settings.policy())
        print(format_replay(found))
        return 0 if found.is_equal or found.changed else 1
    json_path = _output("--json", settings.json)
    folder = report.make_folder("--plot", settings.plot) if settings.plot else None
    requests = make_traffic(settings.traffic, settings.fleet)
    since, cpu_since = time.monotonic(), time.process_time()
    cell = simulate(settings, requests)
    took = Took(wall_s=time.monotonic() - since, cpu_s=time.process_time() - cpu_since)
    figures = summarize(cell, requests, took, settings.scheduling.weights())
    print(format_summary(figures))
    document = {
        "date": report.today(), "machine": machine.describe(), "settings": report.shown(settings), "figures": figures
    }  # fmt: skip
    paths = []
    if json_path is not None:
        json_path.write_text(report.to_text(document), encoding="utf-8")
        paths.append(json_path)
    if folder is not None:
        title = f"{settings.fleet.workers} workers, {len(requests):,} requests, seed {settings.traffic.seed}"
        paths += report.write(folder, "simulate", document, render(title, charts(cell.result.samples)))
    for path in paths:
        print(f"written: {path}")
    return 0


def _output(flag: str, given: str) -> Path | None:
    """The file to write; None if none is wanted. Raises `ConfigError` that names `flag`."""
    if not given:
        return None
    path = expand(flag, given)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{flag}={shorten(given)}: its folder is not there, or it is a folder itself")
    return path

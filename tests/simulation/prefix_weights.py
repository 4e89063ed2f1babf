"""What placement by prefix is worth, by the weight of load against prefixes, as the table of docs/simulate.md.

python -m tests.simulation.prefix_weights [settings of quire simulate, as --seed 1]
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from quire.simulate.run import simulate
from quire.simulate.settings import SimulateConfig
from quire.simulate.summary import Took, summarize
from quire.simulate.traffic import make_traffic
from shared.flags import parse

SETTINGS = ("--workers=8", "--requests=2000", "--load=0.35")
TRAFFICS = {
    "even": ("--shared-prefixes=64:512",),
    "one hot": ("--shared-prefixes=64:512", "--prefix-skew=2"),
    "many": ("--shared-prefixes=200:512",),
}
WEIGHTS = (0.0, 8.0, 32.0, 128.0, 1e9)
HEAD = ("prefixes", "tokens a sequence", "hit rate", "tokens computed", "TTFT mean", "TTFT p99", "requests by worker")


def figures_of(settings: SimulateConfig) -> dict[str, Any]:
    """Of one run."""
    requests = make_traffic(settings.traffic, settings.fleet)
    return summarize(simulate(settings, requests), requests, Took(wall_s=0.0, cpu_s=0.0), {})


def row(name: str, weight: str, figures: dict[str, Any]) -> str:
    """A line of the table."""
    times, spread = figures["classes"]["0"], figures["requests_by_worker"]
    cells = (
        name,
        weight,
        f"{figures['prefix_hit_percent']:.1f} %",
        f"{figures['tokens_computed']:,}",
        f"{times['ttft_s_mean']:.3f} s",
        f"{times['ttft_s_p99']:.3f} s",
        f"{spread['fewest']} to {spread['most']}",
    )
    return "| " + " | ".join(cells) + " |"


def main(argv: list[str]) -> None:
    """Print the table as it grows."""
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    for name, traffic in TRAFFICS.items():
        settings = parse(SimulateConfig, [*SETTINGS, *traffic, *argv], {}, program="prefix_weights")
        for weight in WEIGHTS:
            shown = "∞" if weight == WEIGHTS[-1] else f"{weight:g}"
            print(row(name, shown, figures_of(dataclasses.replace(settings, tokens_per_sequence=weight))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

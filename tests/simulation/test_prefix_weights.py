"""The trade-off of placement by prefix, as the table of docs/simulate.md shows it, with fewer requests."""

from __future__ import annotations

from functools import cache
from typing import Any

from quire.simulate.settings import SimulateConfig
from shared.flags import parse
from tests.simulation.prefix_weights import HEAD, figures_of, row

TRAFFIC = ("--workers=4", "--requests=150", "--load=0.4", "--shared-prefixes=16:256", "--prefix-skew=2")


@cache
def figures(*more: str) -> dict[str, Any]:
    found = figures_of(parse(SimulateConfig, [*TRAFFIC, *more], {}, program="x"))
    assert found["ended"] == {"finished": 150}
    return found


def test_weight_moves_from_prefixes_to_even_load() -> None:
    """Placed by prefix alone more should be found and less computed, by load alone workers get more even shares."""
    by_prefix, by_load = figures("--tokens-per-sequence=0"), figures("--tokens-per-sequence=1e9")
    assert by_prefix["prefix_hit_percent"] > by_load["prefix_hit_percent"] + 3
    assert by_prefix["tokens_computed"] < by_load["tokens_computed"]
    spreads = [found["requests_by_worker"] for found in (by_prefix, by_load)]
    assert spreads[0]["most"] - spreads[0]["fewest"] > 2 * (spreads[1]["most"] - spreads[1]["fewest"])


def test_without_a_cache_everything_is_computed() -> None:
    """With the cache off nothing should be found, and all tokens but the last of each answer be computed."""
    found, cached = figures("--no-enable-prefix-caching"), figures("--tokens-per-sequence=0")
    assert found["prefix_hit_percent"] == 0.0
    assert found["tokens_computed"] > cached["tokens_computed"] + 100 * 256
    assert found["classes"]["0"]["ttft_s_mean"] > cached["classes"]["0"]["ttft_s_mean"]


def test_a_row_has_a_cell_for_each_column() -> None:
    """The table should be one."""
    assert row("even", "32", figures("--tokens-per-sequence=0")).count("|") == len(HEAD) + 1

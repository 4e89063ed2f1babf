"""The ablation: both sides are measured on real cells, and the table says what was reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench import ablation
from quire.bench.mechanisms import MECHANISMS
from quire.bench.random_model import write_random_model
from shared.errors import ConfigError


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model("test", tmp_path_factory.mktemp("models") / "test-llama")


def test_both_sides_are_measured(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A known prefix should take fewer blocks with the cache than without, int8 should hold more tokens, and table,
    JSON and plot should say so."""
    out = tmp_path / "out.json"
    argv = [str(model_folder), "--mechanism", "prefix-200", "kv-int8", "--repeats=1", "--highest-token-id=500"]
    argv += ["--serve-flags=--num-threads=1 --dtype=bfloat16", f"--json={out}", f"--plot={tmp_path}"]
    assert ablation.main(argv) == 0
    shown = capsys.readouterr().out
    assert "| prefix-200 | KV blocks in use, most |" in shown
    results = json.loads(out.read_text())["results"]
    assert results["prefix-200"]["on"]["most_blocks_used"] < 0.6 * results["prefix-200"]["off"]["most_blocks_used"]
    assert results["kv-int8"]["on"]["kv_tokens"] > 1.5 * results["kv-int8"]["off"]["kv_tokens"]
    assert len(list(tmp_path.glob("ablation-*.svg"))) == 1


def test_the_table_says_what_was_reached() -> None:
    """Aims should be compared with on / off, in their direction; what has no aim has none in the table."""
    mechanism = MECHANISMS["prefix-200"]
    side = {"ttft_ms_p50": 100.0, "most_blocks_used": 100, "wall_s": 2.0}
    table = ablation._table([mechanism], {"prefix-200": {"off": side, "on": side | {"ttft_ms_p50": 30.0}}})
    _, _, ttft, blocks, wall = table.splitlines()
    assert ttft == "| prefix-200 | TTFT, median | 100 ms | 30 ms | 0.300 | −68 % | ≤ 0.32 | yes |"
    assert blocks.endswith("| 1.000 | −66 % | ≤ 0.34 | no |")
    assert wall.endswith("| 1.000 | – | – | – |")


@pytest.mark.parametrize(("on", "reached"), [(0.95, "no"), (0.97, "yes")])
def test_some_aims_are_for_the_figure_itself(on: float, reached: str) -> None:
    """Memory that is 97 % full is what was aimed at, whatever share it was before."""
    off = {"live_of_used": 0.2, "live_of_all": 0.1}
    result = {"off": off, "on": {"live_of_used": on, "live_of_all": on}}
    table = ablation._table([MECHANISMS["paged-4-full"]], {"paged-4-full": result})
    assert table.splitlines()[2].endswith(f"| 60–68 → 94–98 % | ≥ 0.96 on | {reached} |")


def test_a_price_adds_what_a_million_tokens_cost() -> None:
    """With a price each row should say what tokens cost on both sides, where their rate is known; without one nothing
    should be added."""
    mechanism, other = MECHANISMS["prefix-200"], MECHANISMS["kv-int8"]
    side = {"ttft_ms_p50": 100.0, "most_blocks_used": 100, "wall_s": 2.0}
    results = {
        "prefix-200": {"off": side | {"output_tokens_per_s": 100.0}, "on": side | {"output_tokens_per_s": 250.0}},
        "kv-int8": {"off": {"kv_tokens": 1}, "on": {"kv_tokens": 2}},
    }
    plain = ablation._table([mechanism, other], results)
    ablation._add_costs(results, 3.6)
    head, _, first, *_, last = ablation._table([mechanism, other], results, has_cost=True).splitlines()
    assert head.endswith("| reached | a million tokens, off | on |")
    assert first.endswith("| 10 | 4 |")
    assert last.endswith("| yes | – | – |")
    assert ablation._table([mechanism, other], results) == plain
    ablation._add_costs(unpriced := {"m": {"on": {"output_tokens_per_s": 9.0}}}, 0.0)
    assert unpriced == {"m": {"on": {"output_tokens_per_s": 9.0}}}


@pytest.mark.parametrize(
    "argv",
    [["--mechanism=magic"], ["--price-per-hour=-1"], ["--json=/nowhere/at/all.json"], ["--serve-flags=--no-such"]],
)
def test_wrong_settings_are_refused_before_anything_starts(argv: list[str], model_folder: Path) -> None:
    """A wrong name, folder or flag should be told at once."""
    with pytest.raises(ConfigError):
        ablation.main([str(model_folder), *argv])

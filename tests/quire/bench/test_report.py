"""Rows and tables, from results that were made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from quire.bench import report, rows
from quire.bench.bounds import STORAGES, Bounds
from quire.bench.limits import Limits
from quire.bench.model_shapes import SHAPES
from quire.bench.peers import PEERS, XEON_AMX, ZEN4, Peer, kind_of
from quire.bench.rows import Aim, Measured, Row
from quire.bench.serve import BenchConfig

MACHINE = Limits(threads=2, read_one=24e9, read=35.4e9, f32=238e9, bf16=473e9, int8=941e9)
ROWS = rows.rows_for(ZEN4)
BOUNDS = {"q05b-bf16": Bounds(SHAPES["q05b"], STORAGES["bf16"], MACHINE)}


def make_result(**changes: Any) -> dict[str, Any]:
    median = {"tpot_ms_p50": 30.0, "ttft_ms_p50": 230.0}
    fields = {"start_s": 4.0, "memory_beyond_bytes": 5e8, "workloads": {"w1": {"median": median, "errors": []}}}
    return fields | {"peer": {}} | changes


def make_row(**changes: Any) -> Row:
    return Row(**{"label": "r", "configuration": "c", "figure": "start_s", "unit": "s"} | changes)


def make_measured(ours: float, bound: float | None = None, **row: Any) -> Measured:
    return Measured(row=make_row(**row), ours=ours, bound=bound, peer_here=None, has_errors=False)


def find(measured: list[Measured], label: str) -> Measured:
    return next(m for m in measured if m.row.label == label)


def test_rows_take_their_figures() -> None:
    """Each row with a figure should be there in its unit, with the bound of this machine; the others should not."""
    measured = rows.evaluate(ROWS, {"q05b-bf16": make_result()}, BOUNDS)
    assert {m.row.label for m in measured} == {
        "w1 time per output token", "w1 time to first token", "resident memory beyond weights + KV",
        "start to ready, second start",
    }  # fmt: skip
    tpot = find(measured, "w1 time per output token")
    assert (tpot.ours, round(tpot.bound or 0, 1)) == (30.0, 28.0)
    assert tpot.share == pytest.approx(28.0 / 30.0, abs=0.001)
    assert find(measured, "resident memory beyond weights + KV").ours == 0.5


def test_every_row_names_what_is_measured() -> None:
    """No row should ask for a configuration, a workload or a figure that is never measured."""
    from quire.bench.statistics import Trace, summarize, summarize_intruder
    from quire.bench.table import CONFIGURATIONS

    trace = Trace(sent_at=0.0, arrivals=[1.0, 2.0], num_output_tokens=2)
    figures = summarize([trace], 1.0) | summarize_intruder([trace], trace)
    for row in ROWS:
        assert row.configuration in CONFIGURATIONS
        assert row.figure in figures if row.workload else row.figure in ("start_s", "memory_beyond_bytes")


def test_references_are_those_of_the_kind_of_machine() -> None:
    """Every reference should belong to a row, and a machine of no known kind should have none, and no aim by them."""
    places = {(row.label, row.configuration) for row in ROWS}
    assert all(set(known) <= places for known in PEERS.values())
    assert kind_of("vendor_id : AuthenticAMD\nflags : sse avx512_bf16 fma\n") == ZEN4
    assert kind_of("vendor_id : GenuineIntel\nflags : amx_bf16 amx_int8\n") == XEON_AMX
    assert kind_of("vendor_id : GenuineIntel\nflags : sse2\n") is None
    (m, *_) = (m for m in rows.evaluate(rows.rows_for(None), {"q05b-bf16": make_result()}, BOUNDS)
               if m.row.label == "w1 time to first token")  # fmt: skip
    assert (m.row.peer, m.limit, m.is_reached) == (None, None, None)


@pytest.mark.parametrize(
    ("aim", "is_higher_better", "ours", "expected"),
    [
        (Aim(factor=1.08, of_bound=True), False, 10.7, True),
        (Aim(factor=1.08, of_bound=True), False, 10.9, False),
        (Aim(factor=0.5, of_peer=True), False, 50, True),
        (Aim(factor=1.5, of_peer=True), True, 149, False),
        (Aim(factor=1.5, of_peer=True), True, 150, True),
        (Aim(factor=5), False, 5.1, False),
        (None, False, 5.1, None),
    ],
)
def test_an_aim_is_reached_or_not(aim: Aim | None, is_higher_better: bool, ours: float, expected: bool | None) -> None:
    """The limit should be the factor times the bound, the peer's figure or nothing."""
    peer = Peer(name="p", figure=100)
    assert make_measured(ours, 10, aim=aim, is_higher_better=is_higher_better, peer=peer).is_reached is expected


def test_failed_requests_reach_nothing() -> None:
    """A figure with errors behind it should be marked and count as no success."""
    result = make_result(workloads={"w1": {"median": {"tpot_ms_p50": 1.0}, "errors": ["HTTP 500"]}})
    (m, *_) = rows.evaluate(ROWS, {"q05b-bf16": result}, BOUNDS)
    assert m.is_reached is None
    assert "1.00 ms (errors!)" in report.results_table([m])


def test_table_is_markdown() -> None:
    """Every line should have the same number of cells, and the cells what was measured."""
    measured = rows.evaluate(ROWS, {"q05b-bf16": make_result()}, BOUNDS)
    lines = report.results_table(measured).splitlines()
    assert {line.count("|") for line in lines} == {len(report.HEAD) + 1}
    assert lines[2] == ("| w1 time per output token, q05b-bf16 | 30.0 ms | 28.0 ms | 93 % | ≤ 1.08 × bound | yes "
                        "| 28.5 ms (vLLM CPU + zentorch, no HTTP) |")  # fmt: skip
    assert {line.count("|") for line in report.bounds_table(BOUNDS).splitlines()} == {10}


def test_a_peer_of_this_run_gets_its_columns() -> None:
    """The peer's figure should stand beside ours with the ratio."""
    peer = {"w1": {"median": {"tpot_ms_p50": 40.0}, "errors": []}}
    measured = rows.evaluate(ROWS, {"q05b-bf16": make_result(peer=peer)}, BOUNDS)
    lines = report.results_table(measured).splitlines()
    assert lines[2].endswith("| 40.0 ms | 0.75 |")
    assert lines[-1].endswith("| – | – |")


def test_without_limits_there_are_no_bounds() -> None:
    """Figures should be shown without a bound and a share, and the aim that needs it be open."""
    (m, *_) = rows.evaluate(ROWS, {"q05b-bf16": make_result()}, {})
    assert (m.bound, m.share, m.is_reached) == (None, None, None)
    assert "| 30.0 ms | – | – |" in report.results_table([m])


def test_files_say_when_and_of_what(tmp_path: Path) -> None:
    """Names should hold date and commit, and the files what was given."""
    document = {"date": "2030-01-02", "machine": {"commit": "abc1234"}, "figures": [{"lost": math.nan, "kept": 1.5}]}
    measured = rows.evaluate(ROWS, {"q05b-bf16": make_result()}, BOUNDS)
    paths = report.write(
        report.make_folder("--out", str(tmp_path / "new")), "table", document, report.draw_table("t", measured)
    )
    assert [path.name for path in paths] == ["table-2030-01-02-abc1234.json", "table-2030-01-02-abc1234.svg"]
    assert json.loads(paths[0].read_text()) == document | {"figures": [{"lost": None, "kept": 1.5}]}
    ElementTree.fromstring(paths[1].read_text())
    json.dumps([report.as_json(m) for m in measured], allow_nan=False)


def test_results_hold_no_keys_and_no_paths_of_this_machine() -> None:
    """What was set should be told, but for where the figures went and what opens a server."""
    settings = BenchConfig(base_url="http://127.0.0.1:1", repeats=2, json="/somewhere/x.json", api_key="secret")
    told = report.shown(settings)
    assert told["repeats"] == 2
    assert not {"json", "api_key"} & told.keys()
    assert "secret" not in str(told)

"""Results as people read them: a markdown table for README, and a file name that says when and of what."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.bench.bounds import Bounds
from quire.bench.rows import Measured, lengths
from quire.bench.svg import Bars, render
from shared.errors import ConfigError, shorten
from shared.paths import expand

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HEAD = ("", "ours", "bound of this run", "our share of it", "aim", "reached", "reference (other program, elsewhere)")
HEAD_PEER = ("peer in this run", "ours / peer")
SHORT_NAMES = {"time to first token": "TTFT", "time per output token": "TPOT", "resident memory": "memory"}
BOUND_ROWS = (1, 8, 32)
BOUND_CONTEXT = 256
BOUND_PROMPTS = (128, 2048)
NOT_SHOWN = {"api_key", "peer_api_key", "json", "plot", "out", "cache_dir"}
"""Settings that have no place in results: keys, and where files of this machine lie."""


def today() -> str:
    """The date, UTC, as file names have it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def shown(settings: DataclassInstance) -> dict[str, Any]:
    """What was set, for the results of a command."""
    return {name: value for name, value in asdict(settings).items() if name not in NOT_SHOWN}


def make_folder(flag: str, given: str) -> Path:
    """The folder to write to, which is there from now on. Raises `ConfigError` that names `flag`."""
    folder = expand(flag, given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}={shorten(given)}: {error.strerror}") from None
    return folder


def write(folder: Path, name: str, document: Mapping[str, Any], drawing: str) -> list[Path]:
    """`document` as JSON and `drawing` as SVG in `folder` (which is there), under names with date and commit; the files
    written.

    Args:
        document: must hold "date", and "commit" in its "machine".
    """
    stem = f"{name}-{document['date']}-{document['machine']['commit'] or 'unknown'}"
    paths = [folder / f"{stem}.json", folder / f"{stem}.svg"]
    paths[0].write_text(to_text(document), encoding="utf-8")
    paths[1].write_text(drawing, encoding="utf-8")
    return paths


def to_text(document: Mapping[str, Any]) -> str:
    """`document` as the text of a JSON file; what is no number becomes null."""
    return json.dumps(_without_nan(document), indent=2, allow_nan=False) + "\n"


def _without_nan(value: Any) -> Any:
    """`value` with None for what is no number: JSON has no word for it."""
    if isinstance(value, Mapping):
        return {name: _without_nan(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def results_table(measured: Sequence[Measured]) -> str:
    """The results as a markdown table, with the peer of this run where there is one."""
    has_peer = any(m.peer_here is not None for m in measured)
    head = HEAD + HEAD_PEER if has_peer else HEAD
    return _markdown(head, [_cells(m, has_peer=has_peer) for m in measured])


def bounds_table(bounds: Mapping[str, Bounds]) -> str:
    """What the machine's limits allow at best, by configuration."""
    head = ["least time by the limits"]
    head += [f"step of {rows}, ms" for rows in BOUND_ROWS]
    head += [f"prefill {length}, s" for length in BOUND_PROMPTS]
    head += ["w1, ms/token", "w2, tokens/s", "w3, s"]
    return _markdown(head, [[name, *map(_number, bound_figures(known).values())] for name, known in bounds.items()])


def bound_figures(bounds: Bounds) -> dict[str, float]:
    """The bounds that are shown, by name, in the units of their names."""
    (w1,), w2 = lengths("w1"), lengths("w2")
    steps = {f"step_{rows}_ms": 1000 * bounds.step(rows, BOUND_CONTEXT) for rows in BOUND_ROWS}
    prompts = {f"prefill_{length}_s": bounds.prefill([length]) for length in BOUND_PROMPTS}
    return steps | prompts | {
        "w1_ms_per_token": 1000 * bounds.time_per_output_token(w1),
        "w2_tokens_per_s": sum(num_out for _, num_out in w2) / bounds.wall(w2),
        "w3_wall_s": bounds.wall(lengths("w3")),
    }  # fmt: skip


def draw_table(title: str, measured: Sequence[Measured]) -> str:
    """Two bar charts as SVG: shares of the bounds, and the aims' share (1: just reached, more is better)."""
    shares = {_name(m): m.share for m in measured if m.share is not None}
    aims = {
        _name(m): m.ours / m.limit if m.row.is_higher_better else m.limit / m.ours for m in measured if m.limit
    }  # fmt: skip
    charts = [Bars(title="share of the machine's limit", bars=shares, mark=1.0)] if shares else []
    charts += [Bars(title="how far the aim is reached (1: just)", bars=aims, mark=1.0)] if aims else []
    return render(title, charts or [Bars(title="figures", bars={_name(m): m.ours for m in measured})])


def as_json(measured: Measured) -> dict[str, Any]:
    """One row for the JSON document."""
    row = measured.row
    return {
        "label": row.label, "configuration": row.configuration, "unit": row.unit, "ours": measured.ours,
        "bound": measured.bound, "share_of_bound": measured.share, "aim": measured.limit,
        "is_reached": measured.is_reached, "has_errors": measured.has_errors, "peer_in_this_run": measured.peer_here,
        "reference": None if row.peer is None else {"name": row.peer.name, "figure": row.peer.figure},
    }  # fmt: skip


def _cells(m: Measured, *, has_peer: bool) -> list[str]:
    row, unit = m.row, m.row.unit
    cells = [
        f"{row.label}, {row.configuration}",
        f"{_number(m.ours)} {unit}" + (" (errors!)" if m.has_errors else ""),
        "–" if m.bound is None else f"{_number(m.bound)} {unit}",
        "–" if m.share is None else f"{100 * m.share:.0f} %",
        _describe_aim(m),
        {None: "–", True: "yes", False: "no"}[m.is_reached],
        "–" if row.peer is None else f"{_number(row.peer.figure)} {unit} ({row.peer.name})",
    ]
    if has_peer:
        here = m.peer_here
        cells += ["–", "–"] if here is None else [f"{_number(here)} {unit}", f"{m.ours / here:.2f}"]
    return cells


def _describe_aim(m: Measured) -> str:
    aim = m.row.aim
    if aim is None:
        return "–"
    sign = "≥" if m.row.is_higher_better else "≤"
    if aim.of_bound or aim.of_peer:
        return f"{sign} {aim.factor:g} × {'bound' if aim.of_bound else 'reference'}"
    return f"{sign} {aim.factor:g} {m.row.unit}"


def _name(m: Measured) -> str:
    name = f"{m.row.label}, {m.row.configuration.removeprefix('q05b-')}"
    for long, short in SHORT_NAMES.items():
        name = name.replace(long, short)
    return name


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

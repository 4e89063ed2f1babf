"""The rows of the results table: which figure, its bound, what is aimed at, and what others gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.bench import workloads
from quire.bench.bounds import Bounds, Lengths
from quire.bench.peers import PEERS, Peer

Result = Mapping[str, Any]
"""What was measured of one configuration, as `table.py` writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """At most (at least, where higher is better) `factor` times the bound or the peer's figure; of neither: itself."""

    factor: float
    of_bound: bool = False
    of_peer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`figure` is a key of a workload's medians, or of the result itself when there is no workload; shown times
    `scale`. `bound` is in the unit shown; `peer` is the reference for machines like this one, if there is one."""

    label: str
    configuration: str
    figure: str
    unit: str
    workload: str = ""
    scale: float = 1.0
    bound: Callable[[Bounds], float] | None = None
    is_higher_better: bool = False
    aim: Aim | None = None
    peer: Peer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row with its figures, in the row's unit; `peer_here` is the peer's of this very run."""

    row: Row
    ours: float
    bound: float | None
    peer_here: float | None
    has_errors: bool

    @property
    def share(self) -> float | None:
        """How much of what the machine allows was reached; 1 is all."""
        if self.bound is None:
            return None
        return self.ours / self.bound if self.row.is_higher_better else self.bound / self.ours

    @property
    def limit(self) -> float | None:
        """What is aimed at, in the row's unit; None when it is not known or there is none."""
        aim = self.row.aim
        if aim is None:
            return None
        if aim.of_bound:
            return None if self.bound is None else aim.factor * self.bound
        if aim.of_peer:
            return None if self.row.peer is None else aim.factor * self.row.peer.figure
        return aim.factor

    @property
    def is_reached(self) -> bool | None:
        """Whether the aim is; None when it is not known or there is none."""
        if self.limit is None or self.has_errors:
            return None
        return self.ours >= self.limit if self.row.is_higher_better else self.ours <= self.limit


def rows_for(kind: str | None) -> tuple[Row, ...]:
    """All rows, with the references of a kind of machine (`peers.py`); None: there are none."""
    known = PEERS.get(kind or "", {})
    return tuple(replace(row, peer=known.get((row.label, row.configuration))) for row in ROWS)


def evaluate(rows: Sequence[Row], results: Mapping[str, Result], bounds: Mapping[str, Bounds]) -> list[Measured]:
    """Those rows for which there is a figure.

    Args:
        results: by configuration.
        bounds: by configuration; those are missing whose limits are not known.
    """
    measured = []
    for row in rows:
        result = results.get(row.configuration, {})
        ours = _find(row, result, "workloads")
        if ours is None:
            continue
        known = bounds.get(row.configuration)
        report = result["workloads"].get(row.workload, {})
        measured.append(
            Measured(
                row=row,
                ours=ours,
                bound=row.bound(known) if row.bound is not None and known is not None else None,
                peer_here=_find(row, result, "peer"),
                has_errors=bool(report.get("errors")),
            )
        )
    return measured


def _find(row: Row, result: Result, whose: str) -> float | None:
    if not row.workload:
        return row.scale * result[row.figure] if whose == "workloads" and row.figure in result else None
    median = result.get(whose, {}).get(row.workload, {}).get("median", {})
    return row.scale * median[row.figure] if row.figure in median else None


def lengths(name: str) -> list[Lengths]:
    """Tokens in and out of each request of workload `name`, its intruder's not."""
    requests = workloads.build(name).requests
    return [(len(request.prompt or ()), request.max_tokens) for request in requests]


def _w1_ms(bounds: Bounds) -> float:
    (request,) = lengths("w1")
    return 1000 * bounds.time_per_output_token(request)


def _w1_first_ms(bounds: Bounds) -> float:
    return 1000 * bounds.prefill([num_in for num_in, _ in lengths("w1")])


def _w2_rate(bounds: Bounds) -> float:
    requests = lengths("w2")
    return sum(num_out for _, num_out in requests) / bounds.wall(requests)


def _w3_wall(bounds: Bounds) -> float:
    return bounds.wall(lengths("w3"))


def _w3_shared_wall(bounds: Bounds) -> float:
    requests = lengths("w3")
    return bounds.wall(requests, num_shared=workloads.W3_PREFIX)


def _w4_first(bounds: Bounds) -> float:
    intruder = workloads.build("w4").intruder
    return bounds.prefill([len(intruder.prompt or ()) if intruder is not None else 0])


def _w1(configuration: str, aim: Aim | None, bound: Callable[[Bounds], float] | None) -> Row:
    return Row(
        label="w1 time per output token", configuration=configuration, workload="w1", figure="tpot_ms_p50", unit="ms",
        bound=bound, aim=aim,
    )  # fmt: skip


def _w2(configuration: str, aim: Aim | None, bound: Callable[[Bounds], float] | None) -> Row:
    return Row(
        label="w2 output", configuration=configuration, workload="w2", figure="output_tokens_per_s", unit="tokens/s",
        is_higher_better=True, bound=bound, aim=aim,
    )  # fmt: skip


def _w3_cached(configuration: str) -> Row:
    return Row(
        label="w3 wall, cold prefix cache", configuration=configuration, workload="w3", figure="wall_s", unit="s",
        bound=_w3_shared_wall, aim=Aim(factor=0.75, of_peer=True),
    )  # fmt: skip


_MEMORY = Row(
    label="resident memory beyond weights + KV", configuration="q05b-bf16", figure="memory_beyond_bytes", unit="GB",
    scale=1e-9, aim=Aim(factor=0.6),
)  # fmt: skip
_START = Row(
    label="start to ready, second start", configuration="q05b-bf16", figure="start_s", unit="s",
    aim=Aim(factor=5),
)  # fmt: skip

ROWS: tuple[Row, ...] = (
    _w1("q05b-bf16", Aim(factor=1.08, of_bound=True), _w1_ms),
    Row(
        label="w1 time to first token", configuration="q05b-bf16", workload="w1", figure="ttft_ms_p50", unit="ms",
        bound=_w1_first_ms, aim=Aim(factor=0.93, of_peer=True),
    ),
    _w2("q05b-bf16", Aim(factor=1.25, of_peer=True), _w2_rate),
    _w2("q05b-int8", Aim(factor=1.4, of_peer=True), _w2_rate),
    Row(
        label="w3 wall, no prefix cache", configuration="q05b-bf16", workload="w3", figure="wall_s", unit="s",
        bound=_w3_wall, aim=Aim(factor=0.87, of_peer=True),
    ),
    _w3_cached("q05b-bf16-cached"),
    _w3_cached("q05b-int8-cached"),
    Row(
        label="w4 longest stall of a stream", configuration="q05b-bf16", workload="w4", figure="longest_stall_ms",
        unit="s", scale=1e-3, aim=Aim(factor=0.25, of_peer=True),
    ),
    Row(
        label="w4 long prompt's time to first token", configuration="q05b-bf16", workload="w4", figure="long_ttft_ms",
        unit="s", scale=1e-3, bound=_w4_first, aim=Aim(factor=1.0, of_peer=True),
    ),
    _w1("q05b-int8", Aim(factor=0.85, of_peer=True), _w1_ms),
    _w1("q05b-int4", Aim(factor=0.85, of_peer=True), _w1_ms),
    _w1("tiny-bf16", Aim(factor=1.5), None),
    _w2("tiny-bf16", Aim(factor=1.5, of_peer=True), None),
    _MEMORY,
    _START,
    _w1("test-bf16", None, None),
    Row(label="start to ready, second start", configuration="test-bf16", figure="start_s", unit="s"),
    Row(label="resident memory beyond weights + KV", configuration="test-bf16", figure="memory_beyond_bytes",
        unit="GB", scale=1e-9),
)  # fmt: skip

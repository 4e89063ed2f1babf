"""The table of docs/kernels.md that says how long each case of `quire bench gpu` takes at least on cards that are not
here: its bytes and operations over what data sheets say. Nothing of it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from quire.bench.gpu_cases import KernelCase, ModelSizes, all_cases

BANDWIDTH_SHARE, RATE_SHARE = 0.8, 0.6
"""What a kernel should reach of a card's bandwidth, or of its rate of products where that is the bound."""
LAUNCH_S = 10e-6
"""Below, a launch is a good part of the time, and no share is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A data sheet: bytes a second of its memory, dense bfloat16 operations a second."""

    name: str
    bytes_per_s: float
    operations_per_s: float

    def bound(self, case: KernelCase) -> tuple[float, str]:
        """The least seconds of `case`, and what they follow from."""
        memory_s, products_s = case.moved_bytes / self.bytes_per_s, case.operations / self.operations_per_s
        return (memory_s, "memory") if memory_s >= products_s else (products_s, "products")


CARDS = (
    Card(name="A100 SXM 80 GB", bytes_per_s=2039e9, operations_per_s=312e12),
    Card(name="H100 SXM", bytes_per_s=3350e9, operations_per_s=989e12),
)


def paper_table() -> str:
    """Markdown: a line for each case."""
    names = [f"{card.name}, at least | to reach" for card in CARDS]
    lines = [f"| what | MB | GFLOP | {' | '.join(names)} |", "|---|---|---|" + "---|---|" * len(CARDS)]
    lines += [_line(case) for case in all_cases(ModelSizes(device="meta"))]
    return "\n".join(lines)


def _line(case: KernelCase) -> str:
    operations = f"{case.operations / 1e9:,.1f}" if case.operations else "–"
    cells = [cell for card in CARDS for cell in _cells(*card.bound(case))]
    return f"| {case.name} | {case.moved_bytes / 1e6:,.1f} | {operations} | {' | '.join(cells)} |"


def _cells(least_s: float, bound: str) -> tuple[str, str]:
    share = BANDWIDTH_SHARE if bound == "memory" else RATE_SHARE
    wanted = "–" if least_s < LAUNCH_S else f"{least_s / share * 1e6:,.0f} µs"
    return f"{least_s * 1e6:,.1f} µs, {bound}", wanted

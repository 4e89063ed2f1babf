"""Line and bar charts as SVG text: enough for benchmark results, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 30, 50, 44
LETTER = 6.2  # width of one, roughly, at the size of names
BAR_LEFT, BAR_RIGHT, BAR_HEIGHT = 190, 60, 22
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")
NUM_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """One chart of lines; `series` by name, points in the order of x. The y axis starts at 0."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Point]]
    is_log_x: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One chart of horizontal bars from 0; `mark` is drawn as a vertical line through all of them."""

    title: str
    bars: Mapping[str, float]
    mark: float | None = None


def render(title: str, charts: Sequence[Lines | Bars], columns: int = 2) -> str:
    """All `charts` in one document, row by row."""
    columns = min(columns, len(charts))
    rows = [charts[at : at + columns] for at in range(0, len(charts), columns)]
    parts, top = [_text(10, 20, title, size=15)], 30.0
    for row in rows:
        for column, chart in enumerate(row):
            body = "\n".join(_draw_lines(chart) if isinstance(chart, Lines) else _draw_bars(chart))
            parts.append(f'<g transform="translate({column * WIDTH} {top:g})">\n{body}\n</g>')
        top += max(map(_height, row))
    size = f'width="{columns * WIDTH}" height="{top:g}" viewBox="0 0 {columns * WIDTH} {top:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def ticks(highest: float) -> list[float]:
    """Round numbers from 0 to at least `highest`."""
    if not highest > 0:
        return [0.0, 1.0]
    rough = highest / NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [i * step for i in range(math.ceil(highest / step * 0.999) + 1)]


def _height(chart: Lines | Bars) -> float:
    return HEIGHT if isinstance(chart, Lines) else TOP + BAR_HEIGHT * len(chart.bars) + BOTTOM


def _draw_lines(chart: Lines) -> Iterator[str]:
    points = [
        point for series in chart.series.values() for point in series if all(map(math.isfinite, point))
    ] or [(1.0, 1.0)]  # fmt: skip
    xs = sorted({x for x, _ in points})
    y_ticks = ticks(max(y for _, y in points))
    place = math.log if chart.is_log_x else float
    low, high = place(xs[0]), place(xs[-1])

    def to_x(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((place(x) - low) / (high - low) if high > low else 0.5)

    def to_y(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_ticks[-1]

    yield _text(10, 22, f"{chart.title} [{chart.y_label}]", size=13)
    yield _text((LEFT + WIDTH) / 2, HEIGHT - 8, chart.x_label, anchor="middle")
    for y in y_ticks:
        yield _line(LEFT, to_y(y), WIDTH - RIGHT, to_y(y), "#dddddd")
        yield _text(LEFT - 5, to_y(y) + 4, _short(y), anchor="end")
    for x in xs if chart.is_log_x else (t for t in ticks(xs[-1]) if xs[0] <= t <= xs[-1]):
        yield _text(to_x(x), HEIGHT - BOTTOM + 15, _short(x), anchor="middle")
    name_at = float(LEFT)
    for index, (name, series) in enumerate(chart.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [(to_x(x), to_y(y)) for x, y in series if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in places)
        yield _text(name_at, TOP - 10, name, colour=colour)
        name_at += LETTER * len(name) + 18


def _draw_bars(chart: Bars) -> Iterator[str]:
    values = [value for value in chart.bars.values() if math.isfinite(value)]
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / max([*values, chart.mark or 0.0, 1e-12])
    yield _text(10, 22, chart.title, size=13)
    for index, (name, value) in enumerate(chart.bars.items()):
        top = TOP + BAR_HEIGHT * index
        yield _text(BAR_LEFT - 6, top + 14, name, anchor="end", size=10)
        if math.isfinite(value):
            width, fill = max(0.0, value * scale), COLOURS[0]
            yield f'<rect x="{BAR_LEFT}" y="{top + 3}" width="{width:.1f}" height="{BAR_HEIGHT - 6}" fill="{fill}"/>'
            yield _text(BAR_LEFT + width + 4, top + 14, f"{value:.2f}", size=10)
    if chart.mark is not None:
        x = BAR_LEFT + chart.mark * scale
        yield _line(x, TOP - 4, x, TOP + BAR_HEIGHT * len(chart.bars) + 4, "#d62728")


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start", colour: str = "#222222") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _short(value: float) -> str:
    """`value` in few characters: 32768 as 32k, powers of two as people say them."""
    for unit, name in ((2**20, "M"), (2**10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:g}{name}"
    return f"{value:.4g}" if value < 1000 else f"{value:,.0f}"

"""Charts are well-formed and show what they were given."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from quire.bench.svg import Bars, Lines, render, ticks

SVG = "{http://www.w3.org/2000/svg}"


def make_lines(**changes: object) -> Lines:
    fields = {"title": "a < b & c", "x_label": "x", "y_label": "y", "series": {"one": [(1.0, 2.0), (8.0, 4.0)]}}
    return Lines(**fields | changes)  # type: ignore[arg-type]


def test_lines_are_drawn_point_by_point() -> None:
    """Each series should have a line with its points, larger values further up, and its name."""
    series = {"up": [(1.0, 1.0), (10.0, 2.0)], "down": [(1.0, 2.0), (10.0, 0.5)]}
    root = ElementTree.fromstring(render("title", [make_lines(series=series, is_log_x=True)]))
    up, down = (line.attrib["points"].split() for line in root.iter(f"{SVG}polyline"))
    heights = [[float(point.split(",")[1]) for point in points] for points in (up, down)]
    assert heights[0][0] > heights[0][1]
    assert heights[1][0] < heights[1][1]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"title", "up", "down", "a < b & c [y]"} <= set(texts)


def test_bars_are_as_long_as_their_values() -> None:
    """Lengths should be in proportion, with the mark at its place and every value written."""
    root = ElementTree.fromstring(render("t", [Bars(title="b", bars={"x": 0.5, "y": 1.0}, mark=0.5)]))
    widths = [float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect") if bar.attrib["width"] != "100%"]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    (mark,) = root.iter(f"{SVG}line")
    bar = next(bar for bar in root.iter(f"{SVG}rect") if bar.attrib["width"] != "100%")
    assert float(mark.attrib["x1"]) == pytest.approx(float(bar.attrib["x"]) + widths[0], abs=0.2)
    assert {"0.50", "1.00"} <= {text.text for text in root.iter(f"{SVG}text")}


@pytest.mark.parametrize(
    "series", [{}, {"none": []}, {"one": [(5.0, 0.0)]}, {"nan": [(1.0, math.nan), (2.0, 3.0)]}, {"big": [(1e6, 1e9)]}]
)
def test_odd_series_are_drawn_without_complaint(series: dict[str, list[tuple[float, float]]]) -> None:
    """No points, one point, zeros and what is no number should still give a document, with no NaN in it."""
    for is_log_x in (False, True):
        text = render("t", [make_lines(series=series, is_log_x=is_log_x), Bars(title="b", bars={})])
        ElementTree.fromstring(text)
        assert "nan" not in text.replace(">nan<", "")


@pytest.mark.parametrize(
    ("highest", "expected"),
    [(1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (7.0, [0, 2, 4, 6, 8]), (1234, [0, 500, 1000, 1500]), (0, [0, 1])],
)
def test_ticks_are_round_numbers(highest: float, expected: list[float]) -> None:
    """Ticks should start at 0, be round, and reach the highest value."""
    assert ticks(highest) == pytest.approx(expected)

"""The pictures of ``scripts/bench``: every point lies inside its panel, and all can be read."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.bench.plots import BLOCKS, TARGETS, draw, scale
from tests.support.bench.report import FIRST_PASS_CASES, FRAMEWORKS, PIECES
from tests.support.bench.svg import GRID, INK
from tests.support.bench.workers import COUNTS

SVG = "{http://www.w3.org/2000/svg}"
COLOURS = {colour for _, colour in TARGETS.values()}
LEGEND_Y = 295
EM_SHARE = 0.6
"""The width of a letter for its size, in a wide font."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


class Drawn:
    """What a picture shows, found in its text alone."""

    def __init__(self, path: Path) -> None:
        root = ET.fromstring(path.read_text())  # noqa: S314  written just now
        ground, *self.bars = (_box(rect) for rect in root.iter(f"{SVG}rect"))
        self.ground = ground
        self.lines = [
            (line.get("stroke", ""), _points(line.get("points", "")))
            for line in root.iter(f"{SVG}polyline")
        ]
        self.dots = [
            (dot.get("fill", ""), (_number(dot, "cx"), _number(dot, "cy")))
            for dot in root.iter(f"{SVG}circle")
        ]
        self.words = [_word(text) for text in root.iter(f"{SVG}text")]

    def panels(self) -> list[Box]:
        """From the lines of the grid: those that begin at one place are of one panel."""
        spans: dict[tuple[float, float], list[float]] = {}
        for stroke, points in self.lines:
            (left, top), (right, bottom) = points[0], points[-1]
            if stroke in {GRID, INK} and top == bottom:
                spans.setdefault((left, right), []).append(top)
        return [Box(left, min(ys), right, max(ys)) for (left, right), ys in sorted(spans.items())]

    def data(self) -> list[tuple[str, list[tuple[float, float]]]]:
        """Coloured lines, but those of the legend."""
        return [
            (stroke, points)
            for stroke, points in self.lines
            if stroke in COLOURS and {y for _, y in points} != {LEGEND_Y}
        ]


def _number(element: ET.Element, name: str) -> float:
    return float(element.get(name, "nan"))


def _box(rect: ET.Element) -> Box:
    x, y = _number(rect, "x"), _number(rect, "y")
    return Box(x, y, x + _number(rect, "width"), y + _number(rect, "height"))


def _points(text: str) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in text.split())
    return [(float(x), float(y)) for x, y in pairs]


def _word(text: ET.Element) -> Box:
    x, y, size = _number(text, "x"), _number(text, "y"), _number(text, "font-size")
    width = len(text.text or "") * size * EM_SHARE
    before = {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "")]
    return Box(x - before, y - 0.8 * size, x - before + width, y + 0.2 * size)


def assert_readable(drawn: Drawn) -> None:
    """Everything lies on the ground; no word covers another one, a bar, a data line or a dot."""
    corners = [corner for box in drawn.words + drawn.bars for corner in (box[:2], box[2:])]
    points = [point for _, line in drawn.lines for point in line]
    for place in corners + points + [place for _, place in drawn.dots]:
        assert drawn.ground.holds(*place)
    for number, word in enumerate(drawn.words):
        assert not any(word.overlaps(other) for other in drawn.words[:number] + drawn.bars)
        assert not any(word.holds(*place) for _, place in drawn.dots)
        for _, line in drawn.data():
            assert not any(word.holds(*place) for place in line)


def throughput(rate_of_one: float, targets: Sequence[str] = ("native",)) -> dict[str, Any]:
    """More writers are faster: the first panel is the one with the least figures."""
    by_target = {
        target: {
            str(count): {
                str(size << 10): {"bytes_per_s": rate_of_one * count * (1 + size / 1e4) / number}
                for size in BLOCKS
            }
            for count in COUNTS
        }
        for number, target in enumerate(targets, 1)
    }
    return {"data": {"throughput": dict.fromkeys(("write", "read"), by_target)}}


@pytest.mark.parametrize("rate", [3e6, 1.7e9, 2.5e9, 80e9])
def test_every_point_of_every_panel_lies_inside_it(tmp_path: Path, rate: float) -> None:
    paths = draw(throughput(rate, list(TARGETS)), tmp_path)
    assert [path.stem for path in paths] == ["throughput-write", "throughput-read"]
    for path in paths:
        drawn = Drawn(path)
        assert_readable(drawn)
        panels = drawn.panels()
        assert len(panels) == len(COUNTS)
        assert len({(panel.top, panel.bottom) for panel in panels}) == 1
        lines = drawn.data()
        for colour in COLOURS:
            of_colour = sorted(points for stroke, points in lines if stroke == colour)
            assert len(of_colour) == len(COUNTS)
            for panel, points in zip(panels, of_colour, strict=True):
                assert len(points) == len(BLOCKS)
                assert all(panel.holds(*point) for point in points)
                assert {(colour, point) for point in points} <= set(drawn.dots)
        heights = [y for _, points in lines for _, y in points]
        assert min(heights) < panels[0].top + 60, "the highest is near the top"
        assert len(set(heights)) > len(BLOCKS), "one scale: other rates lie elsewhere"


def bars_figures() -> dict[str, Any]:
    return {
        "frameworks": {
            name: {"ratio_to_tmpfs": 0.3 + number} for number, name in enumerate(FRAMEWORKS)
        },
        "fragmentation": {
            state: {"ratio": 1.1 - 0.4 * number} for number, state in enumerate(PIECES)
        },
        "first_pass": {
            name: {"first": {"ratio": 0.25 + 0.2 * number}}
            for number, name in enumerate(FIRST_PASS_CASES)
        },
    }


def test_bars_lie_inside_their_panel_and_no_word_covers_them(tmp_path: Path) -> None:
    paths = draw(bars_figures(), tmp_path)
    assert [path.stem for path in paths] == ["frameworks", "fragmentation", "first-pass"]
    for path in paths:
        drawn = Drawn(path)
        assert_readable(drawn)
        upright = [points for _, points in drawn.lines if points[0][0] == points[-1][0]]
        right = max(points[0][0] for points in upright)
        left = min(points[0][0] for points in upright)
        assert drawn.bars
        for bar in drawn.bars:
            assert left == bar.left < bar.right <= right


def test_one_rate_lies_equally_high_in_all_panels(tmp_path: Path) -> None:
    figures = throughput(1e9)
    by_count = figures["data"]["throughput"]["write"]["native"]
    for count in COUNTS:
        by_count[str(count)][str(4 << 10)]["bytes_per_s"] = 5e8
    text = draw(figures, tmp_path)[0].read_text()
    first_of_panel = re.findall(r'<polyline points="[\d.]+,([\d.]+) [^"]*" [^>]*width="1.8"', text)
    assert len(set(first_of_panel[: len(COUNTS)])) == 1


def test_bars_end_where_their_ratio_is(tmp_path: Path) -> None:
    ratios = {name: 0.3 + number for number, name in enumerate(FRAMEWORKS)}
    figures = {"frameworks": {name: {"ratio_to_tmpfs": ratio} for name, ratio in ratios.items()}}
    (path,) = draw(figures, tmp_path)
    root = ET.fromstring(path.read_text())  # noqa: S314  as above
    widths = [float(bar.get("width", "nan")) for bar in root.iter(f"{SVG}rect")][1:]
    assert len(widths) == len(ratios)
    for width, ratio in zip(widths, ratios.values(), strict=True):
        assert width / widths[-1] == pytest.approx(ratio / list(ratios.values())[-1], rel=1e-2)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {words for words, _ in FRAMEWORKS.values()} <= set(texts)


@pytest.mark.parametrize("most", [0.011, 0.3, 1.0, 3.57, 9.45, 12.0, 99.9, 100.0, 2341.0])
def test_a_scale_holds_its_most(most: float) -> None:
    end, step = scale(most)
    assert most <= end * 1.0000001 < most + step + end * 1e-6
    assert 3 <= round(end / step) <= 8


def test_the_same_figures_make_the_same_file(tmp_path: Path) -> None:
    once = [path.read_bytes() for path in draw(throughput(1e9), tmp_path / "a")]
    assert once == [path.read_bytes() for path in draw(throughput(1e9), tmp_path / "b")]

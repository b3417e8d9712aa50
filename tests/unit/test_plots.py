"""The pictures of ``scripts/bench``: every point lies inside its panel."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.support.bench.plots import BLOCKS, TARGETS, draw, scale
from tests.support.bench.report import FRAMEWORKS
from tests.support.bench.workers import COUNTS

SVG = "{http://www.w3.org/2000/svg}"
PANEL_TOP, PANEL_BOTTOM = 40, 230


def throughput(rate_of_one: float) -> dict[str, Any]:
    """More writers are faster: the first panel is the one with the least figures."""
    by_count = {
        str(count): {
            str(size << 10): {"bytes_per_s": rate_of_one * count * (1 + size / 1e4)}
            for size in BLOCKS
        }
        for count in COUNTS
    }
    return {"data": {"throughput": {kind: {"native": by_count} for kind in ("write", "read")}}}


@pytest.mark.parametrize("rate", [3e6, 1.7e9, 2.5e9, 80e9])
def test_every_point_of_every_panel_lies_inside_it(tmp_path: Path, rate: float) -> None:
    colour = TARGETS["native"][1]
    paths = draw(throughput(rate), tmp_path)
    assert [path.stem for path in paths] == ["throughput-write", "throughput-read"]
    for path in paths:
        root = ET.fromstring(path.read_text())  # noqa: S314  written just now
        dots = [circle for circle in root.iter(f"{SVG}circle") if circle.get("fill") == colour]
        heights = [float(dot.get("cy", "nan")) for dot in dots if dot.get("cy") != "295"]
        assert len(heights) == len(COUNTS) * len(BLOCKS)
        assert all(PANEL_TOP <= y <= PANEL_BOTTOM for y in heights)
        assert min(heights) < PANEL_TOP + 60, "the highest is near the top"
        assert len(set(heights)) > len(BLOCKS), "one scale: other rates lie elsewhere"


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

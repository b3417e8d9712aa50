"""Pictures of a run as small SVG files: throughput by block size; bars for frameworks beside tmpfs,
reads of a file in pieces beside those of a whole one, and first passes beside later ones.

Invariants
- All panels of one picture share one scale, every point lies inside its panel, and no word covers a
  line or another word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.bench.measure import Figures
from tests.support.bench.report import (
    FIRST_PASS_CASES,
    FIRST_WRITE_MIN,
    FRAMEWORKS,
    GATHERED_MIN,
    PIECES,
    blocks_of,
)
from tests.support.bench.svg import FAINT, GRID, INK, Picture, Point
from tests.support.bench.workers import COUNTS

TARGETS = {
    "native": ("cxlfs", "#0b5fa5"),
    "pyfuse3": ("cxlfs, pyfuse3 transport", "#d66f00"),
    "tmpfs": ("tmpfs itself", "#6e7781"),
    "passthrough": ("a FUSE pass-through over tmpfs", "#a33ea1"),
}
"""What a target is called, and its colour, in the order of the legend."""
SLOWER = "#8fb8d9"
BLOCKS = {4: "4 KiB", 64: "64 KiB", 1024: "1 MiB", 8192: "8 MiB"}
"""Sizes in KiB that are marked on the axis."""


class Panel(NamedTuple):
    """The rectangle that data is drawn in, and the scale: pixels, KiB, GB/s."""

    left: float
    top: float
    width: float
    height: float
    most: float

    def place(self, block_kib: float, rate: float) -> Point:
        low, high = math.log2(min(BLOCKS)), math.log2(max(BLOCKS))
        share = (math.log2(block_kib) - low) / (high - low)
        margin = 0.06 * self.width
        x = self.left + margin + share * (self.width - 2 * margin)
        return x, self.top + self.height * (1 - rate / self.most)


def draw(figures: Figures, directory: Path) -> list[Path]:
    """Whatever the document has figures for; the files written."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in _pictures(figures):
        path = directory / f"{name}.svg"
        picture.write(path)
        written.append(path)
    return written


def _pictures(figures: Figures) -> Iterator[tuple[str, Picture]]:
    if "data" in figures:
        for kind, one in (("write", "writer"), ("read", "reader")):
            yield f"throughput-{kind}", _throughput(figures, kind, one)
    if "frameworks" in figures:
        yield "frameworks", _frameworks(figures["frameworks"])
    if "fragmentation" in figures:
        yield "fragmentation", _fragmentation(figures["fragmentation"])
    if "first_pass" in figures:
        yield "first-pass", _first_pass(figures["first_pass"])


def scale(most: float) -> tuple[float, float]:
    """The end of an axis from 0 on that holds ``most``, and the step of its marks: 4 to 8 of them,
    at 1, 2 or 5 times a power of ten.
    """
    step = 10.0 ** math.floor(math.log10(most / 4)) if most > 0 else 1.0
    step = next(step * factor for factor in (1, 2, 5, 10) if most / (step * factor) <= 8)
    return step * max(1, math.ceil(most / step - 1e-9)), step


def _throughput(figures: Figures, kind: str, one: str) -> Picture:
    lines: dict[tuple[int, str], list[Point]] = {
        (count, target): [(size, rate / 1e9) for size, rate in points]
        for count in COUNTS
        for target in TARGETS
        if (points := blocks_of(figures, kind, target, count))
    }
    most, step = scale(max((rate for line in lines.values() for _, rate in line), default=1.0))
    picture = Picture(760, 316, f"Throughput of {one}s by the size of a block, in GB/s")
    for number, count in enumerate(COUNTS):
        panel = Panel(56 + number * 237, 40, 214, 190, most)
        words = f"{count} {one}{'s' * (count > 1)}"
        picture.text((panel.left + panel.width / 2, 24), words, anchor="middle", bold=True)
        _axes(picture, panel, step, labelled=number == 0)
        for target, (_, colour) in TARGETS.items():
            points = [panel.place(*point) for point in lines.get((count, target), ())]
            if points:
                picture.line(points, stroke=colour, width=1.8)
                picture.dots(points, fill=colour)
    picture.text((49, 24), "GB/s", anchor="end", fill=FAINT)
    picture.text((399, 268), "size of a block", anchor="middle", fill=FAINT)
    _legend(picture, [target for target in TARGETS if any(t == target for _, t in lines)])
    return picture


def _axes(picture: Picture, panel: Panel, step: float, *, labelled: bool) -> None:
    right, bottom = panel.left + panel.width, panel.top + panel.height
    for mark in range(round(panel.most / step) + 1):
        _, y = panel.place(min(BLOCKS), mark * step)
        picture.line([(panel.left, y), (right, y)], stroke=INK if mark == 0 else GRID)
        if labelled:
            picture.text((panel.left - 7, y + 4), f"{mark * step:g}", anchor="end", fill=FAINT)
    for size, words in BLOCKS.items():
        x, _ = panel.place(size, 0)
        picture.line([(x, bottom), (x, bottom + 4)])
        picture.text((x, bottom + 18), words, anchor="middle", fill=FAINT, size=11)


def _legend(picture: Picture, targets: list[str]) -> None:
    x = 56.0
    for target in targets:
        words, colour = TARGETS[target]
        picture.line([(x, 295), (x + 24, 295)], stroke=colour, width=1.8)
        picture.dots([(x + 12, 295)], fill=colour)
        picture.text((x + 31, 299), words)
        x += 52 + 6.4 * len(words)


def _frameworks(figures: Figures) -> Picture:
    bars = [
        (text, figures[name]["ratio_to_tmpfs"])
        for name, (text, _) in FRAMEWORKS.items()
        if name in figures
    ]
    words = "speed, tmpfs = 1 (2: half the time)"
    return _bars(
        "Speed of frameworks on a store, beside tmpfs", bars, words, (1.0, "as fast as tmpfs")
    )


def _fragmentation(figures: Figures) -> Picture:
    bars = [(text, figures[state]["ratio"]) for state, (text, _) in PIECES.items()]
    title = "Reading a file from front to back, beside the same file as it was written"
    return _bars(
        title, bars, "speed, the file as written = 1", (GATHERED_MIN, "at least, gathered")
    )


def _first_pass(figures: Figures) -> Picture:
    bars = [(text, figures[name]["first"]["ratio"]) for name, text in FIRST_PASS_CASES.items()]
    title = "The first pass over a store beside the next one"
    mark = (FIRST_WRITE_MIN, "at least, of writes")
    return _bars(title, bars, "speed of the first pass, the later one = 1", mark)


def _bars(
    title: str, bars: Sequence[tuple[str, float]], words: str, mark: tuple[float, str]
) -> Picture:
    """One bar for each ratio, from 0; dark from ``mark`` on, a dashed line that is named."""
    left, width, height = 250, 420, 26
    least, mark_words = mark
    most, step = scale(max(least, *(ratio for _, ratio in bars)))
    bottom = 34 + height * len(bars)
    picture = Picture(720, bottom + 48, title)
    for number in range(round(most / step) + 1):
        x = left + width * number * step / most
        picture.line([(x, 30), (x, bottom)], stroke=INK if number == 0 else GRID)
        picture.text((x, bottom + 16), f"{number * step:g}", anchor="middle", fill=FAINT, size=11)
    for number, (text, ratio) in enumerate(bars):
        y = 34 + number * height
        colour = TARGETS["native"][1] if ratio >= least else SLOWER
        picture.rectangle((left, y + 3), width * ratio / most, height - 8, fill=colour)
        picture.text((left - 8, y + 16), text, anchor="end")
        picture.text((left + width + 44, y + 16), f"{ratio:.2f}", anchor="end", bold=ratio >= least)
    at = left + width * least / most
    picture.line([(at, 26), (at, bottom)], stroke=TARGETS["pyfuse3"][1], width=1.6, dashed=True)
    picture.text((at, 20), mark_words, anchor="middle", fill=FAINT)
    picture.text((left + width / 2, bottom + 36), words, anchor="middle", fill=FAINT)
    return picture

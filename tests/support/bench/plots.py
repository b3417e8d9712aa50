"""Plots of a run as small SVG files: throughput by block size, and frameworks beside tmpfs.

matplotlib is needed for these only; it comes with the extra ``bench``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.bench.measure import Figures, MissingError
from tests.support.bench.report import blocks_of
from tests.support.bench.workers import COUNTS

TARGETS = ("native", "pyfuse3", "tmpfs", "passthrough")
COLOURS = ("#0b5fa5", "#e07b00", "#777777", "#a33ea1")
STYLE = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text: a tenth of the size
    "svg.hashsalt": "cxlfs",  # the same figures make the same file
}


def require_matplotlib() -> Any:
    """Matplotlib's pyplot; raises MissingError."""
    try:
        importlib.import_module("matplotlib").use("svg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingError(
            f"--plots needs matplotlib ({error}): .venv/bin/python -m pip install '.[bench]'"
        ) from error


def draw(figures: Figures, directory: Path) -> list[Path]:
    """Whatever the document has figures for; the files written. Raises MissingError."""
    pyplot = require_matplotlib()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with pyplot.rc_context(STYLE):
        for name, figure in _figures(pyplot, figures):
            path = directory / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            pyplot.close(figure)
            _end_lines(path)
            written.append(path)
    return written


def _figures(pyplot: Any, figures: Figures) -> Iterator[tuple[str, Any]]:
    if "data" in figures:
        for kind, title in (("write", "writers"), ("read", "readers")):
            yield f"throughput-{kind}", _throughput(pyplot, figures, kind, title)
    if "frameworks" in figures:
        yield "frameworks", _frameworks(pyplot, figures["frameworks"])


def _throughput(pyplot: Any, figures: Figures, kind: str, title: str) -> Any:
    figure, axes = pyplot.subplots(1, len(COUNTS), sharey=True, figsize=(7.2, 2.4))
    for axis, count in zip(axes, COUNTS, strict=True):
        for target, colour in zip(TARGETS, COLOURS, strict=True):
            points = blocks_of(figures, kind, target, count)
            if points:
                sizes, rates = zip(*points, strict=True)
                gigabytes = [rate / 1e9 for rate in rates]
                axis.plot(sizes, gigabytes, marker="o", markersize=3, color=colour, label=target)
        axis.set_xscale("log", base=2)
        axis.set_xticks([4, 64, 1024, 8192], ["4 KiB", "64 KiB", "1 MiB", "8 MiB"])
        axis.tick_params(axis="x", labelrotation=35)
        axis.set_title(f"{count} {title if count > 1 else title[:-1]}")
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel("GB/s")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, 0))
    return figure


def _frameworks(pyplot: Any, figures: Figures) -> Any:
    names = [name for name, value in figures.items() if isinstance(value, dict)]
    figure, axis = pyplot.subplots(figsize=(5, 2.4))
    axis.barh(names, [figures[name]["ratio_to_tmpfs"] for name in names], color=COLOURS[0])
    axis.axvline(1, color=COLOURS[2], linewidth=1)
    axis.invert_yaxis()
    axis.set_xlabel("speed, tmpfs = 1")
    return figure


def _end_lines(path: Path) -> None:
    """Without the white space at the end of lines that matplotlib leaves."""
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(f"{line.rstrip()}\n" for line in lines), encoding="utf-8")

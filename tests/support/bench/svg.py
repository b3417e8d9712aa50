"""A small SVG document: what the pictures in docs/ are drawn with.

Text stays text, the same calls make the same bytes, and the picture brings its own light ground: it
reads the same on a dark page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

Point = tuple[float, float]

INK, FAINT, GRID, GROUND = "#24292f", "#57606a", "#d8dee4", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Picture:
    """Coordinates in pixels, y downwards. ``title`` is what a reader who cannot see it is told."""

    def __init__(self, width: float, height: float, title: str) -> None:
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(width)} {_n(height)}" '
            f'width="{_n(width)}" height="{_n(height)}" role="img" font-family="{FONT}" '
            f'font-size="12" fill="{INK}">'
        )
        self._parts = [opening, f"<title>{escape(title)}</title>"]
        self.rectangle((0, 0), width, height, fill=GROUND, rounded=6)

    def rectangle(
        self,
        corner: Point,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        rounded: float = 0,
        dashed: bool = False,
    ) -> None:
        x, y = corner
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'rx="{_n(rounded)}" fill="{fill}" stroke="{stroke}"{_dashes(dashed)}/>'
        )

    def line(
        self, points: Sequence[Point], *, stroke: str = INK, width: float = 1, dashed: bool = False
    ) -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" '
            f'stroke-width="{_n(width)}" stroke-linejoin="round"{_dashes(dashed)}/>'
        )

    def dots(self, points: Iterable[Point], *, fill: str, radius: float = 3) -> None:
        self._parts.extend(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"/>' for x, y in points
        )

    def polygon(self, points: Sequence[Point], *, fill: str) -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polygon points="{places}" fill="{fill}"/>')

    def text(
        self,
        place: Point,
        words: str,
        *,
        anchor: str = "start",
        fill: str = INK,
        size: float = 12,
        bold: bool = False,
    ) -> None:
        """``place`` is the end, middle or start of the base line, as ``anchor`` says."""
        x, y = place
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-size="{_n(size)}" '
            f'fill="{fill}"{weight}>{escape(words)}</text>'
        )

    def write(self, path: Path) -> None:
        path.write_text("\n".join([*self._parts, "</svg>", ""]), encoding="utf-8")


def _n(value: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")


def _dashes(dashed: bool) -> str:
    return ' stroke-dasharray="4 3"' if dashed else ""

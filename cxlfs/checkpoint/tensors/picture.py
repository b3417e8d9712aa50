"""A picture of the norms of a checkpoint's tensors, layer by layer, as SVG.

Text stays text, the same numbers make the same bytes, and the picture brings its own light ground.
Other modules compute the norms and write the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from cxlfs.checkpoint.tensors.families import FAMILIES, family_of, layer_of

_INK, _FAINT, _GRID, _GROUND = "#24292f", "#57606a", "#d8dee4", "#ffffff"
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#9a6700", "#57606a")
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_WIDTH, _HEIGHT = 860, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 132, 44, 44
_LABELS_MAX = 24
_Point = tuple[float, float]


def norms_by_layer(
    named: Iterable[tuple[str, float]],
) -> tuple[list[int | None], dict[str, dict[int | None, float]]]:
    """The layers (None first: tensors that are in none), and the norm of each family in each."""
    norms: dict[str, dict[int | None, float]] = {}
    layers: set[int | None] = set()
    for name, norm in named:
        layer = layer_of(name)
        layers.add(layer)
        inside = norms.setdefault(family_of(name), {})
        inside[layer] = math.hypot(inside.get(layer, 0.0), norm)
    order = sorted(layers, key=lambda layer: -1 if layer is None else layer)
    return order, {family: norms[family] for family in FAMILIES if family in norms}


def draw(title: str, named: Iterable[tuple[str, float]]) -> str:
    """The norms as a document: one line for each family, layers from left to right."""
    layers, norms = norms_by_layer(named)
    every = [norm for inside in norms.values() for norm in inside.values()]
    values = [norm for norm in every if 0 < norm < math.inf]
    low = math.floor(math.log10(min(values))) if values else 0
    high = math.ceil(math.log10(max(values))) if values else 1
    high = max(high, low + 1)
    picture = _Picture(title)
    picture.axes(layers, range(low, high + 1))
    for number, (family, inside) in enumerate(norms.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [
            (picture.x(at, len(layers)), picture.y(math.log10(inside[layer]), low, high))
            for at, layer in enumerate(layers)
            if 0 < inside.get(layer, 0.0) < math.inf
        ]
        picture.series(points, colour)
        picture.legend(number, family, colour)
    return picture.document()


class _Picture:
    """Coordinates in pixels, y downwards."""

    def __init__(self, title: str) -> None:
        shown = title.encode("utf-8", "backslashreplace").decode()
        shown = "".join(each if each.isprintable() else "?" for each in shown)[:120]
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="{_FONT}" '
            f'font-size="12" fill="{_INK}">'
        )
        self._parts = [
            opening,
            f"<title>Norm of the tensors of {escape(shown)} by layer</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{_GROUND}"/>',
        ]
        self._text((_LEFT, 24), f"Norm by layer: {shown}", bold=True)

    def x(self, at: int, count: int) -> float:
        room = _WIDTH - _LEFT - _RIGHT
        return _LEFT + room * (at + 0.5) / max(count, 1)

    def y(self, power: float, low: int, high: int) -> float:
        """Of a power of ten."""
        share = (power - low) / (high - low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def axes(self, layers: Sequence[int | None], powers: range) -> None:
        step = max(1, len(powers) // 8)
        for power in powers[::step]:
            y = self.y(power, powers[0], powers[-1])
            self._line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _GRID, 1)
            self._text((_LEFT - 8, y + 4), f"1e{power}", anchor="end", fill=_FAINT)
        every = max(1, -(-len(layers) // _LABELS_MAX))
        for at, layer in enumerate(layers):
            if at % every == 0:
                place = self.x(at, len(layers)), _HEIGHT - _BOTTOM + 18
                self._text(
                    place, "none" if layer is None else str(layer), anchor="middle", fill=_FAINT
                )
        self._text(
            ((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8), "layer", anchor="middle", fill=_FAINT
        )

    def series(self, points: Sequence[_Point], colour: str) -> None:
        if len(points) > 1:
            self._line(points, colour, 2)
        self._parts.extend(
            f'<circle cx="{_n(x)}" cy="{_n(y)}" r="3" fill="{colour}"/>' for x, y in points
        )

    def legend(self, number: int, family: str, colour: str) -> None:
        y = _TOP + 8 + 20 * number
        self._parts.append(
            f'<rect x="{_WIDTH - _RIGHT + 16}" y="{y - 8}" width="10" height="10" fill="{colour}"/>'
        )
        self._text((_WIDTH - _RIGHT + 32, y + 1), family)

    def document(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])

    def _line(self, points: Sequence[_Point], stroke: str, width: int) -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def _text(
        self,
        place: _Point,
        words: str,
        *,
        anchor: str = "start",
        fill: str = _INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(place[0])}" y="{_n(place[1])}" text-anchor="{anchor}" '
            f'fill="{fill}"{weight}>{escape(words)}</text>'
        )


def _n(value: float) -> str:
    """A tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0")

"""Columns of text, two spaces apart, for reports that list many things.

Never here: what is listed, colour, printing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_GAP = "  "


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[str]
) -> Iterator[str]:
    """The header, then each row; columns that are in ``numbers`` are flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for cell, width, name in zip(row, widths, header, strict=True)
        ]
        yield _GAP.join(cells).rstrip()


def short(value: float | None) -> str:
    """Four digits of a number; a dash where there is none."""
    return "-" if value is None else f"{value:.4g}"


def finite(value: float | None) -> float | None:
    """For JSON, which has no word for what is not finite."""
    return value if value is not None and math.isfinite(value) else None

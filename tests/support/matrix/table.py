"""What campaigns came to, as tables of markdown.

A cell is ``resumed/events``, and what became of the others. Never here: running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.matrix.catalogue import FRAMEWORKS

BEGIN = "<!-- matrix: begin -->"
END = "<!-- matrix: end -->"
HEADINGS = {
    "cxlfs": "cxlfs, default",
    "cxlfs-policies": "cxlfs, policies",
    "ext4": "ext4",
    "tmpfs": "tmpfs",
}
TABLES = (
    ("SIGKILL in mid-save", ("trainer", "daemon")),
    ("Ctrl-C in mid-save", ("interrupt",)),
    ("SIGTERM in mid-save", ("terminate", "exit-0", "exit-143")),
    ("An exception in mid-save", ("exception", "caught")),
    ("A save that finds no room but for a part of it", ("full",)),
)
SHORT = (
    "torch",
    "hugging-face",
    "dcp",
    "dcp-steps",
    "safetensors",
    "deepspeed",
    "lightning",
    "xgboost",
    "hdf5-a",
    "zarr",
)
"""The rows of the README's table, after SIGKILL of the trainer."""
SHORT_PLACES = ("cxlfs", "ext4", "tmpfs")
EVENTS = {
    "trainer": "SIGKILL",
    "daemon": "SIGKILL of the daemon",
    "interrupt": "Ctrl-C",
    "terminate": "SIGTERM",
    "exit-0": "handler, exit 0",
    "exit-143": "handler, exit 143",
    "exception": "exception",
    "caught": "exception, caught, exit 0",
    "full": "full store",
}
"""Columns of the table of one place, as people call them."""
_OF_EVENT = {
    "daemon": ", daemon killed",
    "exit-0": ", handler, exit code 0",
    "exit-143": ", handler, 143",
    "caught": ", caught",
}
_WORDS = {"failed": "fail", "mixed": "mixed", "nothing": "begin anew", "older": "older"}

Document = Mapping[str, Any]


def cell(outcome: Document | None) -> str:
    if outcome is None:
        return ""
    if outcome["problem"]:
        return "not tried: " + outcome["problem"].replace("|", "/")[:80]
    counts = outcome["counts"]
    events = sum(counts.values())
    resumed = counts["new"] + counts["old"] + counts["older"]
    rest = [f"{counts[name]} {word}" for name, word in _WORDS.items() if counts[name]]
    text = f"{resumed}/{events}"
    return f"**{text}**" if resumed == events and not rest else ": ".join([text, ", ".join(rest)])


def make(outcomes: Iterable[Document]) -> str:
    """One table for each kind of event that was tried."""
    found = {(o["framework"], o["event"], o["place"]): o for o in outcomes}
    parts = []
    for title, events in TABLES:
        columns = [
            (event, place)
            for event in events
            for place in HEADINGS
            if any(key[1:] == (event, place) for key in found)
        ]
        names = [n for n in FRAMEWORKS if any((n, *column) in found for column in columns)]
        if not names:
            continue
        headings = [HEADINGS[place] + _OF_EVENT.get(event, "") for event, place in columns]
        lines = [
            f"{title}:",
            "",
            _row(["framework", "version", *headings]),
            _row(["---"] * (2 + len(columns))),
        ]
        for name in names:
            cells = [cell(found.get((name, *column))) for column in columns]
            lines.append(_row([FRAMEWORKS[name].title, _version(found, name), *cells]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def make_short(outcomes: Iterable[Document]) -> str:
    """The README's: the best known rows, SIGKILL of the trainer alone."""
    found = {(o["framework"], o["event"], o["place"]): o for o in outcomes}
    headings = [HEADINGS[place] for place in SHORT_PLACES]
    lines = [_row(["killed in mid-save", *headings]), _row(["---"] * (1 + len(headings)))]
    for name in SHORT:
        cells = [cell(found.get((name, "trainer", place))) for place in SHORT_PLACES]
        lines.append(_row([FRAMEWORKS[name].title, *cells]))
    return "\n".join(lines)


def make_place(outcomes: Iterable[Document], place: str) -> str:
    """All that was tried at one place: a row for each framework, a column for each event."""
    found = {(o["framework"], o["event"]): o for o in outcomes if o["place"] == place}
    lines = [_row(["framework", *EVENTS.values()]), _row(["---"] * (1 + len(EVENTS)))]
    for name in FRAMEWORKS:
        cells = [cell(found.get((name, event))) for event in EVENTS]
        if any(cells):
            lines.append(_row([FRAMEWORKS[name].title, *cells]))
    return "\n".join(lines)


def rows(text: str, columns: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Of the first table of a page that has these columns: the first cell of each row, and the
    cells of those. Raises ValueError where there is none.
    """
    wanted = list(columns)
    found: dict[str, tuple[str, ...]] = {}
    places: list[int] | None = None
    for line in text.splitlines():
        cells = [each.strip() for each in line.split("|")[1:-1]]
        if places is None:
            if set(wanted) <= set(cells):
                places = [cells.index(name) for name in wanted]
        elif not cells:
            return found
        elif set(cells) != {"---"}:
            found[cells[0]] = tuple(cells[place] for place in places)
    if places is None:
        raise ValueError(f"no table with {wanted}")
    return found


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _version(found: Mapping[tuple[str, str, str], Document], name: str) -> str:
    versions = next((o["versions"] for key, o in found.items() if key[0] == name), {})
    return next(iter(versions.values()), "")


def put_into(text: str, table: str) -> str:
    """``text`` with the table between its marks. Raises ValueError where there are none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("there are no marks for the table")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"

"""How far a long command has come: a bar with rate and ETA on a terminal, JSON lines with --json,
nothing otherwise.

Never here: deciding what is done, threads, timers. The clock is asked, never waited for.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from cxlfs.cli.output import Output, Report, Style
from cxlfs.units import format_duration, format_rate, format_size

_BAR_CELLS = 24
_TERMINAL_INTERVAL_S = 0.1
_JSON_INTERVAL_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Status(Report):
    """One JSON line: how far the pass ``activity`` is."""

    schema: ClassVar[str] = "cxlfs.progress/1"
    message_type: ClassVar[str | None] = "status"

    activity: str
    done: int
    total: int
    unit: str
    """``bytes`` or ``items``."""
    fraction: float
    elapsed_seconds: float
    eta_seconds: float | None

    def lines(self, _style: Style, /) -> Iterator[str]:
        yield bar(self, columns=80)


def bar(status: Status, *, columns: int) -> str:
    """``data        [######            ]  25%  1.0 GiB of 4.0 GiB  512.0 MiB/s  ETA 6.0 s``"""
    cells = round(status.fraction * _BAR_CELLS)
    parts = [
        f"{status.activity:<12}[{'#' * cells}{' ' * (_BAR_CELLS - cells)}]",
        f"{int(status.fraction * 100):>3}%",
    ]
    if status.unit == "bytes":
        parts.append(f"{format_size(status.done)} of {format_size(status.total)}")
        parts.append(format_rate(status.done, status.elapsed_seconds))
    else:
        parts.append(f"{status.done} of {status.total}")
    if status.eta_seconds is not None:
        parts.append(f"ETA {format_duration(status.eta_seconds)}")
    return "  ".join(parts)[: columns - 1]


class Progress:
    """Call it with what is going on; it shows no more often than a reader can follow."""

    def __init__(
        self,
        output: Output,
        *,
        clock: Callable[[], float] = time.monotonic,
        terminal_columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ) -> None:
        self._output = output
        self._clock = clock
        self._terminal_columns = terminal_columns
        self._activity = ""
        self._started = self._shown = clock()
        self._visible = False

    def __call__(self, activity: str, done: int, total: int, unit: str = "bytes") -> None:
        """``done`` of ``total`` units of ``activity`` are behind us; a new activity starts anew.

        What is over before a reader could have seen it is not shown.
        """
        if not (self._output.as_json or self._output.shows_progress):
            return
        now = self._clock()
        if activity != self._activity:
            self._activity = activity
            self._started = self._shown = now
        interval = _JSON_INTERVAL_S if self._output.as_json else _TERMINAL_INTERVAL_S
        if now - self._shown < interval:
            return
        self._shown = now
        self._show(_status(activity, done, total, unit, now - self._started))

    def clear(self) -> None:
        """Take the bar away, before other text or at the end."""
        if self._visible:
            self._output.rewrite("")
            self._output.rewrite("")
            self._visible = False

    def _show(self, status: Status) -> None:
        if self._output.as_json:
            self._output.report(status)
            self._output.flush()
        else:
            self._output.rewrite(bar(status, columns=self._terminal_columns()))
            self._visible = True


def _status(activity: str, done: int, total: int, unit: str, elapsed: float) -> Status:
    fraction = min(done / total, 1.0) if total > 0 else 1.0
    is_known = 0 < fraction < 1 and elapsed > 0
    eta = elapsed * (1 - fraction) / fraction if is_known else None
    return Status(
        activity=activity,
        done=done,
        total=total,
        unit=unit,
        fraction=round(fraction, 4),
        elapsed_seconds=round(elapsed, 3),
        eta_seconds=None if eta is None else round(eta, 1),
    )

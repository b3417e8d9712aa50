from __future__ import annotations

import io
import json

import pytest

from cxlfs.cli.output import Output
from cxlfs.cli.progress import Progress
from cxlfs.units import GIB, MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def frames(terminal: Terminal) -> list[str]:
    """What was shown, one rewritten line after the other."""
    return [part.removesuffix("\x1b[K") for part in terminal.getvalue().split("\r")[1:]]


def make(output: Output, clock: Clock, columns: int = 100) -> Progress:
    return Progress(output, clock=clock, terminal_columns=lambda: columns)


def test_a_terminal_shows_bar_rate_and_eta(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    progress("data", 0, 4 * GIB)
    clock.now += 2
    progress("data", GIB, 4 * GIB)
    assert frames(terminal)[-1] == (
        "data        [######                  ]   25%  1.0 GiB of 4.0 GiB  512.0 MiB/s  ETA 6.0 s"
    )


def test_items_are_counted_without_a_rate(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    progress("segments", 3, 6, "items")
    assert frames(terminal)[-1].endswith("50%  3 of 6")


def test_a_terminal_is_not_flooded(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    for step in range(1000):
        clock.now += 0.001
        progress("data", step, 1000)
    assert 10 <= len(frames(terminal)) <= 12
    progress("data", 1000, 1000)  # the end is always shown
    assert "100%" in frames(terminal)[-1]


def test_it_fits_a_narrow_terminal(clock: Clock, terminal: Terminal) -> None:
    output = Output(as_json=False, stdout=io.StringIO(), stderr=terminal)
    make(output, clock, columns=30)("data", 1, 4 * GIB)
    assert all(len(frame) < 30 for frame in frames(terminal))


def test_clear_leaves_an_empty_line(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    progress.clear()
    assert terminal.getvalue() == ""
    progress("data", 1, 2)
    progress.clear()
    assert frames(terminal)[-1] == ""


def test_json_has_a_line_at_most_each_second(clock: Clock) -> None:
    stdout = io.StringIO()
    progress = make(Output(as_json=True, stdout=stdout, stderr=io.StringIO()), clock)
    for step in range(30):
        progress("data", step * MIB, 30 * MIB)
        clock.now += 0.1
    progress("data", 30 * MIB, 30 * MIB)
    documents = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert len(documents) == 4
    assert documents[-1] == {
        "schema": "cxlfs.progress/1",
        "message_type": "status",
        "activity": "data",
        "done": 30 * MIB,
        "total": 30 * MIB,
        "unit": "bytes",
        "fraction": 1.0,
        "elapsed_seconds": 3.0,
        "eta_seconds": 0.0,
    }


def test_a_new_activity_begins_at_once(clock: Clock) -> None:
    stdout = io.StringIO()
    progress = make(Output(as_json=True, stdout=stdout, stderr=io.StringIO()), clock)
    progress("roots", 0, 2, "items")
    progress("segments", 0, 9, "items")
    activities = [json.loads(line)["activity"] for line in stdout.getvalue().splitlines()]
    assert activities == ["roots", "segments"]


@pytest.mark.parametrize(("done", "total"), [(0, 0), (5, 0), (9, 3)])
def test_odd_totals_stay_in_range(clock: Clock, done: int, total: int) -> None:
    stdout = io.StringIO()
    make(Output(as_json=True, stdout=stdout, stderr=io.StringIO()), clock)("data", done, total)
    assert json.loads(stdout.getvalue())["fraction"] == 1.0


def test_a_pipe_sees_nothing(clock: Clock) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    progress = make(Output(as_json=False, stdout=stdout, stderr=stderr), clock)
    progress("data", 1, 2)
    progress.clear()
    assert stdout.getvalue() == stderr.getvalue() == ""

from __future__ import annotations

import io
import json

import pytest

from cxlfs.cli.output import Output
from cxlfs.cli.progress import Progress
from cxlfs.units import GIB, MIB
from tests.support.clock import Clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    assert frames(terminal) == [
        "data        [######                  ]   25%  1.0 GiB of 4.0 GiB  512.0 MiB/s  ETA 6.0 s"
    ]


def test_items_are_counted_without_a_rate(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    progress("segments", 0, 6, "items")
    clock.now += 1
    progress("segments", 3, 6, "items")
    assert frames(terminal)[-1].endswith("50%  3 of 6  ETA 1.0 s")


def test_a_terminal_is_not_flooded(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    for step in range(1000):
        clock.now += 0.001
        progress("data", step, 1000)
    assert 8 <= len(frames(terminal)) <= 10


def test_what_is_over_at_once_is_not_shown(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    for activity in ("superblock", "roots", "segments"):
        progress(activity, 0, 9, "items")
        clock.now += 0.05
        progress(activity, 9, 9, "items")
    assert terminal.getvalue() == ""


def test_it_fits_a_narrow_terminal(clock: Clock, terminal: Terminal) -> None:
    output = Output(as_json=False, stdout=io.StringIO(), stderr=terminal)
    progress = make(output, clock, columns=30)
    progress("data", 0, 4 * GIB)
    clock.now += 1
    progress("data", 1, 4 * GIB)
    assert [len(frame) for frame in frames(terminal)] == [29]


def test_clear_leaves_an_empty_line(clock: Clock, terminal: Terminal) -> None:
    progress = make(Output(as_json=False, stdout=io.StringIO(), stderr=terminal), clock)
    progress.clear()
    assert terminal.getvalue() == ""
    progress("data", 0, 2)
    clock.now += 1
    progress("data", 1, 2)
    progress.clear()
    assert frames(terminal)[-1] == ""


def test_json_has_a_line_at_most_each_second(clock: Clock) -> None:
    stdout = io.StringIO()
    progress = make(Output(as_json=True, stdout=stdout, stderr=io.StringIO()), clock)
    for step in range(31):
        progress("data", step * MIB, 40 * MIB)
        clock.now += 0.125
    documents = [json.loads(line) for line in stdout.getvalue().splitlines()]
    assert [found["elapsed_seconds"] for found in documents] == [1.0, 2.0, 3.0]
    assert documents[-1] == {
        "schema": "cxlfs.progress/1",
        "message_type": "status",
        "activity": "data",
        "done": 24 * MIB,
        "total": 40 * MIB,
        "unit": "bytes",
        "fraction": 0.6,
        "elapsed_seconds": 3.0,
        "eta_seconds": 2.0,
    }


@pytest.mark.parametrize(("done", "total"), [(0, 0), (5, 0), (9, 3), (3, 3)])
def test_odd_totals_stay_in_range(clock: Clock, done: int, total: int) -> None:
    stdout = io.StringIO()
    progress = make(Output(as_json=True, stdout=stdout, stderr=io.StringIO()), clock)
    progress("data", 0, 9)
    clock.now += 1
    progress("data", done, total)
    found = json.loads(stdout.getvalue())
    assert (found["fraction"], found["eta_seconds"]) == (1.0, None)


def test_a_pipe_sees_nothing(clock: Clock) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    progress = make(Output(as_json=False, stdout=stdout, stderr=stderr), clock)
    progress("data", 0, 2)
    clock.now += 9
    progress("data", 1, 2)
    progress.clear()
    assert stdout.getvalue() == stderr.getvalue() == ""

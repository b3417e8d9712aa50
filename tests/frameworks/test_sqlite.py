"""SQLite, as experiment trackers use it: write-ahead log, shared memory, several processes."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace, kill, tell, wait_for_line

pytestmark = pytest.mark.frameworks("sqlite3")

ROWS = 400

WRITER = """
import sqlite3, sys
path, name, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
database = sqlite3.connect(path, timeout=60, isolation_level=None)
print("ready", flush=True)
sys.stdin.readline()
for row in range(rows):
    database.execute("BEGIN IMMEDIATE")
    database.execute("INSERT INTO metrics VALUES (?, ?, ?)", (name, row, row * 0.5))
    database.execute("UPDATE total SET rows = rows + 1")
    database.execute("COMMIT")
print("done", flush=True)
sys.stdin.readline()
database.close()
"""


def make_database(path: Path, journal_mode: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        (mode,) = database.execute(f"PRAGMA journal_mode={journal_mode}").fetchone()
        assert mode == journal_mode
        database.execute("CREATE TABLE metrics (run TEXT, step INTEGER, value REAL)")
        database.execute("CREATE TABLE total (rows INTEGER)")
        database.execute("INSERT INTO total VALUES (0)")
        database.commit()


def rows_of(path: Path) -> list[tuple[str, int, float]]:
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = database.execute("SELECT * FROM metrics ORDER BY run, step").fetchall()
        assert database.execute("SELECT rows FROM total").fetchone() == (len(rows),)
        return rows


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
def test_two_writers_and_a_reader(place: Workplace, twice: Twice, journal_mode: str) -> None:
    path = place.mountpoint / "mlruns.db"
    make_database(path, journal_mode)
    writers = [
        place.python(WRITER, path, name, ROWS, stderr=sys.stderr) for name in ("left", "right")
    ]
    for writer in writers:
        wait_for_line(writer)
    for writer in writers:
        tell(writer)
    with closing(sqlite3.connect(path, timeout=60)) as reader:
        seen = 0
        while seen < ROWS:  # each transaction wholly or not at all, while they are written
            (seen,) = reader.execute("SELECT rows FROM total").fetchone()
            assert reader.execute("SELECT count(*) FROM metrics").fetchone()[0] >= seen
    for writer in writers:
        wait_for_line(writer, b"done")
        tell(writer)
        assert writer.wait() == 0
    expected = [(name, row, row * 0.5) for name in ("left", "right") for row in range(ROWS)]
    twice(lambda: rows_of(path) == expected)


@pytest.mark.parametrize("journal_mode", ["wal", "delete"])
def test_what_a_killed_writer_committed_is_there(
    place: Workplace, twice: Twice, journal_mode: str
) -> None:
    path = place.mountpoint / "mlruns.db"
    make_database(path, journal_mode)
    writer = place.python(WRITER, path, "killed", ROWS, stderr=sys.stderr)
    wait_for_line(writer)
    tell(writer)
    wait_for_line(writer, b"done")
    kill(writer)
    expected = [("killed", row, row * 0.5) for row in range(ROWS)]
    twice(lambda: rows_of(path) == expected)

"""``scripts/peers`` counts what other people's suites say as they mean it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import peers
from tests.support.peer_outcomes import (
    KNOWN,
    Outcome,
    PeerError,
    count_check,
    count_prove,
    describe,
    differences,
    sort_stressor,
)
from tests.support.repository import ROOT

PEERS = [sys.executable, str(ROOT / "scripts" / "peers")]
PROVE = """\
/suite/tests/open/00.t ...... 1/47
Failed 3/47 subtests

Test Summary Report
-------------------
/suite/tests/chown/00.t   (Wstat: 0 Tests: 1280 Failed: 0)
  Expected ones passed:   1054, 1058, 1064
                1088
/suite/tests/open/00.t    (Wstat: 0 Tests: 47 Failed: 3)
  Failed tests:  3, 5-6
/suite/tests/open/01.t    (Wstat: 0 Tests: 5 Failed: 1)
  Failed test:  2
Files=3, Tests=1332,  9 wallclock secs ( 0.1 usr)
Result: FAIL
"""
CHECK = """\
generic/001  5s
generic/002  - output mismatch (see /x)
Ran: generic/001 generic/002 generic/003 generic/004
Not run: generic/003
Failures: generic/002
Failed 1 of 4 tests
"""
STRESS = "stress-ng: info:  [7] dispatching hogs: 2 dir\n"
GOOD = "stress-ng: info:  [7] successful run completed in 1.01s\n"
BAD = "stress-ng: info:  [7] unsuccessful run completed in 1.01s\n"


def test_prove_counts_each_test_of_a_file() -> None:
    outcome = count_prove(PROVE)
    assert outcome.failed == ["open/00.t:3", "open/00.t:5", "open/00.t:6", "open/01.t:2"]
    assert outcome.passed == 1332 - 4
    clean = count_prove("All tests successful.\nFiles=238, Tests=8798, 9 wallclock secs\n")
    assert (clean.passed, clean.failed) == (8798, [])


VERBOSE = """\
/suite/tests/open/00.t .........
1..3
ok 1
not ok 2 - tried 'open', expected 0, got EIO
ok 3 # skip not here
/suite/tests/open/01.t .........
1..1
not ok 1 # later, one day
Files=2, Tests=4,  9 wallclock secs ( 0.1 usr)
"""


def test_two_runs_are_compared_test_by_test() -> None:
    here = count_prove(VERBOSE)
    assert here.results == {
        "open/00.t:1": "ok",
        "open/00.t:2": "not ok",
        "open/00.t:3": "ok skip",
        "open/01.t:1": "not ok later",
    }
    assert not list(differences(here, dataclasses.asdict(here)))
    there = count_prove(VERBOSE.replace("not ok 2", "ok 2").replace("ok 3 #", "ok 4 #"))
    assert list(differences(here, dataclasses.asdict(there))) == [
        "open/00.t:2: not ok, and ok in the other run",
        "open/00.t:3: ok skip, and not run in the other run",
        "open/00.t:4: not run, and ok skip in the other run",
    ]
    with pytest.raises(PeerError, match="none of pjdfstest"):
        list(differences(here, {"suite": "fio", "results": {}}))


def test_check_counts_what_ran() -> None:
    outcome = count_check(CHECK)
    assert outcome.passed == 2
    assert outcome.failed == ["generic/002"]
    assert outcome.skipped == ["generic/003"]


@pytest.mark.parametrize("count", [count_prove, count_check])
def test_a_suite_that_ran_nothing_is_no_success(count: object) -> None:
    assert callable(count)
    with pytest.raises(PeerError):
        count("sh: 1: not found\n")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (STRESS + GOOD, "passed"),
        (STRESS + BAD, "failed"),
        (STRESS + "stress-ng: fail:  [8] dir: a name is gone\n" + GOOD, "failed"),
        (STRESS + "stress-ng: info:  [8] dir: skipping stressor, no room\n" + GOOD, "skipped"),
        (STRESS + "stress-ng: info:  [7] skipped: 2: dir (2)\n" + GOOD, "skipped"),
        (STRESS + "stress-ng: info:  [7] skipped: 0\n" + GOOD, "passed"),
        ("killed\n", "failed"),
    ],
)
def test_a_stressor_is_counted_by_its_summary(text: str, place: str) -> None:
    assert sort_stressor(text) == place


def test_only_what_is_not_known_is_unexpected() -> None:
    known = next(iter(KNOWN["xfstests"]))
    outcome = Outcome("xfstests", failed=[known, "generic/000"])
    assert outcome.unexpected() == ["generic/000"]
    lines = list(describe(outcome))
    assert lines[0] == f"differs {known}: {KNOWN['xfstests'][known]}"
    assert lines[1] == "FAILED generic/000"
    assert "(1 not expected)" in lines[2]


def test_the_document_gives_every_difference_with_its_reason() -> None:
    text = (ROOT / "docs" / "posix.md").read_text()
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in text.splitlines()
        if len(cells := line.split("|")) == 4 and "/" in cells[1]
    }
    shown = {name: reason for names, reason in rows.items() for name in names.split(", ")}
    assert shown == KNOWN["xfstests"]


def test_a_suite_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run([*PEERS, "pjdfstest"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs --at" in done.stderr
    with pytest.raises(PeerError, match="has no pjdfstest"):
        peers.Bench(tmp_path, 1, "native", tmp_path, (), True, None).needs("pjdfstest")

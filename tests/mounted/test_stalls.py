"""``scripts/stalls`` runs, and measures what it says. Nothing here looks at how long a wait was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bench.stalls import SCENARIOS, table
from tests.support.mount import fast_directory
from tests.support.repository import ROOT

STALLS = [sys.executable, str(ROOT / "scripts" / "stalls")]
TRIED = ["fallocate", "handles", "amplification_scattered"]
"""One of each sort: for some seconds, on many files, on a store that is nearly full."""


@pytest.mark.campaign
@pytest.mark.timeout(600)  # some seconds of two cores, which others may be using
def test_a_short_run_measures_both_victims(tmp_path: Path) -> None:
    path = tmp_path / "waits.json"
    arguments = ["--short", "--only", ",".join(TRIED), "--json", path]
    memory = fast_directory() or tmp_path
    done = subprocess.run(
        [*STALLS, *arguments, "--memory", memory], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())
    assert figures["missing"] == {}
    assert figures["short"] is True
    assert list(figures["waits"]) == TRIED
    for found in figures["waits"].values():
        for kind in ("read", "save"):
            waits = found[kind]
            assert 0 < waits["p50_s"] <= waits["p99_s"] <= waits["worst_s"]
            assert waits["count"] > 0
        assert found["seconds"] > 0
    handles, full = (figures["waits"][name] for name in TRIED[1:])
    assert handles["daemon_before_bytes"] > 0
    assert handles["daemon_bytes"] > 0
    assert full["written_bytes"] >= 5000 << 12, "what the program wrote, by the daemon's counter"
    assert full["amplification"] >= 1
    assert figures["waits"]["fallocate"]["rounds"] > 0
    again = subprocess.run([*STALLS, "--table", path], capture_output=True, text=True, check=True)
    assert again.stdout == done.stdout == f"{table(figures)}\n"


def test_a_memory_that_is_not_there_is_named(tmp_path: Path) -> None:
    arguments = ["--short", "--only", "cleaning", "--memory", tmp_path / "missing"]
    done = subprocess.run([*STALLS, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no directory" in done.stderr


def test_an_unknown_scenario_is_named() -> None:
    done = subprocess.run(
        [*STALLS, "--only", "cleaning,speed"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no scenario speed" in done.stderr


def test_the_document_shows_the_scenarios_of_the_program() -> None:
    text = (ROOT / "docs" / "scaling.md").read_text()
    _, waits, _ = re.split(r"<!-- (?:waits: .*|end of waits) -->\n", text)
    header, _, *lines = waits.splitlines()
    assert table({"waits": {}, "missing": {}}).startswith(header)
    shown = [line.split("|")[1].strip() for line in lines]
    assert set(shown) <= {scenario.text for scenario in SCENARIOS.values()}

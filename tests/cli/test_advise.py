"""``cxlfs advise`` as a user types it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.cli import Run, assert_two_lines

JOB = ("--nodes", "100", "--node-mtbf", "400h")


def test_what_is_given(run: Run) -> None:
    said = run("advise", *JOB, "--save", "1.5s", "--restart", "2min", "--every", "5min", "--json")
    assert said.code == 0, said
    found = said.document
    assert (found["mtbf_seconds"], found["save_seconds"], found["stall_seconds"]) == (
        14400,
        1.5,
        1.5,
    )
    best, given = found["plans"]
    assert (best["name"], given["name"], given["interval_seconds"]) == ("best", "given", 300)
    assert best["training"] > given["training"] > 0.9
    assert best["interval_seconds"] == pytest.approx(found["daly_seconds"], rel=0.01)
    said = run("advise", "--mtbf", "4h", "--save", "1m30s", "--stall", "100ms")
    assert "every 1m30s" in said.stdout
    assert "cxlfs.job.every(seconds=90)" in said.stdout


def test_what_lies_in_a_directory(run: Run, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    for step in range(4):
        path = tmp_path / f"step-{step}.npy"
        numpy.save(path, numpy.zeros(1000 + step))
        os.utime(path, (1000 + 600 * step,) * 2)
    before = sorted(tmp_path.iterdir())
    said = run("advise", tmp_path, "--try", *JOB, "--json")
    assert said.code == 0, said
    found = said.documents[-1]
    assert found["checkpoints"] == 4
    assert found["size_bytes"] == (tmp_path / "step-3.npy").stat().st_size
    assert found["restart_seconds"] == found["load_seconds"] > 0
    assert [plan["name"] for plan in found["plans"]] == ["best", "found"]
    assert found["plans"][1]["interval_seconds"] == 600
    assert sorted(tmp_path.iterdir()) == before
    said = run("advise", tmp_path, "--save", "20min", *JOB)
    assert "10m00s apart" in said.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--save", "1s"], 2, "--node-mtbf"),
        (["--nodes", "4", "--save", "1s"], 2, "--node-mtbf"),
        (["--mtbf", "1h"], 2, "--save"),
        (["--mtbf", "1h", "--try"], 2, "DIR"),
        (["--mtbf", "0", "--save", "1s"], 2, "MTBF"),
        (["--mtbf", "1h", "--save", "1s", "--stall", "2s"], 2, "--stall"),
        (["--mtbf", "1h", "--save", "1min", "--every", "30s"], 2, "less often"),
        (["--mtbf", "1x", "--save", "1s"], 2, "not a duration"),
        (["--mtbf", "1h", "--save", "1s", "--size", "many"], 2, "not a size"),
        (["EMPTY", "--try", "--mtbf", "1h"], 22, "--size"),
    ],
)
def test_what_cannot_be(
    run: Run, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    given = [str(tmp_path) if each == "EMPTY" else each for each in arguments]
    assert_two_lines(run("advise", *given), code, "cxlfs advise", words)

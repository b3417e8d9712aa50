"""``cxlfs keep``: what it says, what it removes, and what brings that back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_keep import run_of
from tests.support.cli import Run
from tests.support.mount import Workplace


def test_keep(run: Run, tmp_path: Path) -> None:
    top = run_of(tmp_path / "run", 1, 2, 3, 4)
    said = run("keep", top, "--last", "1", "--every", "2", "--dry-run")
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout.splitlines()[:3] == [
        f"kept: {top}/checkpoint-4 (newest good, last 1, every 2 steps)",
        f"would be removed: {top}/checkpoint-3",
        f"kept: {top}/checkpoint-2 (every 2 steps)",
    ]
    assert len(list(top.iterdir())) == 4
    found = run("keep", top, "--last", "1", "--every", "2", "--json").document
    assert (found["removed"], found["dry_run"]) == (2, False)
    assert [(c["step"], c["kept"]) for c in found["checkpoints"]] == [
        (4, True),
        (3, False),
        (2, True),
        (1, False),
    ]
    assert sorted(path.name for path in top.iterdir()) == ["checkpoint-2", "checkpoint-4"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "no rule says what to keep"),
        (("--last", "0"), 2, "0 is not in the range"),
        (("--best", "2"), 2, "--best needs a value"),
        (("--lowest", "a:b", "--highest", "a:b"), 2, "exclude each other"),
        (("--within", "soon"), 2, "not a duration"),
    ],
)
def test_misuse(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    top = run_of(tmp_path / "run", 1, 2)
    said = run("keep", top, *arguments)
    assert said.code == code
    assert words in said.stderr
    assert len(list(top.iterdir())) == 2


def test_what_was_removed_comes_back(run: Run, place: Workplace) -> None:
    place.mount()
    top = run_of(place.mountpoint / "run", 1, 2, 3)
    before = (top / "checkpoint-1" / "model.safetensors").read_bytes()
    assert run("keep", top, "--last", "1").code == 0
    assert [path.name for path in top.iterdir()] == ["checkpoint-3"]
    assert run("undelete", top / "checkpoint-1").code == 0
    assert (top / "checkpoint-1" / "model.safetensors").read_bytes() == before

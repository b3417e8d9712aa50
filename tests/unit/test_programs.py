"""The programs of scripts/ find the Python that has what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT, has_shebang, is_python

PROGRAMS = sorted(
    path
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and has_shebang(path) and is_python(path)
)
PYTHON = ROOT / ".venv" / "bin" / "python"
needs_environment = pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no .venv: scripts/prepare makes it"
)


def test_there_are_programs() -> None:
    assert {"bench", "crash-test", "fuzz-images", "kill-test", "sanitize", "test-vm"} <= {
        path.name for path in PROGRAMS
    }


@pytest.mark.sampled(3)
@needs_environment
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_runs_where_path_leads_to_another_python(path: Path, tmp_path: Path) -> None:
    """One that has nothing installed, as a distribution's."""
    bare = tmp_path / "bin"
    bare.mkdir()
    base = Path(sys.executable).resolve()
    (bare / "python3").write_text(f'#!/bin/sh\nexec {base} -S "$@"\n')
    (bare / "python3").chmod(0o755)
    done = subprocess.run(
        [path, "--help"],
        cwd=tmp_path,
        env={"PATH": f"{bare}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert path.name in done.stdout or "usage" in done.stdout


@needs_environment
def test_a_python_of_another_environment_stays(tmp_path: Path) -> None:
    """It was chosen: it says itself what it lacks."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    program = tmp_path / "program"
    program.write_text("import sys, tests.support.own_python; print(sys.prefix)")
    command = [tmp_path / "other/bin/python", program]
    done = subprocess.run(
        command,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()) == tmp_path / "other"

"""What is generated from the header, and what the build is told, is up to date."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_files_are_what_the_header_gives() -> None:
    command = [sys.executable, str(ROOT / "scripts/generate-native"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_build_knows_every_source_and_header() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = settings["tool"]["setuptools"]["ext-modules"]
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    included = {"csrc/_native.csrc.c"}  # text of the generator, repeated in what it writes
    assert set(extension["sources"]) == {name for name in files if name.endswith(".c")} - included
    assert (
        set(extension["depends"]) == {name for name in files if not name.endswith(".c")} | included
    )

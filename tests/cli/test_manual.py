"""The manual pages say what the program says, and come with the package."""

from __future__ import annotations

import shutil
import subprocess
import tomllib

import pytest

from cxlfs import cli
from cxlfs.cli.manual import pages
from tests.support.repository import ROOT

DIRECTORY = ROOT / "docs" / "man"


def test_the_pages_are_those_of_the_program() -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in DIRECTORY.iterdir()}
    assert kept == pages(), "run scripts/update-man"


def test_there_is_one_for_every_program_and_verb() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [*project["scripts"], *(f"cxlfs-{verb}" for verb in cli.VERBS)]
    assert sorted(f"{name}.8" for name in names) == sorted(pages())


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
@pytest.mark.parametrize("name", sorted(pages()))
def test_they_are_set_without_a_warning(name: str) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-cbou", DIRECTORY / name],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SEE ALSO"):
        assert heading in done.stdout


def test_documents_and_pages_come_with_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    files = settings["data-files"]
    found = {path for patterns in files.values() for each in patterns for path in ROOT.glob(each)}
    assert set((ROOT / "docs").glob("*.md")) <= found
    assert set(DIRECTORY.iterdir()) <= found

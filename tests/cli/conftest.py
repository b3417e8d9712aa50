from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import Run, make_run


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return make_run(capfd)


@pytest.fixture
def source(tmp_path: Path, run: Run) -> Path:
    """A small empty store in a file."""
    path = tmp_path / "store.cxlfs"
    assert run("mkfs", path, "--size", "64M", "--label", "small").code == 0
    return path

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import Run, make_run
from tests.support.mount import Workplace, why_not_mountable, workplace


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return make_run(capfd)


@pytest.fixture
def source(tmp_path: Path, run: Run) -> Path:
    """A small empty store in a file."""
    path = tmp_path / "store.cxlfs"
    assert run("mkfs", path, "--size", "64M", "--label", "small").code == 0
    return path


@pytest.fixture
def place() -> Iterator[Workplace]:
    reason = why_not_mountable()
    if reason is not None:
        pytest.skip(f"cannot mount here: {reason}")
    with workplace() as found:
        yield found

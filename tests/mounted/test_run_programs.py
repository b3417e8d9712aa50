"""A sample of ``scripts/run-programs``: programs in other languages, and CPython's tests, say
the same on tmpfs, on a mount, and under ``cxlfs run``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mount import MIB
from tests.support.run_programs import suites
from tests.support.run_programs.playing import ground

pytestmark = pytest.mark.mounted
PARTS = {"cpython": ["test_mmap", "test_fileio", "test_bufio"], "rust": [], "go": [], "java": []}
STORE_BYTES = 512 * MIB


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_program_says_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "INSTALLED", tmp_path)
    try:
        suite = suites.SUITES[name]()
    except suites.NotInstalledError as error:
        pytest.skip(f"not installed: {error}")
    with ground(store_bytes=STORE_BYTES) as on:
        results = on.compare(name, suite, ("tmpfs", "mount", "run"), PARTS[name])
    assert [each.differences for each in results] == [[], [], []]
    assert all(result.count() > 5 for result in results)
    assert name != "rust" or results[-1].direct_bytes > 100 * MIB

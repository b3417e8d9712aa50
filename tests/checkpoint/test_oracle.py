"""A sample of ``scripts/judge``: what libraries load and what they refuse, against what is said."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.oracle import FORMATS
from tests.support.oracle_values import Format
from tests.support.repository import ROOT

COUNT = 60
QUICK = ("safetensors", "safetensors-sharded", "numpy", "numpy-archive", "pickle", "joblib", "hdf5")


@pytest.mark.parametrize("found", FORMATS, ids=lambda each: each.name)
def test_no_library_contradicts(found: Format, seed: int) -> None:
    if not found.is_here:
        pytest.skip(f"not installed: {', '.join(found.needs)}")
    count = COUNT if found.name in QUICK else COUNT // 3
    command = [sys.executable, str(ROOT / "scripts" / "judge"), "--only", found.name]
    command += ["--count", str(count), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert f"{found.name}: {count}" in done.stdout

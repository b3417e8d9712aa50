"""Runs ``harness.c``: checks of csrc/ that need to stand inside it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
SOURCES = [
    "copy.c",
    "copy_x86.c",
    "crc32c.c",
    "crc32c_arm.c",
    "crc32c_x86.c",
    "dispatch.c",
    "faults.c",
    "guard.c",
    "media.c",
    "media_io.c",
    "persist_arm.c",
    "persist_x86.c",
    "recorder.c",
]
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_ragged_copies_fences_and_nested_guards(tmp_path: Path) -> None:
    binary = tmp_path / "harness"
    files = [HERE / "harness.c", *(CSRC / name for name in SOURCES)]
    options = ["-std=gnu11", "-O2", *STRICT, "-D_GNU_SOURCE", "-pthread", f"-I{CSRC}"]
    options += shlex.split(os.environ.get("CFLAGS", ""))
    subprocess.run(["cc", *options, "-o", binary, *files], check=True)
    result = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")

"""Runs ``harness.c``: checks of csrc/ that need to stand inside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.native.compiling import compile_program, needs_compiler

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


@needs_compiler
def test_ragged_copies_fences_and_nested_guards(tmp_path: Path) -> None:
    binary = tmp_path / "harness"
    compile_program(["harness.c"], SOURCES, binary)
    result = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")

"""Runs ``harness.c``: checks of csrc/ that need to stand inside it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.native.compiling import compile_program, needs_compiler

SOURCES = [
    "persist/copy.c",
    "persist/copy_x86.c",
    "persist/crc32c.c",
    "persist/crc32c_arm.c",
    "persist/crc32c_x86.c",
    "persist/dispatch.c",
    "persist/faults.c",
    "persist/guard.c",
    "persist/media.c",
    "persist/media_io.c",
    "persist/persist_arm.c",
    "persist/persist_x86.c",
    "persist/recorder.c",
]


@needs_compiler
def test_ragged_copies_fences_and_nested_guards(tmp_path: Path) -> None:
    binary = tmp_path / "harness"
    compile_program(["harness.c"], SOURCES, binary)
    result = subprocess.run([binary], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")

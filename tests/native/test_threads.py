"""Runs ``threads.c`` and ``threads_direct.c``: transport and extent map under real threads.

``scripts/sanitize --threads`` builds it with ThreadSanitizer, and lets it run longer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.compiling import all_sources, compile_program, needs_compiler

SECONDS = os.environ.get("CXLFS_THREADS_SECONDS", "1")


PROGRAMS = {
    "threads": (["threads.c", "threads_store.c", "threads_snapshots.c"], ""),
    "threads_direct": (["threads_direct.c"], "transport/"),
}
"""A busy daemon; a program that stores file data by itself, and its daemon, which needs less of
csrc/: what is left out.
"""


@needs_compiler
@pytest.mark.parametrize("name", PROGRAMS)
def test_threads(name: str, tmp_path: Path, seed: int) -> None:
    binary = tmp_path / name
    programs, without = PROGRAMS[name]
    others = [path for path in all_sources() if not (without and path.startswith(without))]
    compile_program(programs, others, binary)
    command = [str(binary), SECONDS, str(seed)]
    if (setarch := shutil.which("setarch")) is not None:
        # ThreadSanitizer does not find its way in the address spaces of kernels that shuffle much.
        command = [setarch, os.uname().machine, "-R", *command]
    print(f"seed {seed}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "WARNING: ThreadSanitizer" not in result.stderr
    print(result.stderr)

"""Runs ``threads.c``: the transport and the extent map under real threads.

``scripts/sanitize --threads`` builds it with ThreadSanitizer, and lets it run longer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.native.compiling import all_sources, compile_program, needs_compiler

SECONDS = os.environ.get("CXLFS_THREADS_SECONDS", "2")


@needs_compiler
def test_a_busy_daemon(tmp_path: Path, seed: int) -> None:
    binary = tmp_path / "threads"
    compile_program(["threads.c", "threads_store.c", "threads_snapshots.c"], all_sources(), binary)
    command = [str(binary), SECONDS, str(seed)]
    if (setarch := shutil.which("setarch")) is not None:
        # ThreadSanitizer does not find its way in the address spaces of kernels that shuffle much.
        command = [setarch, os.uname().machine, "-R", *command]
    print(f"seed {seed}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert "WARNING: ThreadSanitizer" not in result.stderr
    print(result.stderr)

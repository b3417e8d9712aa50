"""Runs ``client.c``: programs that store by themselves, against a daemon in the same program."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.native.compiling import all_sources, compile_program, needs_compiler


@needs_compiler
def test_files_that_a_program_stores_into(tmp_path: Path, seed: int) -> None:
    binary = tmp_path / "client"
    compile_program(["client.c"], all_sources(), binary)
    command = [str(binary), str(seed)]
    if (setarch := shutil.which("setarch")) is not None:
        # ThreadSanitizer does not find its way in the address spaces of kernels that shuffle much.
        command = [setarch, os.uname().machine, "-R", *command]
    print(f"seed {seed}")
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr

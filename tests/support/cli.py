"""Run the command line in this process, or as a program, and read what it said."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cxlfs import cli

NOT_IMPORTED = frozenset(
    {"cxlfs._run", *(f"cxlfs.adapters.torch.{name}" for name in ("reader", "tensors", "writer"))}
)
"""The library of cxlfs run is no module; the others are imported where PyTorch is."""
_IMPORT_ALL = (
    "import importlib, pkgutil, cxlfs; "
    "[importlib.import_module(m.name) for m in pkgutil.walk_packages(cxlfs.__path__, 'cxlfs.')"
    f" if m.name not in {sorted(NOT_IMPORTED)}]"
)
PROGRAM = [sys.executable, "-c", "import sys; from cxlfs.cli import main; sys.exit(main())"]


@dataclasses.dataclass(frozen=True)
class Said:
    """What a command returned and wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The only JSON document."""
        (document,) = self.documents
        return document

    @property
    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


Run = Callable[..., Said]


def make_run(capfd: pytest.CaptureFixture[str]) -> Run:
    """A function that runs ``cxlfs ARGUMENTS`` in this process."""

    def run(*arguments: str | Path) -> Said:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Said(code, captured.out, captured.err)

    return run


def run_program(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    program: str = "cxlfs",
    user: int | None = None,
) -> Said:
    """A command as a process of its own; it becomes ``user`` once everything is imported, for the
    interpreter may lie where that user cannot go.
    """
    entry = {
        "cxlfs": "from cxlfs.cli import main",
        "mount.cxlfs": "from cxlfs.cli import mount_main as main",
        "fsck.cxlfs": "from cxlfs.cli import fsck_main as main",
    }[program]
    become = (
        "" if user is None else f"; {_IMPORT_ALL}; import os; os.setresuid({user}, {user}, {user})"
    )
    texts = [str(argument) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {entry}{become}; sys.exit(main())", *texts],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=100,
        env={**os.environ, **(environment or {})},
    )
    return Said(done.returncode, done.stdout, done.stderr)


def assert_two_lines(said: Said, code: int, command: str, *words: str) -> None:
    """The promise for every expected error: one line that says what, one that says what next."""
    assert said.code == code, said
    assert said.stdout == ""
    first, second = said.stderr.splitlines()
    assert first.startswith(f"{command}: ")
    assert second.startswith("next: ")
    assert len(second) > len("next: ")
    for word in words:
        assert word in said.stderr

"""``scripts/demo-job`` in short: a rank is killed in mid-save, and its node replaced; and that it
leaves nothing behind, whatever ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.frameworks("torch"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="nodes have namespaces of their own: needs root"),
]
pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

DEMO = ROOT / "scripts" / "demo_job_run.py"
EXIT_FAILED, EXIT_MISSING = 1, 69


def begin(where: Path, *only: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, DEMO, "--directory", where, "--only", *only],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def require_gone(where: Path) -> None:
    """No file, and no process that has to do with one."""
    assert list(where.iterdir()) == []
    name = os.fsencode(where)
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.parent.name != str(os.getpid()) and name in _read(path)
    ]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_killed_and_replaced(tmp_path: Path) -> None:
    with begin(tmp_path, "replaced") as demo:
        told, errors = demo.communicate()
    if demo.returncode == EXIT_MISSING:
        pytest.skip(errors)
    assert demo.returncode == 0, told + errors
    assert "SIGKILL for rank 2, inside Save" in told
    assert "rank 3 on node4 got its shards from another node's store" in told
    assert told.count("bit for bit") == 2
    require_gone(tmp_path)


def test_ended_by_a_signal(tmp_path: Path) -> None:
    with begin(tmp_path, "votes") as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("$ torchrun"):
                demo.send_signal(signal.SIGINT)
        errors = demo.communicate()[1]
    if demo.returncode == EXIT_MISSING:
        pytest.skip(errors)
    assert (demo.returncode, errors) == (EXIT_FAILED, "demo-job: ended by SIGINT\n")
    require_gone(tmp_path)

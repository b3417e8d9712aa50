"""The short form of scripts/test-vm, and what it says on a machine that lacks something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm import needs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test-vm"
MISSING = [*needs.missing_packages(), *needs.other_problems()]


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"no virtual machine here: {'; '.join(MISSING)}")
def test_power_cuts_on_emulated_persistent_memory(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--short", "--python", sys.executable]
    ended = subprocess.run(
        [*command, "--json", str(report_file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(report_file.read_text())
    assert report["passed"]
    assert [target["target"] for target in report["targets"]] == [
        "nvdimm-devdax",
        "nvdimm-xfs",
        "cxl-devdax",
    ]
    for target in report["targets"]:
        assert target["problems"] == []
        assert target["rounds"][0]["cut_in"] == "write latest.bin"
        assert target["rounds"][1]["outcome"] == "before"
        assert target["rounds"][-1]["outcome"] == "nothing in flight"
        assert target["rounds"][-1]["files_compared"] > 0


def test_missing_packages_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(needs, "find_program", lambda _name: None)
    packages = needs.missing_packages(boot=tmp_path)
    assert packages[0] == "qemu-system-x86"
    assert needs.KERNEL_PACKAGE in packages
    assert len(packages) == len(set(packages))
    line = needs.apt_line(packages)
    assert line.startswith("apt-get update && apt-get install -y")
    assert all(package in line for package in packages)


def test_a_kernel_that_is_too_old_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "vmlinuz-6.1.0-40-amd64").touch()
    assert needs.find_kernel(tmp_path) is None


def test_exit_status_69_when_something_is_missing(tmp_path: Path) -> None:
    nowhere = tmp_path / "python"
    nowhere.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    nowhere.chmod(0o755)
    command = [sys.executable, str(SCRIPT), "--short", "--python", str(nowhere)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 69, ended.stdout + ended.stderr
    assert ended.stderr.startswith("test-vm: ")

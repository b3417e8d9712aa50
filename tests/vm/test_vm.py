"""The short form of scripts/test-vm, and what it says on a machine that lacks something."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm import needs
from tests.vm.machine import TARGETS, some_targets

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "test-vm"
needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")
MISSING = [*needs.missing_packages(), *needs.other_problems()]


@pytest.mark.vm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"no virtual machine here: {'; '.join(MISSING)}")
def test_power_cuts_on_emulated_persistent_memory(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), "--short", "--python", sys.executable]
    names = ["nvdimm-devdax", "nvdimm-xfs", "cxl-devdax"]
    command += [word for name in names for word in ("--target", name)]
    ended = subprocess.run(
        [*command, "--json", str(report_file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(report_file.read_text())
    assert report["passed"]
    assert [target["target"] for target in report["targets"]] == names
    for target in report["targets"]:
        assert target["problems"] == []
        assert target["rounds"][0]["cut_in"] == "write latest.bin"
        assert target["rounds"][1]["outcome"] == "before"
        assert target["rounds"][1]["files_compared"] > 0
        assert set(target["rounds"][1]["commands"]) == {"mount", "status", "umount", "verify"}


def test_a_short_run_boots_cxl_and_each_of_the_others_with_some_seed() -> None:
    drawn = [[target.name for target in some_targets(seed)] for seed in range(20)]
    assert all(len(names) == 2 and "cxl-devdax" in names for names in drawn)
    assert {name for names in drawn for name in names} == {target.name for target in TARGETS}


def test_missing_packages_are_named_with_the_line_that_installs_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(needs, "find_program", lambda _name: None)
    packages = needs.missing_packages(tmp_path)
    assert packages[0] == "qemu-system-x86"
    assert needs.KERNEL_PACKAGE in packages
    assert len(packages) == len(set(packages))
    line = needs.apt_line(packages)
    assert line.startswith("apt-get update && apt-get install -y")
    assert all(package in line for package in packages)


def kernel_package(folder: Path, version: str) -> Path:
    """A Debian package with what is looked at of a kernel's, and one file that is not."""
    tree = folder / "tree"
    for path in (f"boot/vmlinuz-{version}", f"lib/modules/{version}/kernel/fuse.ko", "usr/doc"):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(path)
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN/control").write_text(
        f"Package: linux-image-{version}\nVersion: 1\nArchitecture: all\n"
        "Maintainer: nobody <nobody@localhost>\nDescription: a kernel\n"
    )
    package = folder / "kernel.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", tree, package]
    subprocess.run(command, check=True, capture_output=True)
    return package


@needs_dpkg
def test_a_kernel_is_unpacked_and_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that lay there before goes, and of one that cannot be unpacked nothing is left."""
    depmod = tmp_path / "depmod"  # of the package kmod, which this machine may not have yet
    depmod.write_text('#!/bin/sh\necho "$3" >"$2/lib/modules/$3/modules.dep"\n')
    depmod.chmod(0o755)
    monkeypatch.setattr(needs, "find_program", lambda _name: str(depmod))
    root = tmp_path / "cache/kernel"
    for version in ("6.12.1-amd64", "6.12.3-amd64"):
        folder = tmp_path / version
        folder.mkdir()
        needs.unpack_kernel(kernel_package(folder, version), root)
        kernel = needs.find_kernel(root)
        assert kernel is not None
        assert kernel.version == version
        assert kernel.image.read_text() == f"boot/vmlinuz-{version}"
        assert (kernel.modules / "kernel/fuse.ko").exists()
    assert [path.name for path in (root / "boot").iterdir()] == ["vmlinuz-6.12.3-amd64"]
    depmod.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        needs.unpack_kernel(tmp_path / "6.12.1-amd64/kernel.deb", root)
    assert needs.find_kernel(root) == kernel
    assert list(root.parent.iterdir()) == [root]


def test_a_kernel_that_is_too_old_does_not_count(tmp_path: Path) -> None:
    for version in ("6.1.0-40-amd64", "6.12.3-amd64"):
        (tmp_path / "boot").mkdir(exist_ok=True)
        (tmp_path / f"boot/vmlinuz-{version}").touch()
        (tmp_path / "lib/modules" / version).mkdir(parents=True)
    (tmp_path / "lib/modules/6.1.0-40-amd64/modules.dep").touch()
    assert needs.find_kernel(tmp_path) is None
    (tmp_path / "lib/modules/6.12.3-amd64/modules.dep").touch()
    found = needs.find_kernel(tmp_path)
    assert found is not None
    assert found.version == "6.12.3-amd64"


def test_exit_status_69_when_something_is_missing(tmp_path: Path) -> None:
    nowhere = tmp_path / "python"
    nowhere.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    nowhere.chmod(0o755)
    command = [sys.executable, str(SCRIPT), "--short", "--python", str(nowhere)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 69, ended.stdout + ended.stderr
    assert ended.stderr.startswith("test-vm: ")

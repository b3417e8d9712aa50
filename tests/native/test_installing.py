"""Every way of installing the package makes an extension that works: a wheel, an editable one, and
one of the source distribution, elsewhere. A test run draws one way beside the wheel. Uninstalling
it leaves what ``docs/operations.md`` names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from tests.support.repository import ROOT, files

LACKING = [
    name for name in ("build", "cffi", "setuptools") if importlib.util.find_spec(name) is None
]
needs_tools = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
COMPILER = """#!/bin/sh
for word; do
    case $before in -c) source=$word ;; -o) made=$word ;; esac
    before=$word
done
[ -n "$source" ] || exec {cc} "$@"
kept={kept}/$(sha256sum <"$source" | cut -d ' ' -f 1).o
[ -e "$kept" ] || {{ {cc} "$@" -O0 && cp "$made" "$kept.$$" && mv "$kept.$$" "$kept"; }} || exit 1
cp "$kept" "$made"
"""
"""Compiles each source once, and soon: the first time is from the source distribution, which must
have all that it needs.
"""
GENERATED = "_native_ffi.c"
"""Of every build, and in no distribution."""


def checkout(folder: Path) -> Path:
    """A copy of what git keeps, or would: whatever was built here stays here."""
    for path in files():
        if path.relative_to(ROOT).parts[0] != "tests":
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return folder


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What it prints; warnings of tools that are not ours are no matter here."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def environment_beside_ours(folder: Path) -> Path:
    """The Python of a new environment that sees what is installed in ours, but for cxlfs itself."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=folder).strip()
    )
    ours = Path(sysconfig.get_path("purelib"))
    for path in ours.iterdir():
        if not path.name.startswith(("cxlfs", "__editable__")):
            (site / path.name).symlink_to(path)
    return python


def assert_works(python: Path, elsewhere: Path) -> None:
    """Not from the directory of the checkout: what was installed is what is imported."""
    code = "import cxlfs.native as n; print(n.crc32c(b'123456789'), n.__file__)"
    number, place = run(python, "-c", code, cwd=elsewhere).split()
    assert int(number) == 0xE3069283
    assert not Path(place).is_relative_to(ROOT)
    command = python.with_name("cxlfs")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert run(command, "--version", cwd=elsewhere).startswith(version)


def listing(folder: Path) -> set[Path]:
    """Everything below it, but not what lies behind links."""
    return {
        Path(where, name) for where, folders, found in os.walk(folder) for name in folders + found
    }


def assert_leaves_what_is_named(python: Path, before: set[Path], scratch: Path) -> None:
    """After the use of everything that writes without a mount: commands, a service. ``before``:
    what the environment held before cxlfs came into it.
    """
    environment = python.parents[1]
    assert (environment / "share/man/man8/cxlfs.8").exists()
    scratch.mkdir()
    home, root = scratch / "home", scratch / "root"
    home.mkdir()
    program, store = python.with_name("cxlfs"), scratch / "store"
    for command in (
        ["mkfs", store, "--size", "64M"],
        ["verify", store],
        ["status", store],
        ["list", store],
        ["dump", store, "superblock"],
        ["completion", "bash"],
        ["service", "install", store, "/mnt/ckpt", "--root", root],
    ):
        run(program, *command, cwd=scratch, HOME=str(home), XDG_RUNTIME_DIR=str(home))
    run(python, "-m", "pip", "uninstall", "--yes", "cxlfs", cwd=scratch)
    left = listing(environment) - before
    assert {path.parts[0] for path in (p.relative_to(environment) for p in left)} == {"share"}
    assert [path for path in left if not path.is_dir()] == []  # pip's way with emptied folders
    assert listing(home) == set()
    service = {f"/{path.relative_to(root)}" for path in listing(root) if path.is_file()}
    assert service == {"/etc/systemd/system/cxlfs@.service", "/etc/cxlfs/mnt-ckpt.conf"}
    document = (ROOT / "docs/operations.md").read_text()
    assert [path for path in service if path not in document] == []


@needs_tools
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_every_way_of_installing_works(tmp_path: Path, sample: int, every_way: bool) -> None:
    """``python -m build`` with its wheel and its sdist installed elsewhere, ``pip install .`` and
    ``pip install -e .``.
    """
    source = checkout(tmp_path / "source")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(cc=os.environ.get("CC", "gcc"), kept=tmp_path / "objects"))
    compiler.chmod(0o755)
    (tmp_path / "objects").mkdir()
    flags = {"CC": str(compiler)}
    python = sys.executable
    run(python, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", cwd=source, **flags)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-abi3-" in wheel.name
    with tarfile.open(sdist) as archive:
        inside = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {"csrc/build_backend.py", "csrc/cxlfs.h", "csrc/README.md", "pyproject.toml"} <= inside
    with zipfile.ZipFile(wheel) as package:
        inside |= set(package.namelist())
    assert not [name for name in inside if name.endswith((GENERATED, ".o"))]
    ways = {
        "wheel": [str(wheel)],
        "sdist": ["--no-build-isolation", str(sdist)],
        "checkout": ["--no-build-isolation", str(source)],
        "editable": ["--no-build-isolation", "--editable", str(source)],
    }
    drawn = [*ways] if every_way else ["wheel", [*ways][1 + sample % 3]]
    for name in drawn:
        arguments = ways[name]
        beside = environment_beside_ours(tmp_path / name)
        before = listing(tmp_path / name)
        install = ["-m", "pip", "install", "--no-deps"]
        if name != "wheel":
            install.append("--no-compile")  # of the others little is run
        run(beside, *install, *arguments, cwd=tmp_path, **flags)
        assert_works(beside, tmp_path)
        if name == "wheel":
            assert_leaves_what_is_named(beside, before, tmp_path / "used")

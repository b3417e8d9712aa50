"""What the build is told, and what it makes of the header."""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path

from tests.support.repository import ROOT, files

GENERATED = "_native_ffi.c"
"""Of every build."""


def test_build_knows_every_source_and_header() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (extension,) = settings["tool"]["setuptools"]["ext-modules"]
    below = [path for path in files() if path.is_relative_to(ROOT / "csrc")]
    names = {str(path.relative_to(ROOT)) for path in below}
    sources = {name for name in names if name.endswith(".c")}
    assert set(extension["sources"]) - sources == {f"build/generated/{GENERATED}"}
    assert sources <= set(extension["sources"])
    assert set(extension["depends"]) == names - sources


def test_nothing_generated_is_kept() -> None:
    kept = [p for p in files() if p.suffix in (".c", ".h") and b"_cffi_" in p.read_bytes()]
    assert kept == []


def test_a_build_without_a_change_compiles_nothing(tmp_path: Path) -> None:
    """What is generated stays as it is, with its time."""
    sys.path.insert(0, str(ROOT / "csrc"))
    try:
        from build_backend import HEADER, generate
    finally:
        sys.path.remove(str(ROOT / "csrc"))
    (tmp_path / HEADER).parent.mkdir()
    shutil.copy(ROOT / HEADER, tmp_path / HEADER)
    path = generate(tmp_path)
    os.utime(path, (1, 1))
    assert generate(tmp_path) == path
    assert path.stat().st_mtime == 1
    text = (ROOT / HEADER).read_text(encoding="utf-8")
    (tmp_path / HEADER).write_text(text.replace("cxl_crc32c(", "cxl_crc32d("))
    assert "cxl_crc32d" in generate(tmp_path).read_text(encoding="utf-8")
    assert path.stat().st_mtime != 1

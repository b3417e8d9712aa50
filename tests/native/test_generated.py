"""What the build is told, and what it makes of the headers."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.support.repository import ROOT, files

GENERATED = "_native_ffi.c"
"""Of every build."""
PRELOADED = "csrc/run/"
"""What only the library of ``cxlfs run`` is made of; of the rest it takes a few."""


def included_by(sources: Iterable[str]) -> set[str]:
    """Headers of csrc/ that these include, and those that they include in turn."""
    found: set[str] = set()
    left = list(sources)
    while left:
        text = (ROOT / left.pop()).read_text()
        named = {f"csrc/{name}" for name in re.findall(r'^#include "(.+)"$', text, re.MULTILINE)}
        left += named - found
        found |= named
    return found


def test_build_knows_every_source_and_header() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    native, preloaded = settings["tool"]["setuptools"]["ext-modules"]
    below = [path for path in files() if path.is_relative_to(ROOT / "csrc")]
    names = {str(path.relative_to(ROOT)) for path in below}
    sources = {name for name in names if name.endswith(".c")}
    assert (native["name"], preloaded["name"]) == ("cxlfs._native", "cxlfs._run")
    own = {name for name in names if name.startswith(PRELOADED)}
    assert sources & own <= set(preloaded["sources"]) <= sources
    assert set(preloaded["depends"]) == included_by(preloaded["sources"])
    assert set(native["sources"]) - sources == {f"build/generated/{GENERATED}"}
    assert sources - own <= set(native["sources"])
    assert set(native["depends"]) == names - sources - own
    for key in ("extra-compile-args", "define-macros", "include-dirs"):
        assert native[key] == preloaded[key], key


def test_nothing_generated_is_kept() -> None:
    kept = [p for p in files() if p.suffix in (".c", ".h") and b"_cffi_" in p.read_bytes()]
    assert kept == []


def test_a_build_without_a_change_compiles_nothing(tmp_path: Path) -> None:
    """What is generated stays as it is, with its time."""
    sys.path.insert(0, str(ROOT / "csrc"))
    try:
        from build_backend import HEADERS, generate
    finally:
        sys.path.remove(str(ROOT / "csrc"))
    for header in HEADERS:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / header, tmp_path / header)
    path = generate(tmp_path)
    os.utime(path, (1, 1))
    assert generate(tmp_path) == path
    assert path.stat().st_mtime == 1
    for number, header in enumerate(HEADERS):
        os.utime(path, (1, 1))
        with (tmp_path / header).open("a", encoding="utf-8") as file:
            file.write(f"int cxl_one_more_{number}(void);\n")
        assert f"cxl_one_more_{number}" in generate(tmp_path).read_text(encoding="utf-8")
        assert path.stat().st_mtime != 1


def test_what_cffi_cannot_parse_is_left_out() -> None:
    sys.path.insert(0, str(ROOT / "csrc"))
    try:
        from build_backend import declarations
    finally:
        sys.path.remove(str(ROOT / "csrc"))
    text = (
        "#define ONE(a) \\\n    ((a) + \\\n     1)\nint f(void); /* a\n b */\n"
        '_Static_assert(sizeof(int) ==\n               4, "");\n#endif\nint g(void);\n'
    )
    assert declarations(text).split() == ["int", "f(void);", "int", "g(void);"]

"""The habits that a program can check: sizes, headers, leftovers, and what stands where."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

import pytest

from tests.support.repository import (
    ROOT,
    files,
    has_shebang,
    name_of,
    python_files,
)

FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 100
C_LINE_COLUMNS_MAX = 120  # declarations with their units and types in one line read better
TOP_LEVEL = {
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "csrc",
    "cxlfs",
    "docs",
    "pyproject.toml",
    "scripts",
    "tests",
}
PROGRAMS = ("scripts/demo", "scripts/demo-job", "scripts/test", ".ci/run")
"""What README and continuous integration call by name."""
LEFTOVERS = re.compile(rb"\b(?:TODO|FIXME|XXX|HACK)\b|\bbreakpoint\(|\bset_trace\(")


def sources() -> list[Path]:
    """What people write and read as code."""
    code = [p for p in files() if p.suffix in (".c", ".h", ".sh", ".py")]
    programs = [p for p in files() if p.parent == ROOT / "scripts" and not p.suffix]
    return [*code, *programs]


def texts() -> list[Path]:
    return [p for p in files() if b"\0" not in p.read_bytes()[:8192]]


def test_there_is_something_to_check() -> None:
    names = {name_of(path) for path in sources()}
    some = {"cxlfs/format/layout.py", "csrc/persist/copy.c", "scripts/test", "tests/test_tidy.py"}
    assert some <= names
    assert ROOT / "scripts" / "kill-test" in python_files("scripts")


def test_files_are_short() -> None:
    too_long = {
        name_of(path): lines
        for path in sources()
        if (lines := len(path.read_bytes().splitlines())) > FILE_LINES_MAX
    }
    assert too_long == {}


def test_functions_are_short() -> None:
    too_long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    too_long.append(f"{name_of(path)}: {node.name} has {lines}")
    assert too_long == []


def test_functions_in_c_are_short() -> None:
    too_long = []
    for path in sources():
        if path.suffix != ".c":
            continue
        begin = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line == "{" or re.match(r"\S.*\)\s*\{$", line):
                begin = number
            elif line == "}" and number - begin > FUNCTION_LINES_MAX:
                too_long.append(f"{name_of(path)}:{begin} has {number - begin}")
    assert too_long == []


def columns_max(path: Path) -> int:
    return C_LINE_COLUMNS_MAX if path.suffix in {".c", ".h"} else LINE_COLUMNS_MAX


def test_lines_are_short() -> None:
    too_long = [
        f"{name_of(path)}:{number}"
        for path in sources()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(re.sub(r"  # (type: ignore|noqa).*", "", line)) > columns_max(path)
    ]
    assert too_long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name_of(path)
        for path in python_files("cxlfs", "scripts")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    silent += [
        name_of(path)
        for path in sources()
        if path.suffix in (".c", ".h") and not path.read_text().startswith("/*")
    ]
    assert silent == []


def test_nothing_is_left_over() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.decode(errors='replace').strip()}"
        for path in texts()
        if path != Path(__file__)
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if LEFTOVERS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("line", [b"# TODO later", b"x = 1  # FIXME", b"breakpoint()"])
def test_leftovers_would_be_found(line: bytes) -> None:
    assert LEFTOVERS.search(line)


def test_orders_are_asked_for_by_kind() -> None:
    """NumPy's default argsort of 64-bit numbers is wrong on the AVX2 that QEMU 7.2 emulates."""
    calls = [
        (name_of(path), node.lineno, {keyword.arg for keyword in node.keywords})
        for path in python_files("cxlfs")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "argsort"
    ]
    assert len(calls) > 3
    assert [call for call in calls if "kind" not in call[2]] == []


def test_texts_end_their_lines() -> None:
    untidy = []
    for path in texts():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            untidy.append(f"{name_of(path)}: the last line does not end")
        if re.search(rb"[ \t\r]$", data, re.MULTILINE):
            untidy.append(f"{name_of(path)}: white space at the end of a line")
    assert untidy == []


def test_the_top_level_is_what_was_agreed() -> None:
    tops = {path.relative_to(ROOT).parts[0] for path in files()}
    assert {top for top in tops if not top.startswith(".")} == TOP_LEVEL


def test_programs_can_be_run() -> None:
    for name in PROGRAMS:
        assert os.access(ROOT / name, os.X_OK), name
    for path in files():
        if os.access(path, os.X_OK):
            assert has_shebang(path), f"{name_of(path)} has a run bit but no #!"
        elif path.parent == ROOT / "scripts":
            assert not has_shebang(path), f"{name_of(path)} has no run bit"

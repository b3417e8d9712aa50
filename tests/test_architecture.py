"""What may know what. Layers are declared once, for import-linter in pyproject.toml; here are the
rules that are about more than imports between modules.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.repository import ROOT, name_of, python_files

Rule = Callable[[ast.AST], bool]


def imports_extension(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        return False
    return any(name.split(".")[:2] == ["cxlfs", "_native"] for name in names)


def imports_any(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "typing" and any(alias.name == "Any" for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr == "Any"


def declares_structured_dtype(node: ast.AST) -> bool:
    """``np.dtype([...])`` and ``np.dtype({...})``, and the same literals given as ``dtype=``."""
    if not isinstance(node, ast.Call):
        return False
    is_dtype = isinstance(node.func, ast.Attribute) and node.func.attr == "dtype"
    given = [*node.args[:1]] if is_dtype else []
    given += [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]
    return any(isinstance(value, ast.List | ast.Dict) for value in given)


def prints(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "print"
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) == ("sys", "stdout")
    )


def is_asynchronous(node: ast.AST) -> bool:
    return isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)


RULES: dict[str, tuple[Rule, tuple[str, ...], str]] = {
    "the C extension": (imports_extension, ("native",), "from cxlfs._native import lib"),
    "Any": (imports_any, ("native",), "from typing import Any"),
    "structured dtypes": (
        declares_structured_dtype,
        ("native", "format/layout.py"),
        "RECORD = np.dtype([('magic', '<u4')])",
    ),
    "printing": (prints, ("cli",), "print('hello')"),
    "await": (is_asynchronous, ("daemon", "fuse"), "async def read(): await nothing()"),
}
"""Name: what it looks for, where below cxlfs it may be, an example that it must find."""


def may_hold(allowed: tuple[str, ...], path: Path) -> bool:
    """True if a rule permits what it looks for in the file ``path``."""
    permitted = [ROOT / "cxlfs" / name for name in allowed]
    return any(place == path or place in path.parents for place in permitted)


@functools.cache
def violations() -> dict[str, list[str]]:
    """Return the places that break each rule: all files are read once for all rules."""
    found: dict[str, list[str]] = {name: [] for name in RULES}
    for path in python_files("cxlfs"):
        rules = {
            name: rule for name, (rule, allowed, _) in RULES.items() if not may_hold(allowed, path)
        }
        for node in ast.walk(ast.parse(path.read_text())):
            for name, rule in rules.items():
                if rule(node):
                    found[name].append(f"{name_of(path)}:{getattr(node, 'lineno', 0)}")
    return found


@pytest.mark.parametrize("name", RULES)
def test_each_thing_has_its_place(name: str) -> None:
    assert violations()[name] == []


@pytest.mark.parametrize("name", RULES)
def test_the_rule_finds_what_it_forbids(name: str) -> None:
    rule, allowed, example = RULES[name]
    assert any(rule(node) for node in ast.walk(ast.parse(example)))
    assert all((ROOT / "cxlfs" / place).exists() for place in allowed)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, modules: set[str]) -> set[str]:
    """Every module that a source names in an import: for types alone and inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = members & modules
            found |= inside
            if members - inside:
                found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that lead back to themselves, as short ways as there are."""
    found = []
    for start in sorted(graph):
        ways = [[start]]
        seen: set[str] = set()
        while ways:
            way = ways.pop(0)
            for following in sorted(graph[way[-1]] - {way[-1]}):
                if following == start:
                    found.append([*way, start])
                    ways.clear()
                    break
                if following not in seen:
                    seen.add(following)
                    ways.append([*way, following])
    return found


def test_no_two_files_know_each_other() -> None:
    sources = {module_of(path): path.read_text() for path in python_files("cxlfs")}
    graph = {name: imports_of(text, set(sources)) for name, text in sources.items()}
    assert circles(graph) == []


def test_a_circle_would_be_found() -> None:
    sources = {
        "x.a": "def late():\n    from x import b",
        "x.b": "if TYPE_CHECKING:\n    from x.c import Name",
        "x.c": "import x.a",
    }
    graph = {name: imports_of(text, set(sources)) for name, text in sources.items()}
    assert circles(graph)[0] == ["x.a", "x.b", "x.c", "x.a"]
    assert circles({**graph, "x.c": set()}) == []


def test_imports_point_down() -> None:
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

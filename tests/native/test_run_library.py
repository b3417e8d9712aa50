"""What ``cxlfs run`` preloads, looked at from outside: the stack that its functions use, the
functions that it stands before, and those that it calls.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.native.compiling import CSRC, needs_compiler
from tests.support.repository import ROOT

pytestmark = needs_compiler
STACK_BYTES_MAX = 1024
"""Of one function: a handler on a small stack may write."""
INTERCEPTED = {
    *("write", "writev", "pwrite", "pwrite64", "pwritev", "pwritev64", "pwritev2", "pwritev64v2"),
    "close",
}
FORBIDDEN = (
    *("malloc", "calloc", "realloc", "free", "pthread_mutex", "pthread_cond", "pthread_rwlock"),
    *("fopen", "fclose", "printf", "getline", "setlocale", "dlopen", "pthread_create", "atfork"),
)
"""What no signal handler may call; ``snprintf`` is called in a child alone."""


def built_as() -> tuple[list[str], list[str]]:
    """Sources and options of the library."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    modules = settings["tool"]["setuptools"]["ext-modules"]
    (module,) = [each for each in modules if each["name"] == "cxlfs._run"]
    options = [f"-D{name}={value}" for name, value in module["define-macros"]]
    return module["sources"], [*options, *module["extra-compile-args"], f"-I{CSRC}", "-fPIC"]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    sources, options = built_as()
    for source in sources:
        target = directory / f"{Path(source).parent.name}-{Path(source).stem}.o"
        command = ["cc", *options, "-fstack-usage", "-c", ROOT / source, "-o", target]
        subprocess.run(command, check=True)
    return directory


def test_functions_use_little_stack(objects: Path) -> None:
    used = {}
    for path in objects.glob("*.su"):
        for line in path.read_text().splitlines():
            where, size, kind = line.split("\t")
            assert kind in {"static", "dynamic,bounded"}, line
            used[f"{path.stem}: {where.rsplit(':', 1)[1]}"] = int(size)
    assert len(used) > 50
    assert {name: size for name, size in used.items() if size > STACK_BYTES_MAX} == {}


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm (Debian: binutils)")
def test_it_stands_before_few_functions_and_calls_none_that_waits(objects: Path) -> None:
    library = objects / "library.so"
    made = sorted(objects.glob("*.o"))
    subprocess.run(["cc", "-shared", "-pthread", "-o", library, *made], check=True)
    listed = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True)
    symbols = [line.split()[-2:] for line in listed.stdout.splitlines()]
    assert {name for kind, name in symbols if kind == "T"} == INTERCEPTED
    called = {name.split("@")[0] for kind, name in symbols if kind == "U"}
    assert {name for name in called if any(word in name for word in FORBIDDEN)} <= {"snprintf"}

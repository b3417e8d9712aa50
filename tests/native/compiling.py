"""Builds C programs of this directory together with files of csrc/, which they look into."""

from __future__ import annotations

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
STRICT = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]

OBJECTS_VARIABLE = "CXLFS_TEST_OBJECTS"
"""Names a directory that has objects of csrc/ already: those of the extension under test, compiled
with the same sanitizers.
"""

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def all_sources() -> list[str]:
    """Files of csrc/ but the glue to Python, and what stands before libc in programs."""
    found = (path for path in CSRC.glob("*/*.c") if path.parent.name != "run")
    return sorted(str(path.relative_to(CSRC)) for path in found)


@functools.cache
def _objects(_compiler: str) -> Path:
    """Where this process keeps what it has compiled of csrc/ until it ends."""
    kept = tempfile.TemporaryDirectory(prefix="cxlfs-objects-")
    atexit.register(kept.cleanup)
    return Path(kept.name)


def compile_program(
    programs: Iterable[str],
    others: Iterable[str],
    target: Path,
    compiler: str = "cc",
    linking: Sequence[str] = (),
) -> None:
    """``others``: of csrc/, each compiled once by a process. With the options of CFLAGS, as
    ``scripts/sanitize`` wants it. As many files at a time as there are processors.
    """
    files = [*(HERE / name for name in programs), *(CSRC / name for name in others)]
    options = ["-std=gnu11", "-O2", *STRICT, "-D_GNU_SOURCE", "-pthread", f"-I{CSRC}"]
    options += shlex.split(os.environ.get("CFLAGS", ""))
    # The runtime of a sanitizer, preloaded for the tests, makes the compiler five times as slow.
    settings = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    own = target.with_name(f"{target.name}.objects")
    own.mkdir()
    ready = Path(os.environ.get(OBJECTS_VARIABLE, own)) if compiler == "cc" else own

    def compiled(source: Path) -> Path:
        of_csrc = source.is_relative_to(CSRC)
        name = f"{source.parent.name}-{source.stem}.o"  # two parts have an ahead.c
        if of_csrc and (made := ready / name).exists():
            return made
        made = (_objects(compiler) if of_csrc else own) / name
        if of_csrc and made.exists():
            return made
        subprocess.run([compiler, *options, "-c", source, "-o", made], check=True, env=settings)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(compiled, files))
    subprocess.run([compiler, *options, *linking, "-o", target, *made], check=True, env=settings)

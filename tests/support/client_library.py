"""The client library as programs without Python have it: installed by ``scripts/build-client``, and
compiled against with what pkg-config says.
"""

from __future__ import annotations

import atexit
import functools
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SCENES = ("threads", "changing", "calls", "fork", "stream", "replace", "map")
"""Of ``tests/client/program.c``: those that need a path alone."""
LANGUAGES = {"c": ["cc", "-std=c11"], "c++": ["c++", "-std=c++17", "-x", "c++"]}
LACKING = [name for name in ("cc", "c++", "pkg-config") if shutil.which(name) is None]
needs_compilers = pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")
_DOCUMENT = (ROOT / "docs/client.md").read_text()
EXAMPLE_SAYS = re.findall(r"^    \$ \./save .*\n    (.*)\n    (.*)\n", _DOCUMENT, re.MULTILINE)[0]
"""On a mounted store, according to the document."""
_WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def _environment() -> dict[str, str]:
    """The runtime of a sanitizer, preloaded for the tests, makes the compiler slow."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def build(prefix: Path, **variables: str) -> None:
    """Install the library, with such variables of ``scripts/build-client``."""
    command = [ROOT / "scripts/build-client", prefix]
    subprocess.run(command, check=True, env=_environment() | variables)


@functools.cache
def installed() -> Path:
    """The prefix, the same for all tests of a process."""
    kept = tempfile.TemporaryDirectory(prefix="cxlfs-prefix-")
    atexit.register(kept.cleanup)
    Path(kept.name).chmod(0o755)  # other users run what is there
    build(Path(kept.name))
    return Path(kept.name)


def flags(*options: str) -> list[str]:
    """What ``pkg-config OPTION... cxlfs`` says."""
    environment = os.environ | {"PKG_CONFIG_PATH": str(installed() / "lib/pkgconfig")}
    command = ["pkg-config", *options, "cxlfs"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return shlex.split(done.stdout)


@functools.cache
def program(source: Path, language: str = "c", *, static: bool = False) -> Path:
    """``source`` compiled and linked with the library."""
    target = installed() / f"{source.stem}-{language}{'-static' * static}"
    command = [*LANGUAGES[language], *_WARNINGS, *flags("--cflags"), str(source), "-x", "none"]
    libraries = flags("--libs", *["--static"] * static)
    if static:
        libraries = [each.replace("-lcxlfs", "-l:libcxlfs.a") for each in libraries]
    own = shlex.split(os.environ.get("CFLAGS", ""))
    run_path = f"-Wl,-rpath,{installed() / 'lib'}"
    command += [*libraries, "-pthread", run_path, *own, "-o", str(target)]
    subprocess.run(command, check=True, env=_environment())
    return target


def example() -> Path:
    """The program of the document, as it stands there."""
    (text,) = re.findall(r"^```c\n(.*?)^```$", _DOCUMENT, re.DOTALL | re.MULTILINE)
    source = installed() / "save.c"
    if not source.exists():
        source.write_text(text)
    return program(source)


def failures(binary: Path, *arguments: object, user: int | None = None) -> str:
    """What a run of it, as that user, complains of."""
    command = [str(binary), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, user=user)
    said = done.stdout + done.stderr
    return said if done.returncode == 0 else f"exit status {done.returncode}\n{said}"

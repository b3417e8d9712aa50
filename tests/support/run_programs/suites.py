"""Programs of others, and what their tests say in one directory: for ``scripts/run-programs``.

A suite has parts (a module, a file of tests, a program). One part, played in a directory, is a
table: the name of a test, and its outcome. What is needed beyond Debian's packages is installed
once, below ``~/.cache/cxlfs-frameworks/programs``, by name from PyPI and from Debian's sources.

Does not: know places; compare (``playing.py``).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

HERE = Path(__file__).resolve().parent
INSTALLED = Path.home() / ".cache" / "cxlfs-frameworks" / "programs"
FROM_PYPI = ("lmdb", "pyarrow", "h5py", "zarr", "numpy", "pytest")
DEBIAN_PYTHON = "/usr/bin/python3"
PATIENCE_SECONDS = 300
BUILD_SECONDS = 900

CPYTHON_TESTS = (
    "mmap os posix io file fileio bufio largefile fcntl subprocess tempfile shutil zipfile tarfile "
    "gzip bz2 lzma dbm dbm_ndbm shelve mailbox pathlib fileinput eintr pickle wave filecmp "
    "genericpath tokenize httpservers multiprocessing_fork"
)
SQLITE_TESTS = (
    "atomic bigfile exclusive exclusive2 incrblob incrvacuum2 io journal1 journal2 journal3 lock "
    "lock2 lock3 lock4 lock5 lock6 mmap1 mmap2 mmap3 multiplex nolock pager2 pager3 pagerfault3 "
    "savepoint2 shared shared2 shared4 spellfix2 superlock symlink sync tempdb trans truncate "
    "unixexcl vacuum vacuum2 wal wal2"
)
"""About files, and a second each where nothing is in between."""


class NotInstalledError(Exception):
    """The message says what is missing."""


@dataclasses.dataclass(frozen=True)
class Suite:
    version: str
    parts: Sequence[str]
    play: Callable[[str, Path, Mapping[str, str]], dict[str, str]]
    """A part, in an empty directory, with an environment."""


def call(words: Sequence[object], environment: Mapping[str, str], at: Path) -> tuple[str, str]:
    """What a program printed, and how it ended: "" is well."""
    try:
        done = subprocess.run(
            [str(word) for word in words],
            env={**environment, "TMPDIR": str(at)},
            cwd=at,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", "does not end"
    return done.stdout, "" if done.returncode == 0 else f"ended with {done.returncode}"


def need(program: str, package: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise NotInstalledError(f"{program} (Debian: {package})")
    return path


def install(words: Sequence[object], at: Path, what: str) -> None:
    done = subprocess.run(
        [str(word) for word in words],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "it failed").splitlines()[-1]
        raise NotInstalledError(f"{what}: {last}")


def environment_of_python() -> Path:
    """The Python of an environment with what PyPI has."""
    python = INSTALLED / "bin" / "python"
    stamp = INSTALLED / "cxlfs-requirements.txt"
    if not stamp.exists() or stamp.read_text().split() != [*FROM_PYPI]:
        INSTALLED.mkdir(parents=True, exist_ok=True)
        install([sys.executable, "-m", "venv", INSTALLED], INSTALLED, "venv")
        install([python, "-m", "pip", "install", "-qq", *FROM_PYPI], INSTALLED, "pip")
        stamp.write_text("\n".join(FROM_PYPI) + "\n")
    return python


def unpacked(pattern: str, into: Path) -> Path:
    """The directory of the only archive in it that is called so."""
    archive = next(into.glob(pattern))
    install(["tar", "-xf", archive], into, archive.name)
    with tarfile.open(archive) as file:
        return into / file.getnames()[0].split("/")[0]


# --- reports --------------------------------------------------------------------------------------


def from_junit(path: Path, ending: str) -> dict[str, str]:
    outcomes = {"": ending} if ending else {}
    if not path.exists():
        return {"": ending or "no report"}
    for case in ET.parse(path).iter("testcase"):  # noqa: S314  written by the test runner
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname') or ''} {case.get('name')}".strip()
        outcomes[name] = min(kinds, default="passed")
    return outcomes


def from_lines(text: str, ending: str) -> dict[str, str]:
    """A line for each test: its name, and what was found."""
    outcomes = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    return {**outcomes, **({"": ending} if ending else {})}


def from_sqlite(text: str, ending: str) -> dict[str, str]:
    outcomes = {"": ending} if ending else {}
    outcomes |= dict.fromkeys(re.findall(r"^(\S+)\.\.\. Ok$", text, re.MULTILINE), "passed")
    failed = re.findall(r"^! (\S+) expected:", text, re.MULTILINE)
    return outcomes | dict.fromkeys(failed, "failed")


# --- suites ---------------------------------------------------------------------------------------


def cpython() -> Suite:
    """CPython's own tests, with Debian's Python."""
    parts = [f"test_{name}" for name in CPYTHON_TESTS.split()]
    look = "import sys, test.test_mmap; print(*sys.version_info[:3], sep='.')"
    version, ending = call([need(DEBIAN_PYTHON, "python3"), "-c", look], os.environ, Path("/"))
    if ending:
        raise NotInstalledError("CPython's tests (Debian: libpython3.11-testsuite)")

    def play(part: str, at: Path, environment: Mapping[str, str]) -> dict[str, str]:
        (at / "work").mkdir()
        report = at / "report"
        report.touch()
        words = [DEBIAN_PYTHON, HERE / "cpython_tests.py", part, report]
        _, ending = call(words, environment, at / "work")
        return from_lines(report.read_text(), ending)

    return Suite(version.strip(), parts, play)


def sqlite() -> Suite:
    """Those of SQLite's tests that are about files."""
    need("tclsh", "tcl-dev")
    base = INSTALLED / "sqlite"
    base.mkdir(parents=True, exist_ok=True)
    if not any(base.glob("*/testfixture")):
        get_debian_source("sqlite3", base)
        source = unpacked("sqlite3_*.orig.tar.xz", base)
        tcl = next(Path("/usr/lib").glob("*/tcl8.6/tclConfig.sh"), Path("/usr/lib/tcl8.6/x"))
        install(["./configure", f"--with-tcl={tcl.parent}", "--enable-all"], source, "configure")
        install(["make", "-j2", "testfixture"], source, "SQLite's test program")
    program = next(base.glob("*/testfixture"))
    tests = program.parent / "test"
    parts = [f"{name}.test" for name in SQLITE_TESTS.split()]
    parts = [name for name in parts if (tests / name).exists()]

    def play(part: str, at: Path, environment: Mapping[str, str]) -> dict[str, str]:
        return from_sqlite(*call([program, tests / part], environment, at))

    return Suite(program.parent.name.removeprefix("sqlite3-"), parts, play)


def get_debian_source(package: str, into: Path) -> None:
    """Download a source package, whatever sources this machine has for its own packages."""
    sources = into / "debian.sources"
    sources.write_text(
        "Types: deb-src\nURIs: http://deb.debian.org/debian\nSuites: bookworm\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    )
    (into / "lists").mkdir(exist_ok=True)
    options = [f"Dir::Etc::sourcelist={sources}", "Dir::Etc::sourceparts=/dev/null"]
    options += [f"Dir::State::lists={into / 'lists'}"]
    apt = [need("apt-get", "apt"), *(word for each in options for word in ("-o", each))]
    install([*apt, "update"], into, f"the source of {package}")
    install([*apt, "source", "--download-only", package], into, f"the source of {package}")


def lmdb() -> Suite:
    """The tests of LMDB's Python package, and of LMDB with it."""
    python = environment_of_python()
    base = INSTALLED / "lmdb"
    base.mkdir(exist_ok=True)
    if not any(base.glob("lmdb-*/tests")):
        options = ["-qq", "--no-deps", "--no-binary", ":all:", "-d", base]
        install([python, "-m", "pip", "download", *options, "lmdb"], base, "the source of lmdb")
        unpacked("lmdb-*.tar.gz", base)
    tests = next(base.glob("lmdb-*/tests"))

    def play(part: str, at: Path, environment: Mapping[str, str]) -> dict[str, str]:
        options = ["-q", "-p", "no:cacheprovider", "--rootdir", tests, "--junit-xml", at / "report"]
        _, ending = call([python, "-m", "pytest", *options, tests / part], environment, at)
        return from_junit(at / "report", "" if ending == "ended with 5" else ending)

    parts = sorted(each.name for each in tests.glob("*_test.py"))
    return Suite(tests.parent.name.removeprefix("lmdb-"), parts, play)


def frames() -> Suite:
    """PyArrow, h5py, zarr and NumPy."""
    python = environment_of_python()
    look = "import pyarrow, h5py, zarr, numpy as n; "
    look += "print('PyArrow', pyarrow.__version__, 'h5py', h5py.__version__, 'zarr', "
    look += "zarr.__version__, 'NumPy', n.__version__)"
    version, _ = call([python, "-c", look], os.environ, Path("/"))
    return Suite(version.strip(), ["frames"], player([python, HERE / "frames.py"]))


def player(
    words: Sequence[object],
) -> Callable[[str, Path, Mapping[str, str]], dict[str, str]]:
    """Of a program that is given a directory, and prints lines."""

    def play(_part: str, at: Path, environment: Mapping[str, str]) -> dict[str, str]:
        return from_lines(*call([*words, at], environment, at))

    return play


def compiled(source: str, build: Sequence[str], start: Sequence[str], package: str) -> Suite:
    """A program of ours in another language: how it is compiled and started; {}: where it is."""
    compiler = need(build[0], package)
    place = INSTALLED / "built"
    place.mkdir(parents=True, exist_ok=True)
    version = "version" if build[0] == "go" else "--version"
    said, _ = call([compiler, version], os.environ, place)
    cache = {"GOCACHE": str(place / "go-cache")}
    words = [compiler, *build[1:], HERE / source]
    _, ending = call(words, {**os.environ, **cache}, place)
    if ending:
        raise NotInstalledError(f"{build[0]} {ending}")
    return Suite(
        said.strip().splitlines()[0], [source], player([word.format(place) for word in start])
    )


SUITES: Mapping[str, Callable[[], Suite]] = {
    "cpython": cpython,
    "sqlite": sqlite,
    "lmdb": lmdb,
    "frames": frames,
    "rust": lambda: compiled("files.rs", ["rustc", "-O", "-ofiles-rs"], ["{}/files-rs"], "rustc"),
    "go": lambda: compiled(
        "files.go", ["go", "build", "-o", "files-go"], ["{}/files-go"], "golang-go"
    ),
    "java": lambda: compiled(
        "Files.java", ["javac", "-d", "."], ["java", "-cp", "{}", "Files"], "default-jdk-headless"
    ),
}

"""The client library as it is installed: what it shows, and what a program does with it on any
directory.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.client_library import (
    EXAMPLE_SAYS,
    SCENES,
    build,
    example,
    failures,
    flags,
    installed,
    needs_compilers,
    program,
)

pytestmark = needs_compilers
PROGRAM = Path(__file__).with_name("program.c")


def declared() -> set[str]:
    """Functions of the header."""
    header = (installed() / "include/cxlfs_client.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    return set(re.findall(r"^\w.*?\b(cxlfs_\w+)\(", text, re.MULTILINE))


def symbols(*command: str) -> set[str]:
    done = subprocess.run(["nm", *command], check=True, capture_output=True, text=True)
    return {line.split()[-1] for line in done.stdout.splitlines() if len(line.split()) > 2}


def test_only_what_the_header_declares_is_seen() -> None:
    libraries = installed() / "lib"
    seen = symbols("-D", "--defined-only", "--without-symbol-versions", f"{libraries}/libcxlfs.so")
    versions = {name for name in seen if re.fullmatch(r"CXLFS_\d+", name)}
    assert len(versions) == 1
    assert seen - versions == declared()
    assert len(declared()) > 20
    assert symbols("-g", "--defined-only", str(libraries / "libcxlfs.a")) == declared()


def test_optimization_at_linking_shows_no_more(tmp_path: Path) -> None:
    """Distributions compile everything so."""
    build(tmp_path, CFLAGS="-flto -O1")
    assert symbols("-g", "--defined-only", str(tmp_path / "lib/libcxlfs.a")) == declared()


@pytest.mark.campaign
@pytest.mark.parametrize("compiler", ["clang", "musl-gcc"])
def test_other_compilers_and_c_libraries(tmp_path: Path, compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"not installed: {compiler} (Debian: clang, musl-tools)")
    prefix, binary = tmp_path / "prefix", tmp_path / "program"
    build(prefix, CC=compiler)
    options = ["-static", "-std=c11", f"-I{prefix}/include", f"-L{prefix}/lib", "-pthread"]
    command = [compiler, *options, "-o", binary, PROGRAM, "-l:libcxlfs.a"]
    subprocess.run(command, check=True)
    for scene in SCENES:
        assert failures(binary, scene, tmp_path / scene, "kernel") == "", scene


def test_what_is_installed_is_named_by_its_version() -> None:
    libraries = installed() / "lib"
    version = subprocess.run(
        ["readelf", "-d", libraries / "libcxlfs.so"], check=True, capture_output=True, text=True
    ).stdout
    (name,) = re.findall(r"soname: \[(.*?)\]", version)
    assert (libraries / name).resolve() == (libraries / "libcxlfs.so").resolve()
    (number,) = re.fullmatch(r"libcxlfs\.so\.(\d+)", name).groups()  # type: ignore[union-attr]
    header = (installed() / "include/cxlfs_client.h").read_text()
    minor = re.findall(r"VERSION_MINOR (\d+)", header)[0]
    assert (libraries / "libcxlfs.so").resolve().name == f"libcxlfs.so.{number}.{minor}"
    assert flags("--modversion") == [f"{number}.{minor}"]
    needed = re.findall(r"\(NEEDED\).*\[(.*?)\]", version)
    system = ("libc.", "ld-", "libasan.", "libubsan.")  # the last two with scripts/sanitize
    assert [each for each in needed if not each.startswith(system)] == []


@pytest.mark.parametrize("language", ["c", "c++"])
@pytest.mark.parametrize("scene", SCENES)
def test_any_directory_does(tmp_path: Path, scene: str, language: str) -> None:
    assert failures(program(PROGRAM, language), scene, tmp_path / "file", "kernel") == ""


def test_the_static_library_does(tmp_path: Path) -> None:
    binary = program(PROGRAM, static=True)
    assert failures(binary, "calls", tmp_path / "file", "kernel") == ""
    assert b"libcxlfs.so" not in binary.read_bytes()


def test_the_example_of_the_document_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    said = subprocess.run([example()], capture_output=True, text=True, check=False)
    assert said.returncode == 2
    said = subprocess.run(
        [example(), tmp_path / "file"], capture_output=True, text=True, check=True
    )
    reason = "through the kernel: not on a mounted store that offers it"
    assert said.stdout.splitlines() == [f"stored {reason}", EXAMPLE_SAYS[-1]]
    assert (tmp_path / "file").stat().st_size == 64 << 20
    said = subprocess.run(
        [example(), tmp_path / "no" / "file"], capture_output=True, text=True, check=False
    )
    assert (said.returncode, said.stdout) == (1, "")
    assert "is not saved: No such file" in said.stderr


@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_stands_alone(tmp_path: Path, language: str) -> None:
    source = tmp_path / "alone.c"
    body = "int main(void) { return cxlfs_client_version() != CXLFS_CLIENT_VERSION; }\n"
    source.write_text(f"#include <cxlfs_client.h>\n{body}")
    assert failures(program(source, language)) == ""

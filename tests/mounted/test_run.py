"""Unchanged programs that store into a mount by themselves: they do the same, sooner."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import PROGRAM
from tests.support.mount import MIB, Workplace, workplace
from tests.support.repository import ROOT

SOURCES = ("run_scenes.c", "run_rules.c", "run_processes.c")
SCENES = (
    *("plain", "pieces", "places", "sizes", "duplicates", "unseen", "appended", "openers"),
    *("memory", "streams", "copies", "sent", "forked", "crowd", "threads", "spawned", "executed"),
    *("left_open", "signals", "mapped", "unmapped", "changed", "known", "replaced", "counted"),
    *("children", "shared", "beside", "handled", "faults", "little", "forgotten", "viewed"),
)
NOT_DIRECT = {"pieces", "streams", "sent"}
"""Too many pieces at once; libc writes past the library; the kernel sends."""
EVERY_SIZE = {"CXLFS_RUN_FROM": "4096"}
"""So that scenes of some megabytes on small pages take the direct way."""


OTHER_PROGRAM = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
    enum { BYTES = 3000000 };
    char *bytes = malloc(BYTES);
    memset(bytes, 'x', BYTES);
    int fd = open("file", O_WRONLY | O_CREAT, 0644);
    printf("written %d\\n", (int)write(fd, bytes, BYTES));
    free(bytes);
    return close(fd);
}
"""


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("scenes") / "scenes"
    support = ROOT / "tests" / "support"
    flags = ["-D_GNU_SOURCE", "-O1", "-w", "-pthread"]  # mistakes are what some scenes are about
    subprocess.run(
        [os.environ.get("CC", "gcc"), *flags, "-o", program, *(support / name for name in SOURCES)],
        check=True,
    )
    return program


def play(
    directory: Path, *command: str | Path, run: bool, environment: dict[str, str] | None = None
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """What a program said, the files that it left with their checksums, and the counts of all its
    processes.
    """
    directory.mkdir()
    report = Path(tempfile.gettempdir(), f"cxlfs-run-report-{os.getpid()}")
    before = [*PROGRAM, "run", "--"] if run else []
    done = subprocess.run(
        [*before, *command],
        cwd=directory,
        env={**os.environ, "CXLFS_RUN_REPORT": str(report), **EVERY_SIZE, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        timeout=60,
    )
    said = f"{done.stdout.decode()}\nended with {done.returncode}"
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
    }
    counts = json.loads(report.read_text()) if report.exists() else {}
    report.unlink(missing_ok=True)
    return said, files, counts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("scene", SCENES)
def test_a_program_does_the_same(
    place: Workplace, scenes: Path, tmp_path: Path, scene: str
) -> None:
    expected = play(tmp_path / scene, scenes, scene, run=False)
    # First, while all of the small store is free: leases are refused where room is scarce.
    direct = play(place.mountpoint / "direct", scenes, scene, run=True)
    shutil.rmtree(place.mountpoint / "direct")
    through_kernel = play(place.mountpoint / "kernel", scenes, scene, run=False)
    assert through_kernel[:2] == expected[:2], "what a mount does"
    assert direct[:2] == expected[:2]
    assert "ended with 0" in direct[0]
    assert scene in NOT_DIRECT or direct[2]["direct_bytes"] > MIB // 2, direct[2]
    assert not through_kernel[2]


def test_nothing_is_allocated_or_locked_within_a_call(
    place: Workplace, scenes: Path, tmp_path: Path
) -> None:
    """So a signal handler may write, whatever it has interrupted."""
    library = tmp_path / "forbidding.so"
    source = ROOT / "tests/support/run_forbidding.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    expected = play(tmp_path / "forbidding", scenes, "forbidding", run=False)
    forbidding = {"LD_PRELOAD": str(library)}
    found = play(
        place.mountpoint / "forbidding", scenes, "forbidding", run=True, environment=forbidding
    )
    assert found[:2] == expected[:2]
    assert found[2]["direct_bytes"] > 10 * MIB


def test_it_can_be_switched_off(place: Workplace, scenes: Path, tmp_path: Path) -> None:
    expected = play(tmp_path / "plain", scenes, "plain", run=False)
    directory, off = place.mountpoint / "off", {"CXLFS_RUN": "off"}
    found = play(directory, scenes, "plain", run=True, environment=off)
    assert found[:2] == expected[:2]
    assert found[2]["direct_bytes"] == 0


def test_small_pages_files_and_writes_are_the_kernels(place: Workplace) -> None:
    """Where the direct way is slower it is not taken; what is said says why."""
    code = """
with open("file", "wb", buffering=0) as file:
    for _ in range(20): file.write(bytes(1 << 20))
with open("short", "wb", buffering=0) as file: file.write(bytes(1 << 20))
with open("slow", "wb", buffering=0) as file:
    for _ in range(200): file.write(bytes(1 << 16))
"""
    usual = {"CXLFS_RUN_FROM": ""}
    command = (sys.executable, "-c", code)
    found = play(place.mountpoint / "usual", *command, run=True, environment=usual)
    assert found[2]["direct_bytes"] == 0 < found[2]["kernel_bytes"] <= 20 * MIB
    assert found[2]["reasons"] == ["the medium is mapped in pages of 4 KiB"]


@pytest.mark.parametrize(
    ("option", "words"),
    [("transport=native", ": writes directly"), ("transport=pyfuse3", ": writes through the kern")],
)
def test_each_way_is_logged_once(
    unmounted: Workplace, scenes: Path, tmp_path: Path, option: str, words: str
) -> None:
    """With the transport of libfuse there is no direct access."""
    log = tmp_path / "log"
    setting = {"CXLFS_RUN_LOG": str(log)}
    unmounted.mount(option)
    expected = play(tmp_path / "unseen", scenes, "unseen", run=False)
    directory = unmounted.mountpoint / "logged"
    said = play(directory, scenes, "unseen", run=True, environment=setting)
    assert said[:2] == expected[:2]
    lines = log.read_text().splitlines()
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert (said[2]["direct_bytes"] > 0) == ("native" in option)


@pytest.mark.parametrize(
    "compiler",
    [("musl-gcc", "-static"), ("musl-gcc",), ("gcc", "-fsanitize=address")],
    ids=["static", "musl", "asan"],
)
def test_programs_of_other_kinds_start(
    place: Workplace, tmp_path: Path, compiler: tuple[str, ...]
) -> None:
    """What the library does not reach, or what is built otherwise, does the same."""
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not installed (Debian: musl-tools)")
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(OTHER_PROGRAM)
    subprocess.run([*compiler, "-o", program, source], check=True)
    said, files, counts = play(place.mountpoint / "other", program, run=True)
    assert said.endswith("written 3000000\n\nended with 0"), said
    assert ("is statically linked" in said) == ("-static" in compiler)
    assert files == {"file": hashlib.sha256(b"x" * 3_000_000).hexdigest()}
    assert (counts["direct_bytes"] == 3_000_000) == (compiler == ("musl-gcc",))
    assert not counts["reasons"] or "-fsanitize=address" in compiler, "it handles SIGSEGV"


KERNELS = """
import os, resource, signal
data = bytes(range(256)) * 8192
def attempt(name, flags, write, mode=0o644):
    fd = os.open(name, flags | os.O_CREAT, mode)
    os.fchmod(fd, mode)
    try: print(name, write(fd), os.fstat(fd).st_size, oct(os.fstat(fd).st_mode))
    except OSError as error: print(name, error.errno, os.fstat(fd).st_size)
    os.close(fd)
def limited(fd):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
    try: return os.write(fd, data), os.write(fd, data)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
def whole(fd): return os.write(fd, data)
attempt("appended", os.O_WRONLY | os.O_APPEND, whole)
attempt("durable", os.O_WRONLY | os.O_DSYNC, whole)
attempt("all-durable", os.O_WRONLY | os.O_SYNC, whole)
attempt("read-only", os.O_RDONLY, whole)
attempt("set-id", os.O_WRONLY, whole, 0o6755)
attempt("durable-once", os.O_WRONLY, lambda fd: os.pwritev(fd, [data], 0, os.RWF_DSYNC))
attempt("pieces", os.O_WRONLY, lambda fd: os.writev(fd, [data[:200_000]] * 17))
"""
USERS = """
def changed(fd):
    one = os.write(fd, data)
    os.fchmod(fd, 0o6755)
    return one, os.write(fd, data)
def other_user(fd):
    one = os.write(fd, data)
    os.seteuid(65534)
    try: return one, os.write(fd, data)
    finally: os.seteuid(0)
attempt("users", os.O_WRONLY, other_user)
attempt("changed", os.O_WRONLY, changed)
attempt("limited", os.O_WRONLY, limited)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_means_more_than_storing_is_the_kernels(place: Workplace, tmp_path: Path) -> None:
    """Each of these writes, and no byte of it is stored directly; without a reason beside them
    the same write is.
    """
    place.mountpoint.chmod(0o777)
    command = (sys.executable, "-c", KERNELS)
    expected = play(tmp_path / "kernels", *command, run=False)
    found = play(place.mountpoint / "kernels", *command, run=True)
    assert found[:2] == expected[:2]
    assert found[2].get("direct_bytes", 0) == 0, found
    command = (sys.executable, "-c", KERNELS.partition('attempt("appended')[0] + USERS)
    expected = play(tmp_path / "users", *command, run=False)
    found = play(place.mountpoint / "users", *command, run=True)
    assert found[:2] == expected[:2]
    assert found[2]["direct_bytes"] == 3 * (2 * MIB), "the first of each"


# --- Python, and what is written with it ----------------------------------------------------------

NUMPY = """
import numpy as np
data = np.arange(1_500_000, dtype=np.float64)
np.save("a.npy", data)
with open("b.npy", "wb") as file:
    np.save(file, data); np.save(file, data[:7]); print(file.tell())
data.tofile("c.bin")
np.savez("d.npz", one=data, two=data[:1000])
back = np.load("a.npy", mmap_mode="r"); print(back.sum())
print(np.load("d.npz")["one"].sum(), np.fromfile("c.bin").sum())
changed = np.load("a.npy", mmap_mode="c"); changed[5] = 77; print(changed.sum(), back[5])
"""
COPYING = """
import os, shutil, zipfile
data = bytes(range(256)) * 20_000
with open("a", "wb") as file: print(file.write(data))
shutil.copyfile("a", "b"); shutil.copy2("b", "c"); os.rename("c", "d")
with zipfile.ZipFile("e.zip", "w") as archive:
    archive.writestr(zipfile.ZipInfo("one"), data); archive.write("a", "two")
os.unlink("e.zip") if zipfile.ZipFile("e.zip").testzip() else None
with open("f", "w+b", buffering=0) as file:
    file.write(data); file.seek(100); file.write(data); file.truncate(6_000_000)
    file.seek(0); print(file.read(5_000_000) == (data[:100] + data)[:5_000_000], file.tell())
"""
SQLITE = """
import sqlite3
base = sqlite3.connect("base.sqlite")
base.execute("create table rows (number integer, data blob)")
for number in range(40):
    with base: base.execute("insert into rows values (?, ?)", (number, bytes([number]) * 60_000))
print(base.execute("select sum(number), sum(length(data)) from rows").fetchall())
print(base.execute("pragma integrity_check").fetchall())
"""
HDF5 = """
import h5py, numpy as np
data = np.arange(1_000_000, dtype=np.float32)
with h5py.File("a.h5", "w") as file:
    for name in "abc": file.create_dataset(name, data=data)
with h5py.File("a.h5", "a") as file: file["b"][1000:900_000] = 3; file["more"] = data
with h5py.File("a.h5") as file: print({name: float(file[name][:].sum()) for name in file})
"""
SAFETENSORS = """
import numpy as np
from safetensors.numpy import load_file, save_file
tensors = {f"t{i}": np.full((500, 600), i, dtype=np.float32) for i in range(8)}
for _ in range(2): save_file(tensors, "a.safetensors")
print({name: float(value.sum()) for name, value in sorted(load_file("a.safetensors").items())})
"""
WORKERS = """
import multiprocessing, os
def save(number):
    with open(f"part{number}", "wb") as file: return file.write(bytes([number]) * 3_000_000)
with open("own", "wb") as own:
    own.write(b"x" * 2_000_000)
    with multiprocessing.get_context("fork").Pool(3) as pool: print(pool.map(save, range(6)))
    own.write(b"y" * 2_000_000); own.flush(); print(os.fstat(own.fileno()).st_size)
"""
TORCH = """
import torch
data = {f"t{i}": torch.full((500, 900), float(i)) for i in range(6)}
torch.save(data, "a.pt")
with open("b.pt", "wb") as file: torch.save(data, file)
for name, mapped in (("a.pt", False), ("b.pt", False), ("a.pt", True)):
    back = torch.load(name, mmap=mapped); back["t3"][0] += 1
    print(sum(float(value.sum()) for value in back.values()))
"""
PROGRAMS = {
    "numpy": NUMPY,
    "copying": COPYING,
    "sqlite": SQLITE,
    "h5py": HDF5,
    "safetensors": SAFETENSORS,
    "workers": WORKERS,
    "torch": TORCH,
}


def same_files(name: str, files: dict[str, str]) -> Any:
    """Archives and data bases hold times."""
    return sorted(files) if name in ("h5py", "copying", "numpy", "sqlite") else files


@pytest.mark.large_store
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_python_program_does_the_same(place: Workplace, tmp_path: Path, name: str) -> None:
    if name in ("h5py", "safetensors", "torch", "numpy"):
        pytest.importorskip(name, reason=f"{name} is not installed (pip install {name})")
    command = (sys.executable, "-W", "ignore", "-c", PROGRAMS[name])
    expected = play(tmp_path / name, *command, run=False)
    direct = play(place.mountpoint / name, *command, run=True)
    assert direct[0] == expected[0]
    assert "ended with 0" in direct[0]
    assert same_files(name, direct[1]) == same_files(name, expected[1])
    assert name == "sqlite" or direct[2]["direct_bytes"] > MIB, direct[2]


# --- endings ------------------------------------------------------------------------------------


def test_a_killed_writer_leaves_the_version_before(place: Workplace) -> None:
    place.announced.append("the writer was killed")
    path = place.mountpoint / "file"
    path.write_bytes(b"before" * 100_000)
    code = f"""
import os, signal
with open({str(path)!r}, "wb", buffering=0) as file:
    for _ in range(20): file.write(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [*PROGRAM, "run", sys.executable, "-c", code]
    done = subprocess.run(command, check=False, env={**os.environ, **EVERY_SIZE})
    assert done.returncode == -9
    assert path.read_bytes() == b"before" * 100_000


def test_what_was_moved_is_said(place: Workplace) -> None:
    code = f"""
import sys
with open({str(place.mountpoint / "file")!r}, "wb", buffering=0) as file:
    for _ in range(8): file.write(bytes(1 << 20))
sys.exit(5)
"""
    command = [*PROGRAM, "run", "--report", "--", sys.executable, "-c", code]
    environment = {**os.environ, **EVERY_SIZE}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 5
    assert done.stdout == ""
    assert "stored directly: 8.0 MiB" in done.stderr


def test_a_store_that_is_full_says_so(scenes: Path) -> None:
    assert scenes.exists()
    code = """
import os
total = 0
descriptor = os.open("file", os.O_WRONLY | os.O_CREAT)
try:
    while True: total += os.write(descriptor, bytes(1 << 20))
except OSError as error: print(error.strerror, total > 8 << 20)
"""
    with workplace(size_bytes=64 * MIB) as place:
        place.announced.append("no space|No space|full")
        place.mount()
        said = play(place.mountpoint / "full", sys.executable, "-c", code, run=True)
        assert said[0].startswith("No space left on device True"), said[0]

"""Unchanged programs that store into a mount by themselves: they do the same, sooner."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cxlfs import client
from tests.support.cli import PROGRAM
from tests.support.mount import MIB, Workplace, wait_until, workplace
from tests.support.repository import ROOT
from tests.support.run_reader import ANSWERED, BEGUN, BLOCK_BYTES, BLOCKS, END, LOOKS

SOURCES = ("run_scenes.c", "run_readers.c", "run_processes.c")
SCENES = {
    "plain": "direct_bytes",
    "pieces": None,  # too small, each of them
    "places": "direct_bytes",
    "sizes": "direct_bytes",
    "duplicates": "direct_bytes",
    "unseen": "direct_bytes",
    "appended": "direct_bytes",
    "openers": "direct_bytes",
    "memory": "direct_bytes",
    "streams": "direct_bytes",
    "copies": "direct_bytes",
    "sent": "direct_bytes",
    "forked": "direct_bytes",
    "crowd": "direct_bytes",
    "threads": "direct_bytes",
    "spawned": "direct_bytes",
    "executed": "direct_bytes",
    "left_open": "direct_bytes",
    "signals": "direct_bytes",
    "readers": "read_bytes",
    "read_pieces": "read_bytes",
    "read_memory": "read_bytes",
    "read_holes": "read_bytes",
    "read_duplicates": "read_bytes",
    "read_changes": "read_bytes",
    "read_names": "read_bytes",
    "read_streams": "read_bytes",
    "read_shared": "read_bytes",
    "mapped": "mapped_bytes",
    "unmapped": "mapped_bytes",
}
"""And what must not be 0 in the end: the direct way was taken."""


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
) -> tuple[str, dict[str, str], dict[str, int]]:
    """What a program said, the files that it left with their checksums, and the counts of all its
    processes.
    """
    directory.mkdir()
    report = directory.parent / f"{directory.name}.report"
    before = [*PROGRAM, "run", "--"] if run else []
    done = subprocess.run(
        [*before, *command],
        cwd=directory,
        env={**os.environ, "CXLFS_RUN_REPORT": str(report), **(environment or {})},
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
    counts: dict[str, int] = {}
    lines = report.read_text().splitlines() if report.exists() else []
    report.unlink(missing_ok=True)
    for line in map(json.loads, lines):
        for key, value in line.items():
            counts[key] = counts.get(key, 0) + value if isinstance(value, int) else 0
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
    key = SCENES[scene]
    assert key is None or direct[2][key] > MIB, direct[2]
    assert not through_kernel[2]


def test_reads_can_be_switched_off(place: Workplace, scenes: Path) -> None:
    off = {"CXLFS_RUN_READ": "off"}
    said = play(place.mountpoint / "off", scenes, "readers", run=True, environment=off)
    assert "ended with 0" in said[0]
    assert said[2]["read_bytes"] == 0 < said[2]["direct_bytes"]


@pytest.mark.parametrize("setting", [{"CXLFS_RUN": "off"}, {"CXLFS_RUN_MMAP": "off"}])
def test_it_can_be_switched_off(
    place: Workplace, scenes: Path, tmp_path: Path, setting: dict[str, str]
) -> None:
    expected = play(tmp_path / "mapped", scenes, "mapped", run=False)
    off = play(place.mountpoint / "off", scenes, "mapped", run=True, environment=setting)
    assert off[:2] == expected[:2]
    assert off[2]["mapped_bytes"] == 0
    assert (off[2]["direct_bytes"] == 0) == ("CXLFS_RUN" in setting)


@pytest.mark.parametrize(
    ("option", "words"),
    [("transport=native", ": direct ("), ("transport=pyfuse3", ": through the kernel: ")],
)
def test_each_mount_is_logged_once(
    unmounted: Workplace, scenes: Path, tmp_path: Path, option: str, words: str
) -> None:
    """With the transport of libfuse there is no direct access."""
    log = tmp_path / "log"
    setting = {"CXLFS_RUN_LOG": str(log)}
    unmounted.mount(option)
    expected = play(tmp_path / "duplicates", scenes, "duplicates", run=False)
    directory = unmounted.mountpoint / "logged"
    said = play(directory, scenes, "duplicates", run=True, environment=setting)
    assert said[:2] == expected[:2]
    lines = log.read_text().splitlines()
    assert len(lines) == 1, lines
    assert words in lines[0]
    assert (said[2]["direct_bytes"] > 0) == ("native" in option)


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


# --- readers beside writers -----------------------------------------------------------------------


def blocks(number: int) -> bytes:
    block = struct.pack("<Q", number) + bytes([number % 251]) * (BLOCK_BYTES - 8)
    return block * BLOCKS


def write_over(path: Path, number: int) -> None:
    data = blocks(number)
    with path.open("r+b", buffering=0) as file:
        for start in range(0, len(data), MIB):
            file.write(data[start : start + MIB])


def cut_and_write(path: Path, number: int) -> None:
    os.truncate(path, number * 77777 % (BLOCKS * BLOCK_BYTES))
    write_over(path, number)


def write_directly(path: Path, number: int) -> None:
    with client.open(path, "wb") as file:
        file.write(blocks(number))


def rename_over(path: Path, number: int) -> None:
    new = path.with_name("new")
    new.write_bytes(blocks(number))
    new.rename(path)


def write_mapped(path: Path, number: int) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:] = blocks(number)


WRITERS: dict[str, Callable[[Path, int], object]] = {
    "written": write_over,
    "cut": cut_and_write,
    "emptied": lambda path, number: path.write_bytes(blocks(number)),
    "directly": write_directly,
    "renamed": rename_over,
    "mapped": write_mapped,
}


@pytest.mark.parametrize("how", WRITERS)
def test_what_was_answered_is_read(
    place: Workplace, tmp_path: Path, rng: random.Random, how: str
) -> None:
    """Each read that began after a writing was answered sees all of it, or what came later."""
    path, shared, report = place.mountpoint / "file", tmp_path / "words", tmp_path / "report"
    path.write_bytes(blocks(1))
    shared.write_bytes(struct.pack("<QQQQ", 1, 1, 0, 0).ljust(4096, b"\0"))
    command = [sys.executable, "-m", "tests.support.run_reader", path, shared, how]
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        words = memoryview(memory).cast("Q")
        reader = subprocess.Popen(
            [*PROGRAM, "run", "--", *command],
            cwd=ROOT,
            env={**os.environ, "CXLFS_RUN_REPORT": str(report)},
        )
        try:
            for number in range(2, 26):
                looks = words[LOOKS] + rng.choice([0, 1, 2, 12])
                wait_until(
                    lambda looks=looks: words[LOOKS] >= looks or reader.poll() is not None,
                    "it looks",
                )
                words[BEGUN] = number
                WRITERS[how](path, number)
                words[ANSWERED] = number
        finally:
            words[END] = 1
            assert reader.wait(60) == 0
            words.release()
    counts = [json.loads(line) for line in report.read_text().splitlines()]
    assert sum(count["read_bytes"] for count in counts) > 20 * MIB
    client.forget()


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
    done = subprocess.run([*PROGRAM, "run", sys.executable, "-c", code], check=False)
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
    done = subprocess.run(command, check=False, capture_output=True, text=True)
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

"""Files that several programs map: verified by one, or by all of them together, and not by each."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cxlfs import client
from cxlfs.control.client import control_request
from tests.support.cli import PROGRAM
from tests.support.mount import MIB, Workplace

PROCESSES = 8
SIZE = 40 * MIB
ROUNDING = MIB // 2
"""Chunks in which one piece ends and another begins are compared with both."""
MAPS = """
import sys
from cxlfs import client
sys.stdin.readline()
with client.map(sys.argv[1], sys.argv[2]) as mapped:
    total = sum(mapped.view[::1 << 16])
print(client.counts().verified_bytes, total)
"""
MAPS_UNCHANGED = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    for _ in range(2):
        memory = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        assert sum(memory[::1 << 16]) == int(sys.argv[2])
"""

pytestmark = pytest.mark.large_store


@pytest.fixture
def saved(unmounted: Workplace, rng: random.Random) -> tuple[Path, bytes]:
    unmounted.mount()
    path = unmounted.mountpoint / "file"
    data = rng.randbytes(SIZE)
    with client.open(path, "wb") as file:
        file.write(data)
    client.forget()
    return path, data


def mapped_by(count: int, path: Path, verify: str = "all") -> list[tuple[int, int]]:
    """So many processes at once: how many bytes each compared, and what it saw."""
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", MAPS, path, verify],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for program in programs:
        assert program.stdin is not None
        program.stdin.write("go\n")
        program.stdin.flush()
    found = []
    for program in programs:
        said, _ = program.communicate()
        assert program.returncode == 0
        compared, total = map(int, said.split())
        found.append((compared, total))
    return found


def run_unchanged(path: Path, total: int, directory: Path, **environment: str) -> int:
    """Bytes that an unchanged program compared."""
    report = directory / "report"
    subprocess.run(
        [*PROGRAM, "run", "--", sys.executable, "-c", MAPS_UNCHANGED, path, str(total)],
        env={**os.environ, "CXLFS_RUN_REPORT": str(report), **environment},
        check=True,
    )
    counts = [json.loads(line) for line in report.read_text().splitlines()]
    report.unlink()
    assert sum(each["mapped_bytes"] for each in counts) == 2 * SIZE
    return sum(each["verified_bytes"] for each in counts)


def status(place: Workplace) -> dict[str, object]:
    (message,) = control_request(str(place.mountpoint), "status")
    return message


def test_what_many_map_at_once_is_verified_once(saved: tuple[Path, bytes]) -> None:
    path, data = saved
    found = mapped_by(PROCESSES, path)
    assert {total for _, total in found} == {sum(data[:: 1 << 16])}
    assert SIZE <= sum(compared for compared, _ in found) <= SIZE + ROUNDING
    assert [compared for compared, _ in mapped_by(2, path)] == [0, 0], "and nobody needs to later"


def test_who_asks_for_it_verifies_all(saved: tuple[Path, bytes], unmounted: Workplace) -> None:
    path, data = saved
    total = sum(data[:: 1 << 16])
    [(compared, seen)] = mapped_by(1, path)
    assert SIZE <= compared <= SIZE + ROUNDING
    assert seen == total
    for compared, _ in mapped_by(2, path, "always"):
        assert SIZE <= compared <= SIZE + ROUNDING
    direct = status(unmounted)["direct"]
    assert isinstance(direct, dict)
    assert (direct["verified_contents"], direct["verified_for_s"]) == (1, 300)
    unmounted.remount()
    [(compared, _)] = mapped_by(1, path)
    assert SIZE <= compared <= SIZE + ROUNDING, "another daemon knows nothing of it"


def test_unchanged_programs(saved: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = saved
    total = sum(data[:: 1 << 16])
    assert SIZE <= run_unchanged(path, total, tmp_path) <= SIZE + ROUNDING, "mapped twice"
    assert run_unchanged(path, total, tmp_path) == 0
    always = run_unchanged(path, total, tmp_path, CXLFS_RUN_VERIFY="always")
    assert 2 * SIZE <= always <= 2 * (SIZE + ROUNDING)
    assert run_unchanged(path, total, tmp_path, CXLFS_RUN_VERIFY="off") == 0


def test_a_mount_that_remembers_nothing(unmounted: Workplace, tmp_path: Path) -> None:
    unmounted.mount("verified_for=0")
    path = unmounted.mountpoint / "file"
    with client.open(path, "wb") as file:
        file.write(b"x" * SIZE)
    client.forget()
    for compared, _ in mapped_by(2, path):
        assert SIZE <= compared <= SIZE + ROUNDING
    compared = run_unchanged(path, SIZE // (1 << 16) * ord("x"), tmp_path)
    assert SIZE <= compared <= SIZE + ROUNDING, "a second mapping of the same process"


def test_damage_since_is_met_by_who_verifies_and_then_by_all(
    saved: tuple[Path, bytes], unmounted: Workplace
) -> None:
    path, data = saved
    unmounted.announced.append("damage|checksum|data")
    with client.map(path, "all") as mapped:
        assert mapped.view == data
    at = unmounted.source.read_bytes().find(data[4 * MIB : 4 * MIB + 4096])
    with unmounted.source.open("r+b") as source, mmap.mmap(source.fileno(), 0) as memory:
        memory[at] ^= 1
        try:
            with client.map(path, "all"):
                pass  # not verified again, as is promised
            with pytest.raises(OSError, match="error") as caught:
                client.map(path, "always")
            assert caught.value.errno == errno.EIO
            with pytest.raises(OSError, match="error") as caught:
                client.map(path, "all")
            assert caught.value.errno == errno.EIO
            assert status(unmounted)["state"] == "NEEDS-CHECK"
        finally:
            memory[at] ^= 1
    with client.map(path, "all") as mapped:
        assert mapped.view == data
    path.unlink()
    client.forget()

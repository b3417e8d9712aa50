"""Files that several programs map: verified by one, or by all of them together, and not by each."""

from __future__ import annotations

import errno
import mmap
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cxlfs import client
from cxlfs.control.client import control_request
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


def test_a_mount_that_remembers_nothing(unmounted: Workplace) -> None:
    unmounted.mount("verified_for=0")
    path = unmounted.mountpoint / "file"
    with client.open(path, "wb") as file:
        file.write(b"x" * SIZE)
    client.forget()
    for compared, _ in mapped_by(2, path):
        assert SIZE <= compared <= SIZE + ROUNDING


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

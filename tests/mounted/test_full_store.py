"""A store that is full: nothing that was committed is lost, and every byte comes back."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli import run_program
from tests.support.mount import MIB, Workplace, wait_until, workplace

NO_SPACE_LEFT = os.strerror(errno.ENOSPC)
NO_SPACE = r"no-space: "
REVERTED = r"reverted: the previous version is back: a write failed"


@pytest.fixture
def full() -> Iterator[Workplace]:
    """A small store, mounted, whose log may speak of what a full one goes through."""
    with workplace(size_bytes=64 * MIB) as place:
        place.announced += [NO_SPACE, REVERTED]
        place.mount()
        yield place
        if place.is_mounted:
            place.unmount()
        verified = run_program("verify", place.source)
        assert verified.code == 0, verified


def free_bytes(mnt: Path) -> tuple[int, int]:
    """Free and available, as df shows them."""
    report = os.statvfs(mnt)
    return report.f_bfree * report.f_frsize, report.f_bavail * report.f_frsize


def assert_free(mnt: Path, expected: tuple[int, int], where: str = "") -> None:
    """All of it, a moment later at most: the kernel forgets a file after unlink has returned."""
    wait_until(lambda: free_bytes(mnt) == expected, f"{where}statfs shows {expected} free")


def write_for_ever(descriptor: int, piece: bytes) -> None:
    while True:
        os.write(descriptor, piece)


def fill(path: Path, piece: bytes) -> int:
    """Write until the store is full; returns how many bytes it took."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with pytest.raises(OSError, match=NO_SPACE_LEFT):
        write_for_ever(descriptor, piece)
    taken = os.fstat(descriptor).st_size
    with pytest.raises(OSError, match=NO_SPACE_LEFT):  # and so says close, never 0
        os.close(descriptor)
    return taken


def overwrite_until_full(path: Path, size: int) -> None:
    """What a trainer does: truncate, write all, close; raises OSError at its first failure."""
    with path.open("wb", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def status(mnt: Path) -> dict[str, object]:
    said = run_program("status", mnt, "--json")
    assert said.code == 0, said
    document: dict[str, object] = json.loads(said.stdout)
    return document


def test_an_overwrite_that_does_not_fit_leaves_the_old_version(
    full: Workplace, rng: random.Random
) -> None:
    mnt = full.mountpoint
    path = mnt / "model.pt"
    old = rng.randbytes(20 * MIB + 12_345)
    path.write_bytes(old)
    (mnt / "other").write_bytes(rng.randbytes(10 * MIB))
    before = free_bytes(mnt)
    with pytest.raises(OSError, match=NO_SPACE_LEFT):
        overwrite_until_full(path, 60 * MIB)
    wait_until(lambda: path.stat().st_size == len(old), "the old version is back")
    assert path.read_bytes() == old
    # What was written of the new version is kept aside, but it counts as free: it gives way.
    assert_free(mnt, before)
    assert re.search(r"no-space: no room for .+: .+ can be written \(/model\.pt\)", full.log_text())
    assert re.search(rf"{REVERTED}.*/model\.pt", full.log_text())
    said = status(mnt)
    assert said["state"] == "ONLINE"
    assert "space" in str(said["status"])
    assert said["errors"]["no_space"] > 0  # type: ignore[index]
    (mnt / "other").unlink()
    new = rng.randbytes(12 * MIB)
    path.write_bytes(new)
    full.remount()
    assert path.read_bytes() == new


def test_a_new_file_that_does_not_fit_says_so_and_can_be_removed(
    full: Workplace, rng: random.Random
) -> None:
    mnt = full.mountpoint
    kept = rng.randbytes(15 * MIB)
    (mnt / "kept").write_bytes(kept)
    before = free_bytes(mnt)
    taken = fill(mnt / "too-large", rng.randbytes(MIB))
    assert before[1] <= taken <= before[0], "statfs told something else than there was"
    with pytest.raises(OSError, match=NO_SPACE_LEFT):
        (mnt / "another").write_bytes(rng.randbytes(4 * MIB))
    assert (mnt / "kept").read_bytes() == kept
    full.remount()
    assert (mnt / "kept").read_bytes() == kept
    for path in mnt.iterdir():
        if path.name != "kept":
            path.unlink()
    assert_free(mnt, before)


def make_files_for_ever(mnt: Path, pool: bytes, rng: random.Random) -> None:
    """Of sizes up to half the pool."""
    for number in itertools.count():
        start = rng.randrange(len(pool) // 2)
        data = pool[start : start + rng.randrange(1, len(pool) // 2)]
        (mnt / f"file{number}").write_bytes(data)


def fill_and_delete(full: Workplace, rng: random.Random, cycles: int) -> None:
    """Fill the store with files of many sizes, delete them in any order; statfs must agree."""
    mnt = full.mountpoint
    kept = rng.randbytes(3 * MIB)
    (mnt / "kept").write_bytes(kept)
    before = free_bytes(mnt)
    pool = rng.randbytes(8 * MIB)
    for cycle in range(cycles):
        with pytest.raises(OSError, match=NO_SPACE_LEFT):
            make_files_for_ever(mnt, pool, rng)
        names = [path for path in mnt.iterdir() if path.name != "kept"]
        assert len(names) > 10
        rng.shuffle(names)
        for path in names:
            path.unlink()
        assert_free(mnt, before, f"cycle {cycle}: ")
        assert (mnt / "kept").read_bytes() == kept
    full.remount()
    assert_free(mnt, before)
    assert (mnt / "kept").read_bytes() == kept


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_filling_and_deleting_leaks_nothing(full: Workplace, rng: random.Random) -> None:
    fill_and_delete(full, rng, 20)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_filling_and_deleting_500_times_leaks_nothing(full: Workplace, rng: random.Random) -> None:
    fill_and_delete(full, rng, 500)

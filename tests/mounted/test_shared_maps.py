"""Files that programs fill through shared mappings, on full stores too, and what a kill leaves."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.mount import MIB, Workplace, kill, tell, wait_for_line, wait_until

ANNOUNCED = [r"no-space: ", r"reverted: the previous version is back", r"cut: it ends before"]
OLD_BYTES = 10 * MIB
TOO_LARGE_BYTES = 60 * MIB

FILL = """
import sys
import numpy as np
path, how, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
if how == "npy":
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=(size,))
else:
    array = np.memmap(path, mode=how, dtype=np.uint8, shape=(size,))
array[:] = 7
del array
"""

FILL_AGAIN = """
import errno, sys
import numpy as np

def save():
    array = np.lib.format.open_memmap(
        sys.argv[1], mode="w+", dtype=np.uint8, shape=(int(sys.argv[2]),)
    )
    array[:] = 7
    array.flush()

try:
    save()
except OSError as error:  # which keeps the array, and so the mapping
    print(errno.errorcode[error.errno], flush=True)
    sys.stdin.readline()
save()
"""

MAP_ALONE = """
import ctypes, mmap, os, sys
size, pages = int(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_size_t]
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
os.ftruncate(descriptor, size)
address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
os.close(descriptor)  # the mapping keeps the file open
ctypes.memset(address, 7, pages * mmap.PAGESIZE)
print("ready", flush=True)
sys.stdin.readline()
"""


def run(code: str, *arguments: object) -> int:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.DEVNULL, check=False
    ).returncode


def save_old(path: Path, how: str) -> None:
    array = np.full(OLD_BYTES, 3, np.uint8)
    if how == "npy":
        np.save(path, array)
    else:
        array.tofile(path)


def load(path: Path, how: str) -> np.ndarray:
    return np.load(path) if how == "npy" else np.fromfile(path, np.uint8)


def state(path: Path) -> bytes:
    return os.getxattr(path, "user.cxlfs.state")


@pytest.mark.parametrize("how", ["npy", "w+"])
def test_an_array_that_does_not_fit_leaves_the_old_one(place: Workplace, how: str) -> None:
    """The program ends with 0: only msync would tell it. On a busy machine the file is judged
    before the kernel has tried to write all pages back.
    """
    place.announced += [*ANNOUNCED, "torn: it is incomplete"]
    path = place.mountpoint / "array.npy"
    save_old(path, how)
    assert run(FILL, path, how, TOO_LARGE_BYTES) == 0
    wait_until(lambda: path.stat().st_size in (OLD_BYTES, OLD_BYTES + 128), "the old array is back")
    for _ in range(2):
        array = load(path, how)
        assert array.size == OLD_BYTES
        assert (array == 3).all()
        assert state(path) == b"complete"
        place.remount()


def test_an_array_that_grows_beyond_the_room_keeps_what_it_had(place: Workplace) -> None:
    """In place: making room must not commit the half of it."""
    place.announced += ANNOUNCED
    path = place.mountpoint / "array.raw"
    old = np.random.default_rng(3).integers(0, 256, OLD_BYTES, np.uint8)
    old.tofile(path)
    assert run(FILL, path, "r+", TOO_LARGE_BYTES) == 0
    wait_until(lambda: path.stat().st_size == OLD_BYTES, "the old array is back")
    for _ in range(2):
        assert (load(path, "w+") == old).all()
        assert state(path) == b"complete"
        place.remount()


def test_an_array_is_saved_when_there_is_room_again(place: Workplace) -> None:
    place.announced += ANNOUNCED
    path, other = place.mountpoint / "array.npy", place.mountpoint / "other"
    np.save(path, np.full(OLD_BYTES, 3, np.uint8))
    other.write_bytes(bytes(20 * MIB))
    saver = place.python(FILL_AGAIN, path, 2 * OLD_BYTES + OLD_BYTES // 2)
    wait_for_line(saver, errno.errorcode[errno.ENOSPC].encode())
    assert state(path) == b"incomplete"
    other.unlink()
    tell(saver)
    assert saver.wait() == 0
    for _ in range(2):
        array = np.load(path)
        assert array.size == 2 * OLD_BYTES + OLD_BYTES // 2
        assert (array == 7).all()
        assert state(path) == b"complete"
        place.remount()


def test_a_new_array_that_does_not_fit_is_incomplete_and_replaces_nothing(
    place: Workplace,
) -> None:
    place.announced += ANNOUNCED
    path, new = place.mountpoint / "array", place.mountpoint / "array.tmp"
    path.write_bytes(b"good")
    assert run(FILL, new, "w+", TOO_LARGE_BYTES) == 0
    wait_until(lambda: new.stat().st_size < TOO_LARGE_BYTES, "the file is cut")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        new.rename(path)
    assert path.read_bytes() == b"good"
    assert (np.fromfile(new, np.uint8) == 7).all()
    assert new.stat().st_size > 0
    place.remount()
    assert state(new) == b"incomplete"
    assert state(path) == b"complete"
    assert path.read_bytes() == b"good"


def test_a_program_that_is_killed_with_a_mapping_alone(place: Workplace) -> None:
    """No close tells of its end: the descriptor was closed before."""
    place.announced += ANNOUNCED
    path = place.mountpoint / "array"
    path.write_bytes(b"good")
    writer = place.python(MAP_ALONE, path, MIB, 3)
    wait_for_line(writer)
    assert path.stat().st_size == MIB
    kill(writer)
    wait_until(lambda: path.stat().st_size == 4, "the version before is back")
    assert path.read_bytes() == b"good"


@pytest.mark.parametrize("ends", ["with its daemon", "well"])
def test_a_file_that_is_filled_through_a_mapping_alone(place: Workplace, ends: str) -> None:
    """It is committed when the mapping ends, with the pages that were never touched as holes."""
    path = place.mountpoint / "array"
    path.write_bytes(b"good")
    writer = place.python(MAP_ALONE, path, MIB, 3)
    wait_for_line(writer)
    if ends == "well":
        tell(writer)
        assert writer.wait() == 0
        place.remount()
        assert path.read_bytes() == (b"\7" * 3 * os.sysconf("SC_PAGESIZE")).ljust(MIB, b"\0")
    else:
        place.kill_daemon()
        kill(writer)
        place.remount()
        assert path.read_bytes() == b"good"
    assert not re.search("cut:|reverted:", place.log_text())

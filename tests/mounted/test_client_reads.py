"""``cxlfs.client.open`` for reading on real mounts: bytes of the medium, and never old ones."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from cxlfs._native import ffi, lib

from cxlfs import client
from tests.support.mount import MIB, Workplace

pytestmark = pytest.mark.usefixtures("nothing_stays_mapped")


@pytest.fixture
def saved(place: Workplace, rng: random.Random) -> tuple[Path, bytes]:
    path = place.mountpoint / "file"
    data = rng.randbytes(7 * MIB + 99)
    with client.open(path, "wb") as file:
        file.write(data)
    return path, data


def test_what_is_read_comes_from_the_medium(saved: tuple[Path, bytes]) -> None:
    path, data = saved
    before = client.counts().read_bytes
    with client.open(path) as file:
        assert file.read() == data
        assert file.read() == b""
        file.seek(3 * MIB)
        assert file.read(MIB) == data[3 * MIB : 4 * MIB]
        file.seek(-5000, os.SEEK_END)
        assert file.read(MIB) == data[-5000:]
    assert client.counts().read_bytes == before + len(data) + MIB + 5000


def test_a_reader_sees_what_is_written_later(saved: tuple[Path, bytes]) -> None:
    path, data = saved
    with client.open(path) as file:
        before = client.counts().read_bytes
        assert file.read(2 * MIB) == data[: 2 * MIB]
        assert client.counts().read_bytes == before + 2 * MIB
        with path.open("r+b") as other:
            other.write(b"new")
        file.seek(0)
        assert file.read(2 * MIB) == b"new" + data[3 : 2 * MIB]
        assert client.counts().read_bytes == before + 2 * MIB, "through the kernel"
        for _ in range(12):  # until it is worth asking again
            file.seek(0)
            assert file.readall() == b"new" + data[3:]
        assert client.counts().read_bytes > before + 2 * MIB


def test_what_was_copied_while_somebody_could_write_is_not_used(
    saved: tuple[Path, bytes],
) -> None:
    """By the answer that is asked for behind the last byte."""
    path, data = saved
    target = ffi.new("char[]", MIB)
    with path.open("rb") as file:
        out = ffi.new("cxl_reader **")
        assert lib.cxl_reader_open(file.fileno(), out) == 0
        reader = out[0]
        assert lib.cxl_reader_holds(reader)
        assert lib.cxl_reader_copy(reader, target, MIB, MIB) == 0
        assert ffi.buffer(target)[:MIB] == data[MIB : 2 * MIB]
        assert lib.cxl_reader_copy(reader, target, MIB, len(data)) == -errno.ERANGE
        with path.open("r+b"):
            assert not lib.cxl_reader_holds(reader)
            assert lib.cxl_reader_copy(reader, target, MIB, MIB) == -errno.ESTALE
            assert lib.cxl_reader_open(file.fileno(), out) == -errno.EBUSY
        assert lib.cxl_reader_copy(reader, target, MIB, MIB) == -errno.ESTALE
        lib.cxl_reader_close(reader, file.fileno())


def test_a_reader_notices_that_the_daemon_is_gone(
    place: Workplace, saved: tuple[Path, bytes]
) -> None:
    path, data = saved
    file = client.open(path)
    before = client.counts().read_bytes
    assert file.read(2 * MIB) == data[: 2 * MIB]
    assert client.counts().read_bytes == before + 2 * MIB
    place.kill_daemon()
    with pytest.raises(OSError, match="not connected"):
        file.read(MIB)
    place.mount()
    with pytest.raises(OSError, match="not connected"):
        file.read(MIB)
    with contextlib.suppress(OSError):
        file.close()
    assert path.read_bytes() == data


def test_a_forked_child_reads_through_the_kernel(saved: tuple[Path, bytes]) -> None:
    path, data = saved
    with client.open(path) as file:
        assert file.read(2 * MIB) == data[: 2 * MIB]
        child = os.fork()
        if child == 0:
            before = client.counts().read_bytes
            same = file.read(2 * MIB) == data[2 * MIB : 4 * MIB]
            os._exit(0 if same and client.counts().read_bytes == before else 1)
        assert os.waitpid(child, 0)[1] == 0
        before = client.counts().read_bytes
        assert file.read(MIB) == data[2 * MIB : 3 * MIB]
        assert client.counts().read_bytes == before + MIB


@contextlib.contextmanager
def damaged(place: Workplace, data: bytes) -> Iterator[None]:
    """A bit of what is stored behind 4 MiB of it is another one meanwhile."""
    place.announced.append("damage|checksum|data")
    at = place.source.read_bytes().find(data[4 * MIB : 4 * MIB + 4096])
    assert at > 0
    with place.source.open("r+b") as source:
        source.seek(at)
        source.write(bytes([data[4 * MIB] ^ 1]))
    try:
        yield
    finally:
        with place.source.open("r+b") as source:
            source.seek(at)
            source.write(data[4 * MIB : 4 * MIB + 1])


def test_who_keeps_an_error_keeps_no_memory(place: Workplace, saved: tuple[Path, bytes]) -> None:
    path, data = saved
    maps = Path("/proc/self/maps")
    with client.map(path):
        pass  # from here on the process has the medium mapped
    before = maps.read_text().count(str(place.source))
    gc.disable()
    try:
        with (
            damaged(place, data),
            pytest.raises(OSError, match="damaged: bytes") as caught,
            client.map(path) as mapped,
        ):
            mapped.read(0, 5 * MIB)
        assert caught.value.errno == errno.EIO
        assert maps.read_text().count(str(place.source)) == before
    finally:
        gc.enable()


def test_damage_is_told_for_the_bytes_concerned(
    place: Workplace, saved: tuple[Path, bytes]
) -> None:
    path, data = saved
    with damaged(place, data):
        with client.map(path) as mapped:
            with pytest.raises(OSError, match="damaged: bytes") as caught:
                mapped.read(4 * MIB, 10)
            assert caught.value.errno == errno.EIO
            assert caught.value.filename == str(path)
            assert mapped.read(0, 3 * MIB) == data[: 3 * MIB]
            assert mapped.read(5 * MIB, MIB) == data[5 * MIB : 6 * MIB]
        with pytest.raises(OSError, match="error") as caught:
            client.map(path, client.Verify.ALL)
        assert caught.value.errno == errno.EIO
        with client.open(path) as file:
            assert file.read(3 * MIB) == data[: 3 * MIB]
            with pytest.raises(OSError, match="error") as caught:
                file.readall()
            assert caught.value.errno == errno.EIO
            file.seek(5 * MIB)
            assert file.read(MIB) == data[5 * MIB : 6 * MIB]
    with client.map(path, "all") as mapped:
        assert mapped.view == data

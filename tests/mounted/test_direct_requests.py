"""Programs that store file data by themselves, and others: who opens, who asks, who reads in place,
and who may not.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cxlfs.fuse import direct_wire
from cxlfs.fuse.direct_wire import Command
from tests.support.direct_client import DirectFile, Medium, lease_request, settle_request
from tests.support.direct_scenes import (
    CREATE,
    Writer,
    can_begin,
    count,
    number_of,
    refused,
    run,
    size_elsewhere,
)
from tests.support.mount import MIB, Workplace, wait_until

NOBODY = 65534
TCGETS = 0x5401


@pytest.fixture
def writer(place: Workplace) -> Iterator[Writer]:
    made = Writer(place.mountpoint / "file")
    yield made
    made.close()


# --- other processes ------------------------------------------------------------------------------

APPEND = "import sys; open(sys.argv[1], 'ab').write(b'appended')"


@pytest.mark.parametrize("ends", ["open", "settled", "closed"])
def test_who_appends_does_it_behind_what_was_stored(
    writer: Writer, rng: random.Random, ends: str
) -> None:
    """The kernel has never heard of the size: nobody has asked for it here."""
    data = rng.randbytes(250_000)
    writer.direct.begin()
    assert writer.direct.write(0, data)
    if ends == "settled":
        writer.direct.settle(done=True)
    if ends == "closed":
        writer.close()
    run(APPEND, writer.path)
    if ends == "open":
        assert writer.direct.is_closed
        writer.direct.write_all(100, b"written")
        data = data[:100] + b"written" + data[107:]
    writer.close()
    assert writer.path.read_bytes() == data + b"appended"


def test_who_appends_through_a_link_of_proc_does_it_there_as_well(
    writer: Writer, rng: random.Random
) -> None:
    """No name is looked up on the way, so nothing tells the kernel."""
    data = rng.randbytes(250_000)
    writer.direct.begin()
    assert writer.direct.write(0, data)
    again = os.open(f"/proc/self/fd/{writer.descriptor}", os.O_WRONLY | os.O_APPEND)
    for _ in range(20):
        os.write(again, b"appended")
    os.close(again)
    writer.close()
    assert writer.path.read_bytes() == data + b"appended" * 20


def test_who_only_reads_finds_all_and_ends_the_slip(writer: Writer, rng: random.Random) -> None:
    data = rng.randbytes(250_000)
    writer.direct.begin()
    assert writer.direct.write(0, data)
    reader = os.open(writer.path, os.O_RDONLY)
    with mmap.mmap(reader, len(data), mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
        assert mapping[:] == data, "by the size that the open brought along"
    assert writer.direct.is_closed
    assert os.pread(reader, MIB, 0) == data
    busy = number_of(writer.direct.request_lease)
    assert busy == errno.EBUSY, "as long as somebody has it open"
    os.close(reader)
    wait_until(lambda: can_begin(writer.direct), "it is alone with the file again")
    assert writer.direct.write(len(data), b"more")
    writer.close()
    assert writer.path.read_bytes() == data + b"more"


def test_a_second_handle_of_the_same_process_ends_the_slip(
    writer: Writer, rng: random.Random
) -> None:
    data = rng.randbytes(5000)
    writer.direct.begin()
    assert writer.direct.write(0, data)
    second = os.open(writer.path, CREATE)
    assert writer.direct.is_closed
    os.pwrite(second, b"second", 5000)
    os.close(second)
    writer.close()
    assert writer.path.read_bytes() == data + b"second"


def test_openers_get_in_while_the_program_asks_for_room_again_and_again(writer: Writer) -> None:
    """Between ESTALE and the second OPEN no new slip may come."""
    code = """
import os, sys
for _ in range(300):
    os.close(os.open(sys.argv[1], os.O_RDONLY))
"""
    with subprocess.Popen([sys.executable, "-c", code, str(writer.path)]) as process:
        written = 0
        while process.poll() is None:
            if writer.direct.lease is None or writer.direct.is_closed:
                # Each slip stays apart while it is locked, so that room may run short.
                usual = {None, errno.EBUSY, errno.ESTALE, errno.ENOSPC}
                assert number_of(writer.direct.begin) in usual
            if writer.direct.lease is not None:
                written += writer.direct.write(written, b"x")
    assert process.returncode == 0
    writer.close()
    assert writer.path.read_bytes() == b"x" * written


def test_sizes_are_those_of_the_moment(writer: Writer, rng: random.Random) -> None:
    """By path, by listing, and after the end: what the kernel remembers is never an older one."""
    writer.path.chmod(0o600)
    assert size_elsewhere(writer.path) == 0
    writer.direct.begin()
    size = 0
    for _ in range(20):
        data = rng.randbytes(rng.randrange(1, 3000))
        assert writer.direct.write(size, data)
        size += len(data)
        assert writer.path.stat().st_size == size
        assert [entry.stat().st_size for entry in os.scandir(writer.path.parent)] == [size]
        os.utime(writer.path)  # answered with attributes, too
        os.fchmod(writer.descriptor, 0o640)
        assert os.fstat(writer.descriptor).st_size == size
    assert not writer.direct.is_closed
    assert writer.direct.write(size, b"last")
    writer.close()
    assert writer.path.stat().st_size == size + 4
    assert size_elsewhere(writer.path) == size + 4


def test_a_file_that_is_closed_is_remembered_again(place: Workplace, writer: Writer) -> None:
    writer.direct.begin()
    assert writer.direct.write(0, b"data")
    for _ in range(3):
        writer.path.stat()
    writer.close()
    assert writer.path.stat().st_size == 4
    calls = count(place, "calls")
    for _ in range(50):
        assert writer.path.stat().st_size == 4
    assert count(place, "calls") - calls < 5


# --- reading in place -----------------------------------------------------------------------------


def test_a_file_is_read_in_place(place: Workplace, rng: random.Random) -> None:
    path = place.mountpoint / "file"
    data = bytearray(rng.randbytes(2 * MIB + 777))
    path.write_bytes(data)
    with path.open("r+b") as stream:
        for _ in range(600):  # more rows than one answer has room for
            offset = rng.randrange(2 * MIB)
            data[offset : offset + 5000] = piece = rng.randbytes(5000)
            os.pwrite(stream.fileno(), piece, offset)
        os.truncate(path, 3 * MIB)
    data += bytes(3 * MIB - len(data))
    descriptor = os.open(path, os.O_RDONLY)
    direct = DirectFile(descriptor)
    assert direct.read_in_place() == data
    rows, size = direct.map()
    assert size == 3 * MIB
    path.write_bytes(b"another")
    for row, _ in rows:
        at = row.extent_media_offset + row.extent_offset
        held = direct.medium.bytes[at : at + row.length_bytes]
        assert held == data[row.file_offset : row.file_offset + row.length_bytes], "it stays"
    direct.unmap(rows)
    os.close(descriptor)
    direct.medium.close()


def test_a_map_goes_on_from_its_beginning_only(place: Workplace) -> None:
    path = place.mountpoint / "file"
    path.write_bytes(b"data")
    descriptor = os.open(path, os.O_RDONLY)
    assert refused(descriptor, Command.MAP, struct.pack("<Q", 1)) == errno.EINVAL
    assert refused(descriptor, Command.CONFIRM) == errno.EINVAL
    assert refused(descriptor, Command.UNMAP) is None
    os.close(descriptor)


# --- who may not ----------------------------------------------------------------------------------


VERSION = struct.pack("<I", direct_wire.VERSION)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_nobody_else_may_ask_for_anything(unmounted: Workplace) -> None:
    unmounted.mount("allow_other")
    path = unmounted.mountpoint / "file"
    path.write_bytes(b"data")
    path.chmod(0o666)
    os.seteuid(NOBODY)
    try:
        descriptor = os.open(path, os.O_RDWR)
        assert {refused(descriptor, command, VERSION) for command in Command} == {errno.EPERM}
        assert os.read(descriptor, 10) == b"data"
    finally:
        os.seteuid(0)
    assert refused(descriptor, Command.ATTACH, VERSION) is None, "it is a matter of who asks"
    os.close(descriptor)


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_APPEND])
def test_who_appends_has_no_room_of_his_own(place: Workplace, flags: int) -> None:
    descriptor = os.open(place.mountpoint / "file", flags | os.O_CREAT)
    assert refused(descriptor, Command.LEASE, lease_request(MIB)) == errno.EBUSY
    os.close(descriptor)


def test_who_only_reads_has_none_either(place: Workplace) -> None:
    (place.mountpoint / "file").touch()
    descriptor = os.open(place.mountpoint / "file", os.O_RDONLY)
    assert refused(descriptor, Command.LEASE, lease_request(MIB)) == errno.EBADF
    os.close(descriptor)


def test_a_store_that_is_not_written_gives_none(unmounted: Workplace) -> None:
    unmounted.mount()
    (unmounted.mountpoint / "file").write_bytes(b"data")
    unmounted.remount("ro")
    descriptor = os.open(unmounted.mountpoint / "file", os.O_RDONLY)
    assert refused(descriptor, Command.LEASE, lease_request(MIB)) in (errno.EBADF, errno.EROFS)
    direct = DirectFile(descriptor)
    assert direct.read_in_place() == b"data"
    os.close(descriptor)
    direct.medium.close()


def test_nonsense_is_refused(place: Workplace, writer: Writer) -> None:
    descriptor = writer.descriptor
    assert refused(descriptor, Command.ATTACH, struct.pack("<I", 1)) == errno.EOPNOTSUPP
    assert refused(descriptor, Command.CONFIRM) == errno.EINVAL
    assert refused(descriptor, Command.SETTLE, settle_request(flags=2)) == errno.EINVAL
    assert refused(descriptor, Command.SETTLE, settle_request(2**64 - 1, flags=1)) is None
    assert refused(descriptor, Command.MAP, struct.pack("<Q", 2**64 - 1)) == errno.EINVAL
    watch = writer.direct.request_lease(2**64 - 1, 2**64 - 1).watch
    more = lease_request(MIB, watch=watch)
    assert refused(descriptor, Command.LEASE, more) == errno.EINVAL, "not locked"
    assert refused(descriptor, Command.MAP) is None
    assert refused(descriptor, Command.MAP, struct.pack("<Q", 2**64 - 1)) in (None, errno.EINVAL)
    for command in (TCGETS, Command.LEASE + (1 << 16), Command.UNMAP + 1):
        data = bytearray(100)
        unknown = number_of(lambda c=command, d=data: fcntl.ioctl(descriptor, c, d, True))  # type: ignore[misc]
        assert unknown == errno.ENOTTY
    directory = os.open(place.mountpoint, os.O_RDONLY)
    assert {refused(directory, command, VERSION) for command in Command} == {errno.ENOTTY}
    os.close(directory)


def test_without_workers_there_is_no_direct_access(unmounted: Workplace) -> None:
    unmounted.mount("transport=pyfuse3")
    descriptor = os.open(unmounted.mountpoint / "file", CREATE)
    assert {refused(descriptor, command, VERSION) for command in Command} == {errno.ENOTTY}
    assert not os.isatty(descriptor)
    os.close(descriptor)


def test_what_a_program_says_wrongly_fails_its_close_and_costs_nobody_else(
    place: Workplace, writer: Writer
) -> None:
    other = place.mountpoint / "other"
    other.write_bytes(b"other" * 1000)
    direct = writer.direct
    lease = direct.begin()
    assert direct.append(0, 0, lease.capacity_bytes + 1, 0), "more than it has"
    assert number_of(lambda: os.fsync(writer.descriptor)) == errno.EINVAL
    assert direct.is_closed
    place.announced.append("direct-write")
    descriptor, writer.descriptor = writer.descriptor, os.open(os.devnull, os.O_RDONLY)
    assert number_of(lambda: os.close(descriptor)) == errno.EINVAL
    assert other.read_bytes() == b"other" * 1000


def test_a_process_that_maps_the_medium_is_known_as_a_client(place: Workplace) -> None:
    """It may live on while the store is mounted again."""
    path = place.mountpoint / "file"
    path.write_bytes(b"data")
    descriptor = os.open(path, os.O_RDONLY)
    medium = Medium(descriptor)
    os.close(descriptor)
    place.remount()
    assert path.read_bytes() == b"data"
    medium.close()


def test_bytes_beyond_what_was_said_are_nobodys(writer: Writer) -> None:
    """A count of a thread that copies, and no word of what: the file ends before it."""
    direct = writer.direct
    direct.begin()
    assert direct.write(0, b"said")
    direct.count_copying(1)
    direct.store(b"unsaid")
    writer.close()
    assert writer.path.read_bytes() == b"said"


def test_a_mounted_store_tells_programs_where_to_tell_what(place: Workplace) -> None:
    """ATTACH names the medium as the daemon has it."""
    descriptor = os.open(place.mountpoint / "file", CREATE)
    medium = Medium(descriptor)
    assert medium.path == os.fsencode(place.source)
    assert medium.size_bytes == place.source.stat().st_size
    assert (medium.version, medium.chunk_bytes) == (direct_wire.VERSION, 65536)
    os.close(descriptor)
    medium.close()

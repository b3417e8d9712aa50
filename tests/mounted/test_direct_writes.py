"""Programs that store file data by themselves: what becomes of it, also when somebody is killed."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator

import pytest

from cxlfs.native import client
from tests.support.direct_scenes import (
    OVERWRITE,
    Writer,
    can_begin,
    free_bytes,
    number_of,
    read_elsewhere,
    size_elsewhere,
)
from tests.support.mount import MIB, Workplace, kill, wait_for_line, wait_until
from tests.support.repository import ROOT


@pytest.fixture
def writer(place: Workplace) -> Iterator[Writer]:
    made = Writer(place.mountpoint / "file")
    yield made
    made.close()


# --- what is written ------------------------------------------------------------------------------


def test_what_is_stored_is_read_by_another_process_and_survives(
    place: Workplace, writer: Writer, rng: random.Random
) -> None:
    data = rng.randbytes(3 * MIB + 12_345)
    writer.direct.write_all(0, data)
    assert read_elsewhere(writer.path) == data, "while it is open"
    writer.direct.write_all(len(data), b"more")
    writer.close()
    assert read_elsewhere(writer.path) == data + b"more"
    place.remount()
    assert writer.path.read_bytes() == data + b"more"


def test_who_wrote_reads_what_he_wrote_through_the_kernel(
    writer: Writer, rng: random.Random
) -> None:
    data = rng.randbytes(500_000)
    direct = writer.direct
    direct.begin()
    assert direct.write(0, data[:200_000])
    assert os.pread(writer.descriptor, MIB, 0) == data[:200_000]
    assert direct.write(200_000, data[200_000:])
    assert os.pread(writer.descriptor, MIB, 100_000) == data[100_000:]
    assert os.lseek(writer.descriptor, 0, os.SEEK_END) == len(data)
    assert not direct.is_closed, "looking closes nothing"


def test_writes_through_the_kernel_and_past_it_have_one_order(
    writer: Writer, rng: random.Random
) -> None:
    direct = writer.direct
    expected = bytearray(300_000)
    os.pwrite(writer.descriptor, bytes(expected), 0)
    direct.begin(4 * MIB)
    for _ in range(300):
        offset = rng.randrange(299_000)
        data = rng.randbytes(rng.randrange(1, 1000))
        expected[offset : offset + len(data)] = data
        if rng.random() < 0.5:
            assert direct.write(offset, data)
        else:
            os.pwrite(writer.descriptor, data, offset)
        if rng.random() < 0.1:
            assert os.pread(writer.descriptor, 300_000, 0) == expected
    writer.close()
    assert writer.path.read_bytes() == expected


def test_more_writes_than_a_slip_has_room_for(writer: Writer, rng: random.Random) -> None:
    data = rng.randbytes(3000 * 10)
    writer.direct.begin(len(data))
    for number in range(3000):
        assert writer.direct.write(number * 10, data[number * 10 : number * 10 + 10])
    assert writer.direct.settle() == (3000, len(data))
    writer.close()
    assert writer.path.read_bytes() == data


def test_room_that_is_used_up_is_given_back_for_more(
    place: Workplace, writer: Writer, rng: random.Random
) -> None:
    before = free_bytes(place)
    data = rng.randbytes(20 * MIB)
    writer.direct.write_all(0, data)
    assert writer.direct.settle(done=True)[1] == len(data)
    writer.close()
    assert writer.path.read_bytes() == data
    writer.path.unlink()
    wait_until(lambda: free_bytes(place) > before - MIB, "its room is free again")


def test_fsync_is_a_commit_point(place: Workplace, writer: Writer, rng: random.Random) -> None:
    data = rng.randbytes(700_000)
    direct = writer.direct
    direct.begin()
    assert direct.write(0, data)
    os.fsync(writer.descriptor)
    assert direct.is_closed
    assert not direct.write(0, b"late")
    place.kill_daemon()
    assert number_of(writer.close) == errno.ENOTCONN
    place.mount()
    assert writer.path.read_bytes() == data


def test_a_file_is_truncated_in_between(writer: Writer, rng: random.Random) -> None:
    data = rng.randbytes(400_000)
    direct = writer.direct
    direct.begin()
    assert direct.write(0, data)
    os.ftruncate(writer.descriptor, 123_456)
    assert os.fstat(writer.descriptor).st_size == 123_456
    direct.write_all(200_000, b"end")
    os.truncate(writer.path, 200_002)
    direct.write_all(200_002, b"!")
    writer.close()
    expected = data[:123_456].ljust(200_000, b"\0") + b"en!"
    assert writer.path.read_bytes() == expected
    assert size_elsewhere(writer.path) == len(expected)


def test_a_rename_publishes_and_replaces(place: Workplace, rng: random.Random) -> None:
    target = place.mountpoint / "checkpoint"
    target.write_bytes(b"old" * 1000)
    data = rng.randbytes(300_000)
    writer = Writer(place.mountpoint / "checkpoint.tmp")
    writer.direct.write_all(0, data)
    writer.path.rename(target)
    assert read_elsewhere(target) == data
    place.kill_daemon()
    assert number_of(writer.close) == errno.ENOTCONN
    place.mount()
    assert target.read_bytes() == data


def test_a_file_without_a_name_takes_its_room_along(place: Workplace, writer: Writer) -> None:
    writer.direct.begin()
    assert writer.direct.write(0, bytes(MIB // 2))
    writer.path.unlink()
    assert writer.direct.write(MIB // 2, bytes(1000))
    assert len(os.pread(writer.descriptor, MIB, 0)) == MIB // 2 + 1000
    writer.close()
    assert not list(place.mountpoint.iterdir())


def test_a_full_store_says_so(place: Workplace, writer: Writer, rng: random.Random) -> None:
    """What the kernel is asked then tells it, or makes room."""
    writer.direct.begin()
    data = rng.randbytes(1000)
    assert writer.direct.write(0, data)
    filler = place.mountpoint / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(MIB))

    assert number_of(fill) == errno.ENOSPC
    place.announced.append("no-space")
    assert number_of(writer.direct.request_lease) == errno.ENOSPC
    filler.unlink(missing_ok=True)
    wait_until(lambda: can_begin(writer.direct), "there is room again")
    assert writer.direct.write(1000, data)
    writer.close()
    assert writer.path.read_bytes() == data * 2


@pytest.mark.parametrize("ends", ["settle", "close"])
def test_what_the_library_has_settled_has_its_size_in_the_kernel(
    place: Workplace, rng: random.Random, ends: str
) -> None:
    """Of these calls none asks for it."""
    data = rng.randbytes(2 * MIB)
    path = place.mountpoint / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    direct = client.DirectFile(descriptor)
    assert direct.write(data, 0) == len(data)
    getattr(direct, ends)()
    with (place.mountpoint / "copy").open("wb") as copy:
        assert os.copy_file_range(descriptor, copy.fileno(), len(data), 0) == len(data)
    direct.close()
    os.close(descriptor)
    assert (place.mountpoint / "copy").read_bytes() == data
    assert path.read_bytes() == data


# --- who is killed --------------------------------------------------------------------------------


def test_a_killed_writer_brings_the_old_content_back(place: Workplace) -> None:
    path = place.mountpoint / "checkpoint"
    path.write_bytes(b"old" * 50_000)
    before = free_bytes(place)
    process = place.python(OVERWRITE, path, "anew", cwd=ROOT)
    wait_for_line(process, b"written")
    assert path.stat().st_size == 1_500_000
    kill(process)
    place.announced.append("reverted")
    assert path.read_bytes() == b"old" * 50_000
    wait_until(lambda: free_bytes(place) > before - 3 * MIB, "its room came back")


def test_a_killed_writer_of_a_new_file_leaves_it_incomplete(place: Workplace) -> None:
    path = place.mountpoint / "checkpoint"
    process = place.python(OVERWRITE, path, "new", cwd=ROOT)
    wait_for_line(process, b"written")
    kill(process)
    assert os.getxattr(path, "user.cxlfs.state") == b"incomplete"
    assert path.read_bytes() == b"new" * 500_000


INHERITED = """
import os, sys
from tests.support.direct_client import DirectFile
file = DirectFile(int(sys.argv[1]))
file.write_all(0, b"new" * 1000)
print("written", flush=True)
sys.stdin.read()
os._exit(0)
"""


UNIT = """
import os, sys
from pathlib import Path
from tests.support.direct_client import DirectFile
directory = Path(sys.argv[1])
for number in range(3):
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    file = DirectFile(os.open(directory / f"shard-{number}", flags, 0o644))
    file.write_all(0, b"new" * 100_000)
    if number < 2:
        os.close(file.descriptor)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_unit_whose_writer_is_killed_goes_back_as_a_whole(unmounted: Workplace) -> None:
    """Room is asked for before the copy of the unit is made: the request goes on behind it."""
    unmounted.mount("units=auto")
    unit = unmounted.mountpoint / "checkpoint-1"
    unit.mkdir()
    old = {f"shard-{number}": b"old" * 50_000 for number in range(3)}
    for name, content in old.items():
        (unit / name).write_bytes(content)
    (unit / "trainer_state.json").write_bytes(b"done")
    process = unmounted.python(UNIT, unit, cwd=ROOT)
    wait_for_line(process, b"written")
    assert (unit / "shard-0").read_bytes() == b"new" * 100_000
    kill(process)
    unmounted.announced += ["reverted", "unit-back", "again"]
    wait_until(
        lambda: all((unit / name).read_bytes() == content for name, content in old.items()),
        "all of it is back",
    )


def test_who_was_given_room_is_a_writer(place: Workplace) -> None:
    """The opener lives, and is not the one that writes: the child's end decides."""
    path = place.mountpoint / "checkpoint"
    path.write_bytes(b"old")
    descriptor = os.open(path, os.O_RDWR | os.O_TRUNC)
    process = place.python(INHERITED, descriptor, cwd=ROOT, pass_fds=[descriptor])
    wait_for_line(process, b"written")
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)
    place.kill_daemon()
    assert number_of(lambda: os.close(descriptor)) == errno.ENOTCONN
    place.mount()
    assert path.read_bytes() == b"new" * 1000, "its end was a commit point"


def test_a_daemon_that_is_killed_leaves_room_to_who_stores_on(
    place: Workplace, rng: random.Random
) -> None:
    path = place.mountpoint / "file"
    path.write_bytes(b"committed" * 1000)
    process = place.python(OVERWRITE, place.mountpoint / "other", "new", cwd=ROOT)
    wait_for_line(process, b"written")
    place.kill_daemon()
    place.mount()
    data = rng.randbytes(5 * MIB)
    (place.mountpoint / "fresh").write_bytes(data)
    kill(process)
    assert (place.mountpoint / "fresh").read_bytes() == data
    assert path.read_bytes() == b"committed" * 1000


def test_who_waits_in_mid_write_does_not_hold_up_the_others(place: Workplace) -> None:
    path = place.mountpoint / "file"
    process = place.python(OVERWRITE, path, "new", cwd=ROOT)
    wait_for_line(process, b"written")
    (place.mountpoint / "other").write_bytes(bytes(MIB))
    os.sync()
    assert path.read_bytes() == b"new" * 500_000
    kill(process)

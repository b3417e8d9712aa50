"""Both transports serve the same; what only the native one can; many threads on it at once."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cxlfs.control.client import control_request
from cxlfs.daemon.options import TRANSPORTS
from tests.support.mount import MIB, Workplace, wait_for_exit, wait_until

FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE = 1, 2, 16
NOBODY = 65534
_libc = ctypes.CDLL(None, use_errno=True)


def fallocate(descriptor: int, mode: int, offset: int, length: int) -> None:
    if _libc.fallocate(descriptor, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def transport_of(place: Workplace) -> dict[str, object]:
    (message,) = control_request(str(place.mountpoint), "status")
    found = message["transport"]
    assert isinstance(found, dict)
    return found


def count(place: Workplace, name: str) -> int:
    value = transport_of(place)[name]
    assert isinstance(value, int)
    return value


@pytest.fixture(params=TRANSPORTS)
def either(request: pytest.FixtureRequest, unmounted: Workplace) -> Workplace:
    unmounted.mount(f"transport={request.param}")
    assert transport_of(unmounted)["kind"] == request.param
    return unmounted


# --- one behaviour --------------------------------------------------------------------------------


def test_a_file_is_written_read_replaced_and_removed(either: Workplace, rng: random.Random) -> None:
    file = either.mountpoint / "file"
    for size in (0, 1, 4095, 70_000, 3 * MIB + 17):
        data = rng.randbytes(size)
        file.write_bytes(data)
        assert file.read_bytes() == data
        assert file.stat().st_size == size
    file.rename(either.mountpoint / "other")
    (either.mountpoint / "other").unlink()
    assert list(either.mountpoint.iterdir()) == []


def test_a_shared_mapping_and_descriptors_see_each_other(either: Workplace) -> None:
    file = either.mountpoint / "file"
    file.write_bytes(bytes(64 * 1024))
    descriptor = os.open(file, os.O_RDWR)
    with mmap.mmap(descriptor, 64 * 1024) as mapping:
        mapping[5000:5004] = b"mmap"
        mapping.flush()
        assert os.pread(descriptor, 4, 5000) == b"mmap"
        os.pwrite(descriptor, b"pwrite", 9000)
        assert mapping[9000:9006] == b"pwrite"
    os.close(descriptor)
    assert file.read_bytes()[9000:9006] == b"pwrite"


def test_appending_descriptors_do_not_overwrite_each_other(either: Workplace) -> None:
    file = either.mountpoint / "log"
    descriptors = [os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) for _ in range(3)]
    for number in range(90):
        os.write(descriptors[number % 3], b"%02d\n" % number)
    for descriptor in descriptors:
        os.close(descriptor)
    assert file.read_bytes() == b"".join(b"%02d\n" % number for number in range(90))


def test_values_of_extended_attributes(either: Workplace) -> None:
    descriptor = os.open(either.mountpoint / "file", os.O_RDWR | os.O_CREAT)
    value = bytes(range(256)) * 200
    for name in ("user.long", "user.empty"):
        os.setxattr(descriptor, name, value if name == "user.long" else b"")
    assert os.getxattr(descriptor, "user.long") == value
    assert os.getxattr(descriptor, "user.empty") == b""
    room = ctypes.create_string_buffer(len(value))
    assert _libc.fgetxattr(descriptor, b"user.long", None, 0) == len(value)
    assert _libc.fgetxattr(descriptor, b"user.long", room, len(value)) == len(value)
    assert room.raw == value
    assert _libc.fgetxattr(descriptor, b"user.long", room, len(value) - 1) == -1
    assert ctypes.get_errno() == errno.ERANGE
    for name in ("user.other", "system.posix_acl_access"):
        with pytest.raises(OSError) as caught:
            os.getxattr(descriptor, name)
        assert caught.value.errno in (errno.ENODATA, errno.EOPNOTSUPP)
    os.close(descriptor)


OVERWRITE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
for _ in range(20):
    os.write(fd, b"new" * 100_000)
print("written", flush=True)
sys.stdin.read()
"""


def test_a_killed_overwrite_brings_the_old_content_back(either: Workplace) -> None:
    file = either.mountpoint / "checkpoint"
    file.write_bytes(b"old" * 50_000)
    with subprocess.Popen(
        [sys.executable, "-c", OVERWRITE, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: file.read_bytes() == b"old" * 50_000, "the old content is back")
    either.announced.append("reverted")


def test_times_follow_every_write(either: Workplace) -> None:
    file = either.mountpoint / "file"
    with file.open("wb", buffering=0) as stream:
        times = []
        for _ in range(5):
            stream.write(bytes(4096))
            times.append(os.fstat(stream.fileno()).st_mtime_ns)
        os.utime(stream.fileno(), ns=(1, 2_000_000_003))
        assert os.fstat(stream.fileno()).st_mtime_ns == 2_000_000_003
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    assert file.stat().st_mtime_ns == 2_000_000_003


@pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps the bit when it writes")
def test_a_set_user_id_bit_survives_a_write_by_root(either: Workplace) -> None:
    file = either.mountpoint / "program"
    file.write_bytes(b"x")
    file.chmod(0o4755)
    with file.open("r+b", buffering=0) as stream:
        stream.write(b"y")
    assert file.stat().st_mode & 0o4000


def cached_mode(path: Path) -> int:
    """As whoever executes the file finds it: nothing else is asked for, so no older time makes the
    kernel ask the daemon.
    """
    at_current, mode_only, mode_at, space = -100, 2, 28, ctypes.create_string_buffer(256)
    assert _libc.statx(at_current, os.fsencode(path), 0, mode_only, space) == 0
    return int.from_bytes(space.raw[mode_at : mode_at + 2], sys.byteorder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_set_user_id_bit_is_gone_when_the_write_of_another_returns(
    unmounted: Workplace, transport: str
) -> None:
    unmounted.mount("allow_other,suid", f"transport={transport}")
    file = unmounted.mountpoint / "program"
    file.write_bytes(b"x")
    file.chmod(0o777)
    os.seteuid(NOBODY)
    try:
        with file.open("r+b", buffering=0) as stream:
            for _ in range(100):
                os.seteuid(0)
                file.chmod(0o4777)
                assert cached_mode(file) & 0o7777 == 0o4777
                os.seteuid(NOBODY)
                stream.write(b"y")
                assert cached_mode(file) & 0o7777 == 0o777
    finally:
        os.seteuid(0)


# --- what only the native transport can -----------------------------------------------------------


@pytest.mark.large_store
def test_data_goes_past_python(place: Workplace) -> None:
    before = count(place, "writes"), count(place, "reads"), count(place, "calls")
    block = os.urandom(MIB)
    with (place.mountpoint / "file").open("wb", buffering=0) as stream:
        for _ in range(64):
            stream.write(block)
    with (place.mountpoint / "file").open("rb", buffering=0) as stream:
        while stream.read(MIB):
            pass
    calls = count(place, "calls") - before[2]
    assert count(place, "writes") - before[0] >= 48, "but for the first of each lease"
    assert count(place, "reads") - before[1] >= 64
    assert calls < 40


def test_long_reads_go_through_a_pipe(place: Workplace) -> None:
    content = os.urandom(8 * MIB + 12_345)
    (place.mountpoint / "file").write_bytes(content)
    before = count(place, "spliced_reads")
    with (place.mountpoint / "file").open("rb", buffering=0) as stream:
        assert b"".join(iter(lambda: stream.read(MIB // 2), b"")) == content
    wait_until(lambda: count(place, "spliced_reads") - before >= 16, "the reads are counted")


def test_room_is_allocated_punched_and_zeroed(place: Workplace) -> None:
    file = place.mountpoint / "file"
    file.write_bytes(b"x" * 100_000)
    descriptor = os.open(file, os.O_RDWR)
    fallocate(descriptor, 0, 90_000, 30_000)
    assert os.fstat(descriptor).st_size == 120_000
    fallocate(descriptor, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 10_001, 50_000)
    fallocate(descriptor, FALLOC_ZERO_RANGE, 70_000, 5)
    with pytest.raises(OSError) as caught:
        fallocate(descriptor, 0x40, 0, 4096)
    assert caught.value.errno == errno.EOPNOTSUPP
    os.close(descriptor)
    expected = bytearray(b"x" * 100_000 + bytes(20_000))
    expected[10_001:60_001] = bytes(50_000)
    expected[70_000:70_005] = bytes(5)
    assert file.read_bytes() == expected


def test_allocating_goes_no_long_way(place: Workplace) -> None:
    """Before each the kernel asks for file capabilities: that is answered without libfuse too."""
    descriptor = os.open(place.mountpoint / "file", os.O_RDWR | os.O_CREAT)
    before, calls = count(place, "forwarded"), count(place, "calls")
    for number in range(50):
        fallocate(descriptor, 0, number * 4096, 4096)
    assert count(place, "calls") - calls >= 100
    assert count(place, "forwarded") == before
    os.close(descriptor)


def test_holes_are_found(place: Workplace) -> None:
    descriptor = os.open(place.mountpoint / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(descriptor, bytes([1]) * 4096, MIB)
    assert os.lseek(descriptor, 0, os.SEEK_DATA) == MIB
    assert os.lseek(descriptor, MIB, os.SEEK_HOLE) == MIB + 4096
    with pytest.raises(OSError) as caught:
        os.lseek(descriptor, 2 * MIB, os.SEEK_DATA)
    assert caught.value.errno == errno.ENXIO
    os.close(descriptor)


def test_a_copy_moves_no_data(place: Workplace, rng: random.Random) -> None:
    data = rng.randbytes(5 * MIB + 123)
    last, best = place.mountpoint / "last", place.mountpoint / "best"
    last.write_bytes(data)
    free = os.statvfs(place.mountpoint).f_bavail
    with last.open("rb") as source, best.open("wb") as target:
        done = 0
        while done < len(data):
            copied = os.copy_file_range(source.fileno(), target.fileno(), len(data) - done)
            assert copied > 0
            done += copied
    assert best.read_bytes() == data
    block = os.statvfs(place.mountpoint).f_bsize
    assert (free - os.statvfs(place.mountpoint).f_bavail) * block < MIB
    last.unlink()
    assert hashlib.sha256(best.read_bytes()).digest() == hashlib.sha256(data).digest()


FLUSH_BY_CHILD = """
import os, sys, json
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_TRUNC)
os.write(fd, b"new")
if os.fork() == 0:
    os._exit(0)  # closes its copy of the descriptor
os.wait()
print(json.dumps("forked"), flush=True)
sys.stdin.read()
"""


def test_a_child_that_never_wrote_publishes_nothing(place: Workplace) -> None:
    """Its end sends a FLUSH in mid-write; a kill of the writer must still revert."""
    file = place.mountpoint / "checkpoint"
    file.write_bytes(b"old")
    with subprocess.Popen(
        [sys.executable, "-c", FLUSH_BY_CHILD, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == "forked"
        process.kill()
    wait_until(lambda: file.read_bytes() == b"old", "the old content is back")
    place.announced.append("reverted")


# --- many at once ---------------------------------------------------------------------------------


def run_all(*workers: threading.Thread) -> None:
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert not worker.is_alive()


class Failing(threading.Thread):
    """A thread whose failure the test sees."""

    def __init__(self, errors: list[BaseException], target: object, *args: object) -> None:
        super().__init__()
        self._errors, self._call, self._args_given = errors, target, args

    def run(self) -> None:
        try:
            self._call(*self._args_given)  # type: ignore[operator]
        except BaseException as error:  # noqa: BLE001  the main thread reports it
            self._errors.append(error)


def test_writers_of_one_file_keep_their_own_ranges(place: Workplace) -> None:
    file, errors = place.mountpoint / "shards", list[BaseException]()
    file.touch()

    def write(number: int) -> None:
        rng = random.Random(number)
        descriptor = os.open(file, os.O_WRONLY)
        for block in range(60):
            size = rng.choice([4096, 65_536, 300_000])
            os.pwrite(descriptor, bytes([number + 1]) * size, (number * 60 + block) * 300_000)
            if block % 20 == 19:
                os.fsync(descriptor)
        os.close(descriptor)

    run_all(*(Failing(errors, write, number) for number in range(4)))
    assert not errors
    content = file.read_bytes()
    for number in range(4):
        part = content[number * 60 * 300_000 : (number + 1) * 60 * 300_000]
        assert set(part) <= {0, number + 1}


def test_reads_see_whole_writes_while_commits_and_truncations_run(place: Workplace) -> None:
    """Every block is written as one request: a reader finds one value in it, or the end of file."""
    file, errors, stop = place.mountpoint / "busy", list[BaseException](), threading.Event()
    file.write_bytes(bytes(32 * 4096))

    def write(number: int) -> None:
        rng = random.Random(number)
        descriptor = os.open(file, os.O_WRONLY)
        for round_number in range(400):
            value = bytes([1 + (round_number + number) % 250])
            os.pwrite(descriptor, value * 4096, rng.randrange(32) * 4096)
            if round_number % 50 == 0:
                os.fsync(descriptor)
            if round_number % 97 == 0:
                os.ftruncate(descriptor, rng.randrange(1, 33) * 4096)
        os.close(descriptor)

    def read() -> None:
        descriptor = os.open(file, os.O_RDONLY)
        while not stop.is_set():
            for block in range(32):
                data = os.pread(descriptor, 4096, block * 4096)
                assert len(set(data)) <= 1, f"block {block} is torn"
                assert len(data) in (0, 4096)
        os.close(descriptor)

    readers = [Failing(errors, read) for _ in range(2)]
    for reader in readers:
        reader.start()
    run_all(*(Failing(errors, write, number) for number in range(2)))
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not errors, errors


def test_files_are_unlinked_and_replaced_under_their_readers(place: Workplace) -> None:
    errors, stop = list[BaseException](), threading.Event()
    file = place.mountpoint / "checkpoint"
    file.write_bytes(bytes([0]) * MIB)

    def replace() -> None:
        for version in range(1, 60):
            fresh = place.mountpoint / "fresh"
            fresh.write_bytes(bytes([version]) * MIB)
            fresh.rename(file)

    def read() -> None:
        while not stop.is_set():
            data = file.read_bytes()
            assert len(data) == MIB
            assert len(set(data)) == 1

    readers = [Failing(errors, read) for _ in range(2)]
    for reader in readers:
        reader.start()
    run_all(Failing(errors, replace))
    stop.set()
    for reader in readers:
        reader.join(60)
    assert not errors, errors


def fill_until_refused(path: Path) -> int | None:
    """The errno of the write, or close, that ended it."""
    try:
        with path.open("wb", buffering=0) as stream:
            while True:
                stream.write(bytes(MIB))
    except OSError as error:
        return error.errno


def test_a_full_store_is_freed_while_writers_wait_for_nobody(place: Workplace) -> None:
    """ENOSPC comes at once, and an unlink meanwhile is served."""
    errors = list[BaseException]()

    def fill(number: int) -> None:
        path = place.mountpoint / f"filler-{number}"
        for _ in range(3):
            assert fill_until_refused(path) == errno.ENOSPC
            path.unlink()

    run_all(*(Failing(errors, fill, number) for number in range(2)))
    assert not errors, errors
    place.announced.append("no-space")


def test_a_stop_under_load_loses_no_closed_file(unmounted: Workplace) -> None:
    unmounted.mount()
    closed: list[Path] = []
    done = threading.Event()

    def write() -> None:
        number = 0
        while not done.is_set():
            path = unmounted.mountpoint / f"file-{number:05d}"
            try:
                path.write_bytes(bytes([number % 251]) * 200_000)
            except OSError:
                return
            closed.append(path)
            number += 1

    daemon = os.pidfd_open(unmounted.daemon_pid)
    writer = threading.Thread(target=write)
    writer.start()
    wait_until(lambda: len(closed) > 20, "some files are written")
    subprocess.run(["umount", "-l", str(unmounted.mountpoint)], check=True)
    done.set()
    writer.join(60)
    wait_for_exit(daemon)
    names = [path.name for path in closed]
    unmounted.mount()
    found = {path.name for path in unmounted.mountpoint.iterdir()}
    assert len(set(names) & found) >= 20
    for name in found:
        data = (unmounted.mountpoint / name).read_bytes()
        assert data == bytes([int(name[5:]) % 251]) * 200_000


def test_a_lock_is_held_across_processes(place: Workplace) -> None:
    file = place.mountpoint / "locked"
    file.touch()
    with file.open("r+b") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        code = (
            "import fcntl,sys\n"
            "f = open(sys.argv[1], 'r+b')\n"
            "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except BlockingIOError: print('held')"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
        )
    assert out.stdout == "held\n"

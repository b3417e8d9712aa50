"""Files through a mount: contents, sizes, times, modes, special files."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mount import MIB, Workplace

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def test_what_is_written_is_read_back_and_survives_a_remount(place: Workplace) -> None:
    data = os.urandom(3 * MIB + 17)
    path = place.mountpoint / "checkpoint"
    path.write_bytes(data)
    assert path.read_bytes() == data
    place.remount()
    assert path.read_bytes() == data


@pytest.mark.large_store
def test_a_large_file_is_complete(place: Workplace) -> None:
    path = place.mountpoint / "large"
    digest = hashlib.sha256()
    piece = os.urandom(MIB)
    with path.open("wb") as file:
        for index in range(80):
            part = index.to_bytes(8, "little") + piece[8:]
            digest.update(part)
            file.write(part)
    place.remount()
    read = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(MIB - 4096):
            read.update(part)
    assert read.digest() == digest.digest()
    assert path.stat().st_blocks * 512 >= 80 * MIB


def test_overwriting_in_the_middle_keeps_the_rest(mnt: Path) -> None:
    path = mnt / "file"
    path.write_bytes(b"a" * 10_000)
    with path.open("r+b") as file:
        file.seek(4000)
        file.write(b"b" * 3000)
        file.seek(0)
        assert file.read() == b"a" * 4000 + b"b" * 3000 + b"a" * 3000
    assert path.read_bytes() == b"a" * 4000 + b"b" * 3000 + b"a" * 3000


def test_every_access_mode_sees_what_the_others_wrote(mnt: Path) -> None:
    """Direct (write-only) and cached (other) descriptors of one file, open at the same time."""
    path = mnt / "file"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    both = os.open(path, os.O_RDWR)
    reader = os.open(path, os.O_RDONLY)
    for round_number in range(20):
        os.pwrite(writer, b"%06d" % round_number, 100)
        assert os.pread(reader, 6, 100) == b"%06d" % round_number
        assert os.pread(both, 6, 100) == b"%06d" % round_number
        os.pwrite(both, b"%06d" % (round_number + 500), 102)
        assert os.pread(reader, 8, 100) == b"00%06d" % (round_number + 500)
        os.ftruncate(writer, 100)
        assert os.pread(reader, 100, 100) == b""
    for descriptor in (writer, both, reader):
        os.close(descriptor)


def test_truncation_cuts_and_extends_with_zeros(mnt: Path) -> None:
    path = mnt / "file"
    path.write_bytes(b"x" * 5000)
    os.truncate(path, 100)
    assert path.read_bytes() == b"x" * 100
    os.truncate(path, 300)
    assert path.read_bytes() == b"x" * 100 + bytes(200)
    with path.open("r+b") as file:
        file.truncate(50)
        file.truncate(60)
    assert path.read_bytes() == b"x" * 50 + bytes(10)


def test_sparse_files_read_zeros_and_take_little_space(place: Workplace) -> None:
    path = place.mountpoint / "sparse"
    with path.open("wb") as file:
        file.seek(500 * MIB)
        file.write(b"end")
    assert path.stat().st_size == 500 * MIB + 3
    assert path.stat().st_blocks * 512 < MIB
    with path.open("rb") as file:
        assert file.read(MIB) == bytes(MIB)
        file.seek(500 * MIB - 10)
        assert file.read() == bytes(10) + b"end"


def test_append_writes_at_the_end_whoever_appends(mnt: Path) -> None:
    path = mnt / "events"
    one = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    two = os.open(path, os.O_WRONLY | os.O_APPEND)
    for index in range(50):
        os.write(one if index % 2 else two, b"%04d\n" % index)
    os.close(one)
    os.close(two)
    assert path.read_bytes() == b"".join(b"%04d\n" % index for index in range(50))


def test_shell_redirection(mnt: Path) -> None:
    script = f"cd {mnt}; echo one > out; echo two >> out; (echo three; echo four) >> out; cat < out"
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert done.stdout == b"one\ntwo\nthree\nfour\n"
    assert (mnt / "out").read_bytes() == done.stdout


def test_copying_within_the_mount_and_past_the_page_cache(mnt: Path) -> None:
    """sendfile, copy_file_range, and O_DIRECT, which the kernel handles without us."""
    data = os.urandom(2 * MIB + 4096)
    (mnt / "a").write_bytes(data)
    shutil.copyfile(mnt / "a", mnt / "b")
    subprocess.run(["cp", "--reflink=never", mnt / "a", mnt / "c"], check=True)
    copy = ["dd", f"if={mnt}/a", f"of={mnt}/d", "bs=512K", "iflag=direct", "oflag=direct"]
    subprocess.run(copy, check=True, stderr=subprocess.DEVNULL)
    for name in "bcd":
        assert (mnt / name).read_bytes() == data, name


def test_an_unlinked_file_lives_as_long_as_it_is_open(place: Workplace) -> None:
    path = place.mountpoint / "temporary"
    with path.open("w+b") as file:
        file.write(b"before")
        file.flush()
        path.unlink()
        assert not path.exists()
        file.write(b" and after")
        file.seek(0)
        assert file.read() == b"before and after"
        assert os.fstat(file.fileno()).st_nlink == 0
    assert list(place.mountpoint.iterdir()) == []


def test_a_file_replaced_while_open_keeps_its_content(mnt: Path) -> None:
    (mnt / "file").write_bytes(b"old" * 1000)
    with (mnt / "file").open("rb") as reader:
        (mnt / "new").write_bytes(b"new")
        (mnt / "new").rename(mnt / "file")
        assert reader.read() == b"old" * 1000
    assert (mnt / "file").read_bytes() == b"new"


def test_exclusive_creation(mnt: Path) -> None:
    (mnt / "file").touch()
    with pytest.raises(FileExistsError):
        os.open(mnt / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def test_reading_a_write_only_descriptor_fails(mnt: Path) -> None:
    descriptor = os.open(mnt / "file", os.O_CREAT | os.O_WRONLY, 0o600)
    with pytest.raises(OSError) as caught:
        os.read(descriptor, 10)
    assert caught.value.errno == errno.EBADF
    os.close(descriptor)


def test_times_are_kept_to_the_nanosecond(place: Workplace) -> None:
    path = place.mountpoint / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(1_234_567_890_123_456_789, 987_654_321_987_654_321))
    place.remount()
    status = path.stat()
    assert status.st_atime_ns == 1_234_567_890_123_456_789
    assert status.st_mtime_ns == 987_654_321_987_654_321
    before = status.st_mtime_ns
    os.utime(path)  # now, by the kernel's UTIME_NOW
    assert path.stat().st_mtime_ns > before


def test_changes_move_the_times_that_posix_says(mnt: Path) -> None:
    path = mnt / "file"
    path.write_bytes(b"x")
    os.utime(path, ns=(1, 1))
    first = path.stat()
    path.chmod(0o600)
    second = path.stat()
    assert second.st_mtime_ns == 1
    assert second.st_ctime_ns > first.st_ctime_ns
    with path.open("ab") as file:
        file.write(b"y")
    third = path.stat()
    assert third.st_mtime_ns > 1
    assert third.st_ctime_ns > second.st_ctime_ns
    assert third.st_atime_ns == 1


def test_modes_follow_the_umask_and_chmod(place: Workplace) -> None:
    mnt = place.mountpoint
    old = os.umask(0o027)
    try:
        os.close(os.open(mnt / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        (mnt / "directory").mkdir(mode=0o777)
        os.mkfifo(mnt / "fifo", 0o666)
    finally:
        os.umask(old)
    (mnt / "private").touch()
    (mnt / "private").chmod(0o4711)
    place.remount()
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in mnt.iterdir()}
    assert modes == {"file": 0o640, "directory": 0o750, "fifo": 0o640, "private": 0o4711}


def test_stat_says_how_large_writes_should_be(mnt: Path) -> None:
    (mnt / "file").touch()
    assert (mnt / "file").stat().st_blksize == MIB


def test_fifos_and_sockets(mnt: Path) -> None:
    os.mkfifo(mnt / "fifo")
    assert stat.S_ISFIFO((mnt / "fifo").stat().st_mode)
    os.mknod(mnt / "socket", stat.S_IFSOCK | 0o600)
    assert stat.S_ISSOCK((mnt / "socket").stat().st_mode)
    os.mknod(mnt / "file", stat.S_IFREG | 0o644)
    assert (mnt / "file").read_bytes() == b""


@needs_root
def test_device_nodes(place: Workplace) -> None:
    path = place.mountpoint / "null"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(place.mountpoint / "disk", stat.S_IFBLK | 0o600, os.makedev(259, 70_000))
    place.remount()
    assert path.stat().st_rdev == os.makedev(1, 3)
    assert (place.mountpoint / "disk").stat().st_rdev == os.makedev(259, 70_000)
    with pytest.raises(PermissionError):  # nodev: a store is no place for devices that work
        path.open("rb")


@needs_root
def test_writing_and_changing_the_owner_take_set_id_bits_away(mnt: Path) -> None:
    mnt.chmod(0o777)
    path = mnt / "program"
    path.write_bytes(b"x")
    path.chmod(0o6777)
    done = subprocess.run(["sh", "-c", f"echo y >> {path}"], check=False, user=65534)
    assert done.returncode != 0  # nobody may not enter a mount without allow_other
    with path.open("ab") as file:
        file.write(b"z")
    assert stat.S_IMODE(path.stat().st_mode) == 0o6777  # root may
    os.chown(path, 1000, 1000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777


@needs_root
@pytest.mark.parametrize("options", [[], ["default_permissions"]])
def test_root_may_do_all_but_execute_what_nobody_may(
    unmounted: Workplace, options: list[str]
) -> None:
    unmounted.mount(*options)
    path = unmounted.mountpoint / "directory" / "program"
    path.parent.mkdir()
    path.write_bytes(b"#!/bin/sh\nexit 7\n")
    path.chmod(0)
    path.parent.chmod(0)
    for mode in (os.F_OK, os.R_OK, os.W_OK, os.R_OK | os.W_OK):
        assert os.access(path, mode)
    assert os.access(path.parent, os.X_OK)
    assert not os.access(path, os.X_OK)
    assert not os.access(path, os.R_OK | os.X_OK)
    with pytest.raises(PermissionError):
        subprocess.run([path], check=False)
    with path.open("r+b") as file:
        file.write(b"#!")
    path.chmod(0o001)
    assert os.access(path, os.X_OK)
    assert subprocess.run([path], check=False).returncode == 7
    os.chdir(path.parent)
    os.chdir("/")
    assert not os.access(path.parent / "missing", os.F_OK)


@needs_root
def test_a_write_by_another_user_takes_set_id_bits_away(unmounted: Workplace) -> None:
    unmounted.mount("allow_other")
    path = unmounted.mountpoint / "program"
    path.write_bytes(b"x")
    for mode in (0o4777, 0o2777, 0o6777):
        path.chmod(mode)
        for change in (f"echo y >> {path}", f": > {path}", f"truncate -s 1 {path}"):
            path.chmod(mode)
            subprocess.run(["sh", "-c", change], check=True, user=65534, group=65534)
            assert stat.S_IMODE(path.stat().st_mode) == 0o777, change


FALLOCATE = "import os, sys; os.posix_fallocate(os.open(sys.argv[1], os.O_WRONLY), 0, 100)"


@needs_root
@pytest.mark.parametrize("change", ["echo y >> {}", ": > {}", "truncate -s 1 {}", FALLOCATE])
@pytest.mark.parametrize("member", ["no", "group", "supplementary"])
def test_only_members_of_its_group_leave_a_file_the_set_group_id_mark(
    unmounted: Workplace, change: str, member: str
) -> None:
    """As file systems of the kernel do (setattr_should_drop_sgid): without group execution."""
    unmounted.mount("allow_other")
    path = unmounted.mountpoint / "data"
    path.write_bytes(b"x")
    os.chown(path, 0, 1234)
    path.chmod(0o6666)
    command = ["sh", "-c", change.format(path)]
    if change == FALLOCATE:
        command = ["python3", "-c", change, path]
    subprocess.run(
        command,
        check=True,
        user=65534,
        group=1234 if member == "group" else 65534,
        extra_groups=[1234, 77] if member == "supplementary" else [77],
    )
    assert stat.S_IMODE(path.stat().st_mode) == (0o666 if member == "no" else 0o2666)


@needs_root
def test_directories_with_the_set_group_id_bit_pass_their_group_on(mnt: Path) -> None:
    shared = mnt / "shared"
    shared.mkdir()
    os.chown(shared, 0, 1234)
    shared.chmod(0o2775)
    (shared / "file").touch()
    (shared / "below").mkdir()
    (shared / "link").symlink_to("file")
    assert (shared / "file").stat().st_gid == 1234
    assert (shared / "below").stat().st_gid == 1234
    assert (shared / "below").stat().st_mode & stat.S_ISGID
    assert (shared / "link").lstat().st_gid == 1234


def test_execve_closes_files(place: Workplace) -> None:
    """A child's copies, and those of the program itself, in the middle of execve(2)."""
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)\n"
        "os.write(fd, b'all')\n"
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)\n"
        "os.execv('/bin/true', ['true'])\n"
    )
    path = place.mountpoint / "file"
    subprocess.run([sys.executable, "-c", code, path], check=True, timeout=20)
    assert path.read_bytes() == b"all"

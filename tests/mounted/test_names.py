"""Names through a mount: rename in all its forms, links, directories under change, attributes."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from cxlfs.native import crc32c
from tests.support.mount import MIB, Workplace

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE, RENAME_WHITEOUT = 1, 2, 4


def rename2(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, bytes(source), AT_FDCWD, bytes(target), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def test_rename_replaces_a_file(place: Workplace) -> None:
    mnt = place.mountpoint
    (mnt / "a").write_bytes(b"a")
    (mnt / "b").write_bytes(b"b")
    (mnt / "a").rename(mnt / "b")
    assert (mnt / "b").read_bytes() == b"a"
    assert not (mnt / "a").exists()
    place.remount()
    assert [path.name for path in mnt.iterdir()] == ["b"]


def test_rename_of_a_directory_moves_what_is_below(place: Workplace) -> None:
    mnt = place.mountpoint
    (mnt / "step.tmp" / "rank0").mkdir(parents=True)
    (mnt / "step.tmp" / "rank0" / "weights").write_bytes(b"w" * 100_000)
    (mnt / "done").mkdir()
    (mnt / "step.tmp").rename(mnt / "done" / "step")
    assert (mnt / "done" / "step" / "rank0" / "weights").read_bytes() == b"w" * 100_000
    assert not (mnt / "step.tmp").exists()
    place.remount()
    assert (mnt / "done" / "step" / "rank0" / "weights").stat().st_size == 100_000


def test_rename_replaces_an_empty_directory_only(mnt: Path) -> None:
    (mnt / "a").mkdir()
    (mnt / "empty").mkdir()
    (mnt / "full" / "x").mkdir(parents=True)
    (mnt / "a").rename(mnt / "empty")
    with pytest.raises(OSError) as caught:
        (mnt / "empty").rename(mnt / "full")
    assert caught.value.errno == errno.ENOTEMPTY


def test_rename_refuses_the_impossible(mnt: Path) -> None:
    (mnt / "directory" / "below").mkdir(parents=True)
    (mnt / "file").touch()
    with pytest.raises(OSError) as caught:
        (mnt / "directory").rename(mnt / "directory" / "below" / "x")
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(IsADirectoryError):
        (mnt / "file").rename(mnt / "directory")
    with pytest.raises(NotADirectoryError):
        (mnt / "directory").rename(mnt / "file")


def test_rename_without_replacing(mnt: Path) -> None:
    (mnt / "a").write_bytes(b"a")
    (mnt / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        rename2(mnt / "a", mnt / "b", RENAME_NOREPLACE)
    assert (mnt / "b").read_bytes() == b"b"
    rename2(mnt / "a", mnt / "c", RENAME_NOREPLACE)
    assert (mnt / "c").read_bytes() == b"a"


def test_rename_exchanges(place: Workplace) -> None:
    mnt = place.mountpoint
    (mnt / "file").write_bytes(b"file")
    (mnt / "directory").mkdir()
    (mnt / "directory" / "inside").touch()
    rename2(mnt / "file", mnt / "directory", RENAME_EXCHANGE)
    place.remount()
    assert (mnt / "directory").read_bytes() == b"file"
    assert (mnt / "file" / "inside").exists()
    with pytest.raises(FileNotFoundError):
        rename2(mnt / "file", mnt / "none", RENAME_EXCHANGE)


def test_rename_refuses_whiteouts(mnt: Path) -> None:
    (mnt / "a").touch()
    with pytest.raises(OSError) as caught:
        rename2(mnt / "a", mnt / "b", RENAME_WHITEOUT)
    assert caught.value.errno == errno.EINVAL


def test_hard_links_share_everything(place: Workplace) -> None:
    mnt = place.mountpoint
    (mnt / "one").write_bytes(b"1")
    os.link(mnt / "one", mnt / "two")
    with (mnt / "two").open("ab") as file:
        file.write(b"2")
    assert (mnt / "one").read_bytes() == b"12"
    assert (mnt / "one").stat().st_nlink == 2
    place.remount()
    assert (mnt / "one").stat().st_ino == (mnt / "two").stat().st_ino
    (mnt / "one").unlink()
    assert (mnt / "two").stat().st_nlink == 1
    assert (mnt / "two").read_bytes() == b"12"
    (mnt / "directory").mkdir()
    with pytest.raises(PermissionError):
        os.link(mnt / "directory", mnt / "no")


def test_symbolic_links(place: Workplace) -> None:
    mnt = place.mountpoint
    target = "x" * 4000
    (mnt / "long").symlink_to(target)
    (mnt / "file").write_bytes(b"here")
    (mnt / "last").symlink_to("file")
    place.remount()
    assert (mnt / "long").readlink() == Path(target)
    assert (mnt / "last").read_bytes() == b"here"
    assert (mnt / "last").lstat().st_size == 4
    (mnt / "last").unlink()
    assert (mnt / "file").exists()


def test_names_have_255_bytes_at_most(mnt: Path) -> None:
    (mnt / ("n" * 255)).touch()
    (mnt / os.fsdecode(bytes(range(1, 47)))).touch()  # any byte but NUL and the slash
    assert len(list(mnt.iterdir())) == 2
    for action in (Path.touch, Path.mkdir, Path.stat, Path.unlink, Path.rmdir):
        with pytest.raises(OSError) as caught:
            action(mnt / ("n" * 256))
        assert caught.value.errno == errno.ENAMETOOLONG
    with pytest.raises(OSError) as caught:
        (mnt / ("n" * 255)).rename(mnt / ("m" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_name_that_was_missing_is_seen_when_it_appears(mnt: Path) -> None:
    """The kernel remembers absent names: every way of making one must correct it."""
    other = mnt / "other"
    other.write_bytes(b"x")
    makers = {
        "created": lambda path: path.touch(),
        "made": lambda path: path.mkdir(),
        "linked": lambda path: os.link(other, path),
        "symbolic": lambda path: path.symlink_to("other"),
        "node": os.mkfifo,
        "renamed": other.rename,
    }
    for name, make in makers.items():
        path = mnt / name
        assert not path.exists()
        make(path)
        assert path.lstat()
    for path in mnt.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
        assert not os.path.lexists(path)


def test_directories_count_their_links(mnt: Path) -> None:
    assert mnt.stat().st_nlink == 2
    (mnt / "a" / "b").mkdir(parents=True)
    assert mnt.stat().st_nlink == 3
    assert (mnt / "a").stat().st_nlink == 3
    (mnt / "a" / "b").rename(mnt / "b")
    assert (mnt / "a").stat().st_nlink == 2
    assert mnt.stat().st_nlink == 4
    (mnt / "b").rmdir()
    assert mnt.stat().st_nlink == 3


def test_only_empty_directories_are_removed(mnt: Path) -> None:
    (mnt / "a" / "b").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        (mnt / "a").rmdir()
    assert caught.value.errno == errno.ENOTEMPTY
    (mnt / "file").touch()
    with pytest.raises(NotADirectoryError):
        (mnt / "file").rmdir()
    with pytest.raises(IsADirectoryError):
        (mnt / "a").unlink()


def test_a_removed_directory_that_is_open_is_empty(mnt: Path) -> None:
    (mnt / "gone").mkdir()
    descriptor = os.open(mnt / "gone", os.O_RDONLY)
    (mnt / "gone").rmdir()
    assert os.listdir(descriptor) == []  # noqa: PTH208  a descriptor has no path
    with pytest.raises(FileNotFoundError):
        os.mkdir("x", dir_fd=descriptor)
    os.close(descriptor)


def test_a_large_directory_can_be_listed_while_it_changes(mnt: Path) -> None:
    """2000 entries: more than one reply holds. Names that stay are seen exactly once."""
    names = {f"file-{index:05d}" for index in range(2000)}
    for name in sorted(names):
        os.mknod(mnt / name)
    removed, seen = set(), []
    with os.scandir(mnt) as entries:
        for count, entry in enumerate(entries):
            seen.append(entry.name)
            if count % 5 == 0:
                victim = f"file-{(count * 7 + 1000) % 2000:05d}"
                (mnt / victim).unlink(missing_ok=True)
                removed.add(victim)
                (mnt / f"new-{count}").touch()
    old = [name for name in seen if name.startswith("file-")]
    assert len(old) == len(set(old))
    assert names - removed <= set(old)
    assert {path.name for path in mnt.glob("file-*")} == names - removed
    assert len(list(mnt.glob("new-*"))) == len(range(0, len(seen), 5))


def test_a_listing_can_be_restarted_and_continued(mnt: Path) -> None:
    for index in range(300):
        (mnt / f"{index:03d}").touch()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(libc.opendir(bytes(mnt)))

    def rest() -> list[bytes]:
        names = []
        while entry := libc.readdir(stream):
            names.append(ctypes.string_at(entry + 19))  # d_name of struct dirent on 64 bits
        return names

    for _ in range(100):
        libc.readdir(stream)
    place = ctypes.c_long(libc.telldir(stream))
    second_half = rest()
    libc.seekdir(stream, place)
    assert rest() == second_half
    libc.rewinddir(stream)
    everything = rest()
    libc.closedir(stream)
    assert everything[-len(second_half) :] == second_half
    assert len(everything) == 302
    assert everything[:2] == [b".", b".."]


def test_dot_dot_names_the_directory_above(mnt: Path) -> None:
    (mnt / "a" / "b").mkdir(parents=True)
    above = os.stat(f"{mnt}/a/b/..")  # noqa: PTH116  not to be simplified
    assert above.st_ino == (mnt / "a").stat().st_ino


def test_extended_attributes(place: Workplace) -> None:
    path = place.mountpoint / "file"
    path.touch()
    os.setxattr(path, "user.note", b"first")
    os.setxattr(path, "user.large", bytes(range(256)) * 16)
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.note", b"x", os.XATTR_CREATE)
    with pytest.raises(OSError) as caught:
        os.setxattr(path, "user.other", b"x", os.XATTR_REPLACE)
    assert caught.value.errno == errno.ENODATA
    os.setxattr(path, "user.note", b"second", os.XATTR_REPLACE)
    place.remount()
    assert os.getxattr(path, "user.note") == b"second"
    assert os.getxattr(path, "user.large") == bytes(range(256)) * 16
    assert {"user.note", "user.large"} <= set(os.listxattr(path))
    os.removexattr(path, "user.note")
    with pytest.raises(OSError) as caught:
        os.getxattr(path, "user.note")
    assert caught.value.errno == errno.ENODATA
    assert os.getxattr(path, "user.cxlfs.state") == b"complete"


def test_the_checksum_of_a_whole_file(place: Workplace) -> None:
    """Of what was written, of pieces of it in another order, and none while it is being written.
    The pieces are parts of 100 chunks, which are read: more than one step of the daemon's.
    """
    path, mixed = place.mountpoint / "file", place.mountpoint / "mixed"
    data = os.urandom(8 * MIB + 17)
    path.write_bytes(data)
    expected = bytearray(8 * MIB)
    with path.open("rb") as source, mixed.open("wb") as target:
        for piece in range(100):
            start, there = piece * 80_000 + 1, (99 - piece) * 80_000
            count = os.copy_file_range(source.fileno(), target.fileno(), 5000, start, there)
            expected[there : there + count] = data[start : start + count]
        target.truncate(8 * MIB)
        with pytest.raises(OSError) as caught:
            os.getxattr(mixed, "user.cxlfs.crc32c")
        assert caught.value.errno == errno.ENODATA
    for _ in range(2):
        assert os.getxattr(path, "user.cxlfs.crc32c") == b"%08x" % crc32c(data)
        assert mixed.read_bytes() == expected
        assert os.getxattr(mixed, "user.cxlfs.crc32c") == b"%08x" % crc32c(expected)
        assert os.listxattr(path) == []
        place.remount()


def test_access_control_lists_are_refused_not_ignored(mnt: Path) -> None:
    (mnt / "file").touch()
    acl = bytes.fromhex("0200000001000600ffffffff04000400ffffffff20000400ffffffff")
    with pytest.raises(OSError) as caught:
        os.setxattr(mnt / "file", "system.posix_acl_access", acl)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_fsync_of_files_and_directories(mnt: Path) -> None:
    with (mnt / "file").open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        os.fdatasync(file.fileno())
    directory = os.open(mnt, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)

"""What each handler asks of the store, and what it tells the kernel."""

from __future__ import annotations

import errno
import os
import stat

import pyfuse3
import pytest

from cxlfs.fuse.attributes import CACHE_SECONDS
from tests.support.fuse_api import ROOT, Context, Kernel, error_number, finish


def test_a_missing_name_may_be_remembered(kernel: Kernel) -> None:
    entry = kernel.lookup(b"none")
    assert entry.st_ino == 0
    assert entry.entry_timeout == CACHE_SECONDS
    assert len(kernel.operations.lookups) == 0


def test_names_below_what_is_no_directory(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    with error_number(errno.ENOTDIR):
        kernel.lookup(b"x", parent=ino)
    with error_number(errno.ENOENT):
        kernel.lookup(b"x", parent=9999)


def test_every_answer_with_an_inode_counts_one_lookup(kernel: Kernel) -> None:
    operations, context = kernel.operations, kernel.context
    ino, handle = kernel.create(b"file")
    assert operations.lookups[ino] == 1
    kernel.lookup(b"file")
    finish(operations.link(ino, ROOT, b"link", context))
    assert operations.lookups[ino] == 3
    kernel.getattr(ino)
    kernel.setattr(ino, mode=0o600)
    assert operations.lookups[ino] == 3
    for entry in (
        finish(operations.mkdir(ROOT, b"directory", stat.S_IFDIR | 0o755, context)),
        finish(operations.mknod(ROOT, b"fifo", stat.S_IFIFO | 0o644, 0, context)),
        finish(operations.symlink(ROOT, b"symlink", b"target", context)),
    ):
        assert operations.lookups[entry.st_ino] == 1
    kernel.close(handle)


def test_an_inode_lives_until_the_kernel_forgets_it(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"content")
    kernel.lookup(b"file")
    finish(kernel.operations.unlink(ROOT, b"file", kernel.context))
    assert kernel.getattr(ino).st_nlink == 0
    finish(kernel.operations.forget([(ino, 1)]))
    assert kernel.read(ino) == b"content"
    finish(kernel.operations.forget([(ino, 1)]))
    with error_number(errno.ENOENT):
        kernel.getattr(ino)


def test_an_open_file_outlives_its_last_lookup(kernel: Kernel) -> None:
    ino, handle = kernel.create(b"file")
    finish(kernel.operations.write(handle, 0, b"content"))
    finish(kernel.operations.unlink(ROOT, b"file", kernel.context))
    finish(kernel.operations.forget([(ino, 1)]))
    assert bytes(finish(kernel.operations.read(handle, 0, 100))) == b"content"
    kernel.close(handle)
    with error_number(errno.ENOENT):
        kernel.getattr(ino)


def test_the_root_may_be_forgotten(kernel: Kernel) -> None:
    finish(kernel.operations.forget([(ROOT, 5)]))
    assert kernel.getattr(ROOT).st_ino == ROOT


def test_forgetting_too_much_is_a_defect(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    finish(kernel.operations.forget([(ino, 3)]))
    assert kernel.operations.failures.counts == {"forget: InvariantError": 1}
    assert kernel.store.read_only
    kernel.operations.failures.counts.clear()
    kernel.operations.lookups.forget_all()


def test_attributes_reach_the_kernel(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", bytes(5000))
    entry = kernel.setattr(ino, mode=0o640, uid=7, gid=8, atime=3_000_000_001, mtime=-1_000_000_000)
    assert (entry.st_mode, entry.st_uid, entry.st_gid) == (stat.S_IFREG | 0o640, 7, 8)
    assert (entry.st_atime_ns, entry.st_mtime_ns) == (3_000_000_001, -1_000_000_000)
    assert entry.st_size == 5000
    assert entry.st_blocks * 512 >= 5000
    assert entry.st_blksize == 1 << 20
    assert entry.attr_timeout == entry.entry_timeout == CACHE_SECONDS
    assert entry.st_ino == ino
    assert entry.generation == 0


def test_nothing_to_set_is_no_error(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    assert kernel.setattr(ino).st_ino == ino


def test_truncation_through_a_handle(kernel: Kernel) -> None:
    ino, handle = kernel.create(b"file")
    finish(kernel.operations.write(handle, 0, bytes(1000)))
    assert kernel.setattr(ino, handle=handle, size=10).st_size == 10
    kernel.close(handle)
    assert kernel.setattr(ino, size=20).st_size == 20
    assert kernel.read(ino) == bytes(20)


def test_creating_what_exists_opens_it_unless_exclusive(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"content")
    again, handle = kernel.create(b"file")
    assert again == ino
    assert kernel.operations.lookups[ino] == 2
    assert bytes(finish(kernel.operations.read(handle, 0, 100))) == b"content"
    with error_number(errno.EEXIST):
        kernel.create(b"file", os.O_RDWR | os.O_EXCL)
    kernel.close(handle)


def test_opening_with_o_trunc_empties_the_file(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"content")
    handle = kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh
    assert kernel.getattr(ino).st_size == 0
    kernel.close(handle)
    assert kernel.read(ino) == b""


def test_bad_handles_are_errors(kernel: Kernel) -> None:
    for attempt in (
        kernel.operations.read(99, 0, 1),
        kernel.operations.write(99, 0, b"x"),
        kernel.operations.flush(99),
        kernel.operations.fsync(99, False),
        kernel.operations.release(99),
        kernel.operations.releasedir(99),
        kernel.operations.fsyncdir(99, False),
    ):
        with error_number(errno.EBADF):
            finish(attempt)


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (pyfuse3.RENAME_EXCHANGE | pyfuse3.RENAME_NOREPLACE, errno.EINVAL),
        (4, errno.EINVAL),  # RENAME_WHITEOUT
        (pyfuse3.RENAME_NOREPLACE, errno.EEXIST),
    ],
)
def test_rename_flags(kernel: Kernel, flags: int, number: int) -> None:
    kernel.write_file(b"a", b"a")
    kernel.write_file(b"b", b"b")
    with error_number(number):
        finish(kernel.operations.rename(ROOT, b"a", ROOT, b"b", flags, kernel.context))
    assert kernel.read(kernel.lookup(b"b").st_ino) == b"b"


def test_rename_exchanges_and_replaces(kernel: Kernel) -> None:
    a, b = kernel.write_file(b"a", b"a"), kernel.write_file(b"b", b"b")
    rename, context = kernel.operations.rename, kernel.context
    finish(rename(ROOT, b"a", ROOT, b"b", pyfuse3.RENAME_EXCHANGE, context))
    assert (kernel.lookup(b"a").st_ino, kernel.lookup(b"b").st_ino) == (b, a)
    finish(rename(ROOT, b"a", ROOT, b"b", 0, context))
    assert kernel.lookup(b"b").st_ino == b
    assert kernel.lookup(b"a").st_ino == 0


@pytest.mark.parametrize("length", [255, 256])
def test_the_limit_of_names(kernel: Kernel, length: int) -> None:
    name, context = b"n" * length, kernel.context
    operations = kernel.operations
    attempts = [
        lambda: operations.lookup(ROOT, name, context),
        lambda: operations.mkdir(ROOT, name, 0o755, context),
        lambda: operations.rmdir(ROOT, name, context),
        lambda: operations.create(ROOT, name, 0o644, os.O_RDONLY, context),
        lambda: operations.unlink(ROOT, name, context),
        lambda: operations.symlink(ROOT, name, b"x", context),
        lambda: operations.rename(ROOT, name, ROOT, name, 0, context),
    ]
    for attempt in attempts:
        if length <= 255:
            finish(attempt())  # type: ignore[no-untyped-call]
        else:
            with error_number(errno.ENAMETOOLONG):
                finish(attempt())  # type: ignore[no-untyped-call]
    for handle in list(operations.files):
        kernel.close(handle)


def test_device_numbers_belong_to_devices_only(kernel: Kernel) -> None:
    operations, context = kernel.operations, kernel.context
    mknod = operations.mknod
    assert finish(mknod(ROOT, b"a", stat.S_IFCHR | 0o600, 0x103, context)).st_rdev == 0x103
    assert finish(mknod(ROOT, b"b", stat.S_IFBLK | 0o600, 0x801, context)).st_rdev == 0x801
    assert finish(mknod(ROOT, b"c", stat.S_IFIFO | 0o600, 0x999, context)).st_rdev == 0


def test_symbolic_links(kernel: Kernel) -> None:
    entry = finish(kernel.operations.symlink(ROOT, b"link", b"a/b c", kernel.context))
    assert finish(kernel.operations.readlink(entry.st_ino, kernel.context)) == b"a/b c"
    assert entry.st_size == 5
    ino = kernel.write_file(b"file", b"x")
    with error_number(errno.EINVAL):
        finish(kernel.operations.readlink(ino, kernel.context))


def test_new_inodes_belong_to_who_made_them(kernel: Kernel) -> None:
    kernel.context = Context(uid=1000, gid=100)
    entry = finish(kernel.operations.mkdir(ROOT, b"d", stat.S_IFDIR | 0o755, kernel.context))
    assert (entry.st_uid, entry.st_gid) == (1000, 100)


def test_statfs(kernel: Kernel) -> None:
    data = finish(kernel.operations.statfs(kernel.context))
    report = kernel.store.statfs()
    assert data.f_frsize * data.f_bavail == report.available_bytes // 4096 * 4096
    assert data.f_files >= data.f_ffree > 0
    assert data.f_namemax == 255


def test_extended_attributes(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    operations, context = kernel.operations, kernel.context
    finish(operations.setxattr(ino, b"user.a", b"1", context))
    assert finish(operations.getxattr(ino, b"user.a", context)) == b"1"
    assert b"user.a" in finish(operations.listxattr(ino, context))
    finish(operations.removexattr(ino, b"user.a", context))
    with error_number(pyfuse3.ENOATTR):
        finish(operations.getxattr(ino, b"user.a", context))
    with error_number(errno.EOPNOTSUPP):
        finish(operations.setxattr(ino, b"system.posix_acl_access", b"1", context))
    with error_number(pyfuse3.ENOATTR):
        finish(operations.getxattr(ino, b"system.posix_acl_access", context))


# --- set-ID bits --------------------------------------------------------------------------------


def test_writes_of_root_leave_set_id_bits(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    kernel.setattr(ino, mode=0o6755)
    handle = kernel.open(ino, os.O_WRONLY).fh
    finish(kernel.operations.write(handle, 0, b"y"))
    kernel.close(handle)
    assert kernel.getattr(ino).st_mode & 0o7777 == 0o6755


@pytest.mark.parametrize(
    ("before", "after", "gid"),
    [
        (0o4755, 0o755, 1000),
        (0o6755, 0o755, 1000),
        (0o6755, 0o755, 0),
        (0o2644, 0o644, 1000),
        (0o6744, 0o744, 1000),
        (0o2644, 0o2644, 0),
        (0o6744, 0o2744, 0),
    ],
)
def test_writes_of_others_take_set_id_bits_away(
    kernel: Kernel, before: int, after: int, gid: int
) -> None:
    """Without group execution those who may set set-group-ID keep it: the group's members."""
    ino = kernel.write_file(b"file", b"x")
    kernel.context = Context(uid=1000, gid=gid)
    handle = kernel.open(ino, os.O_WRONLY).fh
    kernel.setattr(ino, mode=before)  # while it is open
    finish(kernel.operations.write(handle, 0, b"y"))
    assert kernel.getattr(ino).st_mode & 0o7777 == after
    kernel.setattr(ino, mode=before)
    kernel.setattr(ino, size=0)
    assert kernel.getattr(ino).st_mode & 0o7777 == after
    kernel.setattr(ino, mode=before)
    kernel.close(handle)
    kernel.close(kernel.open(ino, os.O_WRONLY | os.O_TRUNC).fh)
    assert kernel.getattr(ino).st_mode & 0o7777 == after


def test_capabilities_go_with_the_set_id_bits(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    operations = kernel.operations
    root, other = kernel.context, Context(uid=1000)
    name = b"security.capability"
    finish(operations.setxattr(ino, name, b"\1\0\0\2" + bytes(16), root))
    kernel.context = other
    handle = kernel.open(ino, os.O_WRONLY).fh
    finish(operations.write(handle, 0, b"y"))
    assert name not in finish(operations.listxattr(ino, root))
    finish(operations.setxattr(ino, name, b"\1\0\0\2" + bytes(16), root))
    finish(operations.write(handle, 0, b"z"))
    assert name not in finish(operations.listxattr(ino, root))
    kernel.close(handle)


@pytest.mark.parametrize("change", ["write", "truncate", "empty"])
@pytest.mark.parametrize("is_open", [False, True])
def test_what_root_writes_loses_capabilities_and_keeps_set_id_bits(
    kernel: Kernel, change: str, is_open: bool
) -> None:
    ino = kernel.write_file(b"file", b"content")
    kernel.setattr(ino, mode=0o4755)
    handle = kernel.open(ino, os.O_WRONLY).fh
    if is_open:
        finish(kernel.operations.write(handle, 0, b"C"))
    else:
        kernel.close(handle)
    operations, root = kernel.operations, kernel.context
    name = b"security.capability"
    finish(operations.setxattr(ino, name, b"\1\0\0\2" + bytes(16), root))
    if not is_open:
        handle = kernel.open(ino, os.O_WRONLY | (os.O_TRUNC if change == "empty" else 0)).fh
    if change == "write":
        finish(operations.write(handle, 0, b"c"))
    elif change == "truncate" or is_open:
        kernel.setattr(ino, size=1)
    assert name not in finish(operations.listxattr(ino, root))
    assert kernel.getattr(ino).st_mode & 0o7777 == 0o4755
    kernel.close(handle)


def test_a_new_owner_takes_set_id_bits_away_from_files_only(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    kernel.setattr(ino, mode=0o6755)
    assert kernel.setattr(ino, uid=5).st_mode & 0o7777 == 0o755
    directory = finish(
        kernel.operations.mkdir(ROOT, b"d", stat.S_IFDIR | 0o2755, kernel.context)
    ).st_ino
    assert kernel.setattr(directory, gid=5).st_mode & 0o7777 == 0o2755

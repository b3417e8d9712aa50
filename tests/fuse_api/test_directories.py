"""Directory listings: cookies, lookup counts, changes in between."""

from __future__ import annotations

import errno
import stat

from tests.support.fuse_api import ROOT, Kernel, error_number, finish


def open_root(kernel: Kernel) -> int:
    return finish(kernel.operations.opendir(ROOT, kernel.context))


def test_dots_come_first_and_are_not_counted(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    handle = open_root(kernel)
    entries = kernel.list(handle)
    assert [name for name, _, _ in entries] == [b".", b"..", b"file"]
    assert entries[0][1].st_ino == ROOT
    assert kernel.operations.lookups[ROOT] == 0
    assert kernel.operations.lookups[ino] == 2  # created, listed
    finish(kernel.operations.releasedir(handle))


def test_entries_that_do_not_fit_are_not_counted(kernel: Kernel) -> None:
    inos = [kernel.write_file(b"%d" % index, b"") for index in range(5)]
    handle = open_root(kernel)
    assert len(kernel.list(handle, room=4)) == 4
    assert [kernel.operations.lookups[ino] for ino in inos] == [2, 2, 1, 1, 1]
    finish(kernel.operations.releasedir(handle))


def test_any_cookie_continues_where_it_was_given(kernel: Kernel) -> None:
    for index in range(7):
        kernel.write_file(b"%d" % index, b"")
    handle = open_root(kernel)
    everything = kernel.list(handle)
    for position, (_, _, cookie_next) in enumerate(everything):
        rest = kernel.list(handle, cookie=cookie_next)
        assert [name for name, _, _ in rest] == [n for n, _, _ in everything[position + 1 :]]
    cookies = [cookie for _, _, cookie in everything]
    assert cookies == sorted(set(cookies))
    finish(kernel.operations.releasedir(handle))


def test_what_was_removed_is_left_out_and_nothing_else_moves(kernel: Kernel) -> None:
    for index in range(6):
        kernel.write_file(b"%d" % index, b"")
    handle = open_root(kernel)
    first = kernel.list(handle, room=4)
    for name in (b"0", b"3"):
        finish(kernel.operations.unlink(ROOT, name, kernel.context))
    kernel.write_file(b"new", b"")
    second = kernel.list(handle, cookie=first[-1][2])
    assert [name for name, _, _ in first + second] == [b".", b"..", b"0", b"1", b"2", b"4", b"5"]
    again = kernel.list(handle)
    assert b"new" in [name for name, _, _ in again]
    finish(kernel.operations.releasedir(handle))


def test_a_removed_directory_lists_nothing(kernel: Kernel) -> None:
    entry = finish(kernel.operations.mkdir(ROOT, b"d", stat.S_IFDIR | 0o755, kernel.context))
    handle = finish(kernel.operations.opendir(entry.st_ino, kernel.context))
    finish(kernel.operations.rmdir(ROOT, b"d", kernel.context))
    assert [name for name, _, _ in kernel.list(handle)] in ([], [b".", b".."])
    finish(kernel.operations.fsyncdir(handle, False))
    finish(kernel.operations.releasedir(handle))


def test_only_directories_are_listed(kernel: Kernel) -> None:
    ino = kernel.write_file(b"file", b"x")
    with error_number(errno.ENOTDIR):
        finish(kernel.operations.opendir(ino, kernel.context))

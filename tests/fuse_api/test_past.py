"""The view of the past without a kernel: how much it remembers, and what it answers else."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

import pyfuse3
import pytest

from cxlfs.fuse import kernel as wire
from cxlfs.fuse import past_view
from cxlfs.fuse.kernel import Opcode
from tests.support.direct_daemon import Daemon
from tests.support.fuse_api import ROOT, Context, Kernel, error_number, finish


def at(kernel: Kernel, when: bytes) -> int:
    """The number of the top of a state."""
    top = kernel.lookup(b".cxlfs").st_ino
    return kernel.lookup(when, kernel.lookup(b"at", top).st_ino).st_ino


def last(kernel: Kernel) -> bytes:
    return b"%d" % kernel.store.volume.last_lsn


def content(kernel: Kernel, ino: int) -> bytes:
    return kernel.read(ino)


def test_nothing_is_remembered_by_the_kernel_nor_forgotten_here(kernel: Kernel) -> None:
    kernel.write_file(b"a", b"one")
    entry = kernel.lookup(b"a", at(kernel, last(kernel)))
    assert (entry.entry_timeout, entry.attr_timeout) == (0, 0)
    assert entry.st_ino >= past_view.FIRST
    finish_forget: Any = kernel.operations.forget([(entry.st_ino, 7)])
    finish(finish_forget)
    assert content(kernel, entry.st_ino) == b"one"
    assert kernel.lookup(b"a", at(kernel, last(kernel))).st_ino == entry.st_ino


def test_memory_is_bounded_and_what_was_dropped_is_looked_up_again(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_view, "NODES_MAX", 20)
    for number in range(50):
        kernel.write_file(b"%d" % number, b"%d" % number)
    view = kernel.operations.past
    first = kernel.lookup(b"0", at(kernel, last(kernel))).st_ino
    handle = kernel.open(first, os.O_RDONLY).fh
    for commit in range(1, kernel.store.volume.last_lsn + 1):
        top = at(kernel, b"%d" % commit)
        for number in range(0, 50, 7):
            with contextlib.suppress(pyfuse3.FUSEError):
                kernel.lookup(b"%d" % number, top)
    assert len(view._nodes) <= 20
    assert len(view._numbers) == len(view._nodes)
    assert kernel.getattr(first).st_size == 1, "it is open"
    assert bytes(finish(kernel.operations.read(handle, 0, 10))) == b"0"
    finish(kernel.operations.release(handle))
    with error_number(errno.ESTALE):
        kernel.getattr(first)
    again = kernel.lookup(b"0", at(kernel, last(kernel))).st_ino
    assert again != first
    assert content(kernel, again) == b"0"
    assert not view._open
    assert not view._files


def test_hostile_lookups_leave_nothing(kernel: Kernel) -> None:
    kernel.write_file(b"a", b"one")
    top = at(kernel, last(kernel))
    count = len(kernel.operations.past._nodes)
    parent = kernel.lookup(b"at", kernel.lookup(b".cxlfs").st_ino).st_ino
    for number in range(300):
        with error_number(errno.ENOENT):
            kernel.lookup(b"x%d" % number, top)
        with error_number(errno.ENOENT):
            kernel.lookup(b"9%d" % (number + 10**6), parent)
    assert len(kernel.operations.past._nodes) == count


def test_a_listing_goes_on_where_it_was(kernel: Kernel) -> None:
    for number in range(10):
        kernel.write_file(b"%d" % number, b"x")
    top = at(kernel, last(kernel))
    handle = finish(kernel.operations.opendir(top, kernel.context))
    kernel.write_file(b"new", b"x")
    names, cookie = [], 0
    while entries := kernel.list(handle, 3, cookie):
        names += [name for name, _, _ in entries]
        cookie = entries[-1][2]
    assert sorted(names) == sorted([b".", b"..", *(b"%d" % number for number in range(10))])
    finish(kernel.operations.releasedir(handle))
    with error_number(errno.EBADF):
        kernel.list(handle)


def test_what_a_user_holds_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listings of each user, and one content for all handles."""
    monkeypatch.setattr(past_view, "LISTED_MAX", 25)
    kernel.setattr(ROOT, mode=0o755)
    for number in range(10):
        kernel.setattr(kernel.write_file(b"%d" % number, b"x" * 5000), uid=1000)
    top = at(kernel, last(kernel))
    for uid in (1000, 1001):
        kernel.context = Context(uid=uid)
        handles = [finish(kernel.operations.opendir(top, kernel.context)) for _ in range(2)]
        with error_number(errno.ENOMEM):
            finish(kernel.operations.opendir(top, kernel.context))
        for handle in handles:
            finish(kernel.operations.releasedir(handle))
    kernel.context = Context(uid=1000)
    found = kernel.lookup(b"0", top).st_ino
    opened = [kernel.open(found, os.O_RDONLY).fh for _ in range(5)]
    view = kernel.operations.past
    assert len(view._contents) == 1
    for handle in opened:
        assert bytes(finish(kernel.operations.read(handle, 0, 10))) == b"x" * 10
        finish(kernel.operations.release(handle))
    assert not view._contents
    assert not view._listed


def test_another_user_is_answered_for_themself(kernel: Kernel) -> None:
    """Also through a number that the first one was told."""
    ino = kernel.write_file(b"a", b"one")
    kernel.setattr(ino, uid=1000, mode=0o644)
    kernel.context = Context(uid=1000)
    top = at(kernel, last(kernel))
    found = kernel.lookup(b"a", top)
    assert (found.st_uid, found.st_mode & 0o7777) == (1000, 0o600)
    kernel.context = Context(uid=1001)
    with error_number(errno.ENOENT):
        kernel.lookup(b"a", top)
    with error_number(errno.EPERM):
        kernel.open(found.st_ino, os.O_RDONLY)
    with error_number(errno.EPERM):
        kernel.getattr(found.st_ino)


def test_the_past_of_workers_is_the_same(daemon: Daemon) -> None:
    ino, handle = daemon.create(b"a")
    daemon.requests.write_by(0, handle, 0, b"one" * 10_000)
    daemon.close(handle)
    when = b"%d" % daemon.store.volume.last_lsn

    def lookup(parent: int, name: bytes) -> int:
        answer = daemon.call(Opcode.LOOKUP, parent, name + b"\0")
        assert answer.error == 0
        return int.from_bytes(answer.data[:8], "little")

    found = 1
    for name in (b".cxlfs", b"at", when, b"a"):
        found = lookup(found, name)
    opened = daemon.opened(found, os.O_RDONLY)
    request = wire.READ.pack(opened, 0, 1 << 20)
    assert bytes(daemon.call(Opcode.READ, found, request).data) == b"one" * 10_000
    copy = wire.COPY.pack(opened, 0, ino, 1, 0, 5, 0)
    assert daemon.call(Opcode.COPY_FILE_RANGE, found, copy).error == errno.EOPNOTSUPP
    assert daemon.call(Opcode.IOCTL, found, bytes(64)).error == errno.EOPNOTSUPP
    assert (
        daemon.call(Opcode.UNLINK, lookup(lookup(1, b".cxlfs"), b"at"), b"x\0").error == errno.EROFS
    )
    rename = wire.NUMBER.pack(found) + b"a\0b\0"
    assert daemon.call(Opcode.RENAME, 1, rename).error == errno.EROFS
    assert daemon.open(found, os.O_WRONLY).error == errno.EROFS
    assert daemon.call(Opcode.RELEASE, found, wire.NUMBER.pack(opened)).error == 0
    assert daemon.call(Opcode.READ, found, request).error == errno.EBADF


def test_a_file_that_a_program_stores_into_is_pinned_as_it_was_committed(daemon: Daemon) -> None:
    """The program goes on, in a slip of its own."""
    ino, handle = daemon.create(b"a")
    store = daemon.store
    program = daemon.program(handle)
    assert program.write(0, b"x" * 3000)
    with daemon.requests.lock:
        store.fsync(handle)
    if program.write(3000, b"y" * 500):
        store.get_attributes(ino)
    state = store.state_at(store.volume.last_lsn)
    with daemon.requests.lock:
        *_, made = store.pins.make(0, b"best", b"/a", state)
    assert (made.count, made.size_bytes) == (1, 3000)
    fact = state.fact(ino)
    assert fact is not None
    assert fact.content is not None
    assert bytes(fact.content.read(0, 10_000)) == b"x" * 3000
    program.end()
    daemon.close(handle)

"""Requests of direct access without a kernel: what is checked, who may, and what the kernel is told
of files that grow without it.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import struct
from typing import Any

import pytest

from cxlfs.fuse import direct_wire, kernel
from cxlfs.fuse.attributes import CACHE_SECONDS
from cxlfs.fuse.direct_wire import Command, size_of
from cxlfs.fuse.handles import Caller
from cxlfs.fuse.kernel import Opcode
from cxlfs.media.base import Identity
from cxlfs.native.transport import Upcall
from tests.support.direct_client import lease_request, settle_request
from tests.support.direct_daemon import ROOT, TID, Daemon
from tests.support.fuse_api import finish
from tests.support.slips import Watches

NOBODY = 65534
ENTRY_SECONDS = struct.Struct("=16xQQ")


# --- who, and what of it --------------------------------------------------------------------------


@pytest.mark.parametrize("command", Command)
def test_nobody_else_is_answered(daemon: Daemon, command: Command) -> None:
    _, handle = daemon.create()
    for asked in (handle, 99):
        assert daemon.ask(asked, command, uid=NOBODY).error == errno.EPERM
    daemon.close(handle)


@pytest.mark.parametrize("command", Command)
def test_the_user_of_the_daemon_is_answered(
    daemon: Daemon, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = daemon.create()
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert daemon.ask(handle, command, uid=NOBODY).error != errno.EPERM
    assert daemon.ask(handle, command, uid=NOBODY - 1).error == errno.EPERM
    monkeypatch.undo()
    daemon.close(handle)


@pytest.mark.parametrize("command", Command)
def test_requests_of_another_length_are_refused(
    daemon: Daemon, command: Command, rng: random.Random
) -> None:
    _, handle = daemon.create()
    for length in (0, 1, size_of(command) - 1, size_of(command) + 1, 1 << 16):
        head = kernel.IOCTL.pack(handle, 0, command, 0, length, length)
        answer = daemon.call(Opcode.IOCTL, 1, head + rng.randbytes(length))
        assert (answer.error, answer.data) == (errno.EINVAL, b"")
    daemon.close(handle)


@pytest.mark.parametrize("command", [0, 0x5401, Command.UNMAP + 1, 2**32 - 1])
def test_what_is_no_request_of_ours_is_refused(daemon: Daemon, command: int) -> None:
    _, handle = daemon.create()
    assert daemon.ask(handle, command).error == errno.EINVAL
    daemon.close(handle)


@pytest.mark.parametrize("command", Command)
def test_a_handle_must_be_one(daemon: Daemon, command: Command) -> None:
    for handle in (0, 99, 2**64 - 1):
        assert daemon.ask(handle, command).error == errno.EBADF


def test_random_bytes_do_no_harm(daemon: Daemon, rng: random.Random) -> None:
    _, handle = daemon.create()
    for _ in range(500):
        command = rng.choice(list(Command))
        error = daemon.ask(handle, command, rng.randbytes(size_of(command))).error
        assert error in (0, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSPC, errno.EBUSY)
    assert daemon.ask(handle, Command.SETTLE, settle_request(flags=1)).error == 0
    daemon.close(handle)


# --- ATTACH ---------------------------------------------------------------------------------------


def identify(daemon: Daemon, path: str) -> None:
    identity = Identity(path, 11, 12, 13, True)
    daemon.store.media.identity = lambda: identity  # type: ignore[method-assign]


VERSION = struct.pack("<I", direct_wire.VERSION)


def test_attach_says_what_the_medium_is(daemon: Daemon) -> None:
    _, handle = daemon.create()
    assert daemon.ask(handle, Command.ATTACH, VERSION).error == errno.EINVAL, "memory of its own"
    identify(daemon, "/dev/dax0.0")
    answer = direct_wire.ATTACH.unpack(daemon.ask(handle, Command.ATTACH, VERSION).data)
    media = daemon.store.media
    assert answer == (
        *(direct_wire.VERSION, int(media.granularity), media.size_bytes, 11, 12, 13),
        *(daemon.store.superblock.chunk_bytes, direct_wire.ATTACH_SYNCHRONOUS),
        daemon.store.superblock.uuid,
        *daemon.locks.watches.held,
        b"/dev/dax0.0".ljust(direct_wire.PATH_BYTES_MAX + 1, b"\0"),
    )
    daemon.close(handle)


@pytest.mark.parametrize(
    ("version", "path"),
    [(0, "/m"), (direct_wire.VERSION + 1, "/m"), (2**32 - 1, "/m"), (1, "/" + "m" * 1951)],
)
def test_what_cannot_be_told_is_not_supported(daemon: Daemon, version: int, path: str) -> None:
    _, handle = daemon.create()
    identify(daemon, path)
    answer = daemon.ask(handle, Command.ATTACH, struct.pack("<I", version))
    assert answer.error == errno.EOPNOTSUPP
    identify(daemon, path[:1951])
    assert daemon.ask(handle, Command.ATTACH, VERSION).error == 0
    daemon.close(handle)


# --- what the kernel is told ----------------------------------------------------------------------


def test_attributes_are_not_kept_while_a_program_writes(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    assert daemon.attributes_seconds(ino) == (CACHE_SECONDS, False)
    program = daemon.program(handle)
    assert program.write(0, b"data")
    assert daemon.attributes_seconds(ino) == (0, True)
    entry = daemon.call(Opcode.LOOKUP, ROOT, b"file\0").data
    assert ENTRY_SECONDS.unpack_from(entry) == (CACHE_SECONDS, 0)
    daemon.close(handle)
    assert daemon.attributes_seconds(ino) == (CACHE_SECONDS, True), "before others are served"
    entry = daemon.call(Opcode.LOOKUP, ROOT, b"file\0").data
    assert ENTRY_SECONDS.unpack_from(entry) == (CACHE_SECONDS, CACHE_SECONDS)


def test_answers_that_come_later_are_not_kept_while_anybody_can_write(daemon: Daemon) -> None:
    context: Any = Caller(0, 0, TID)
    ino, handle = daemon.create()
    assert finish(daemon.requests.getattr(ino, context)).attr_timeout == 0
    daemon.close(handle)
    entry = finish(daemon.requests.getattr(ino, context))
    assert (entry.attr_timeout, entry.entry_timeout) == (CACHE_SECONDS, CACHE_SECONDS)


def test_who_opens_such_a_file_is_sent_back_once(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    program = daemon.program(handle)
    assert program.write(0, b"data")
    assert daemon.open(ino, os.O_RDONLY).error == errno.ESTALE
    assert not daemon.store.direct.is_open(ino)
    assert daemon.ask(handle, Command.LEASE, lease_request(4096)).error == errno.EBUSY, (
        "he is about to come"
    )
    assert daemon.attributes_seconds(ino)[0] == CACHE_SECONDS
    reader = daemon.opened(ino, os.O_RDONLY)
    daemon.close(reader)
    assert daemon.ask(handle, Command.LEASE, lease_request(4096)).error == 0
    daemon.close(handle)


def test_who_has_come_by_no_name_gets_in_the_second_time(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.program(handle)
    assert daemon.open(ino, os.O_RDWR).error == errno.ESTALE
    daemon.close(daemon.opened(ino, os.O_RDWR))
    daemon.close(daemon.opened(ino, os.O_RDWR))
    daemon.close(handle)


def test_an_opener_that_never_comes_back_keeps_nobody_waiting(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.program(handle)
    assert daemon.open(ino, os.O_RDONLY).error == errno.ESTALE
    daemon.time += 0.9
    assert daemon.ask(handle, Command.LEASE, lease_request(4096)).error == errno.EBUSY
    daemon.time += 0.2
    assert daemon.ask(handle, Command.LEASE, lease_request(4096)).error == 0
    daemon.close(handle)


def test_a_file_that_was_closed_is_looked_up_before_it_is_opened(daemon: Daemon) -> None:
    """The kernel's size is that of before, if nobody has asked since."""
    ino, handle = daemon.create()
    assert daemon.program(handle).write(0, b"data")
    daemon.close(handle)
    assert daemon.open(ino, os.O_WRONLY | os.O_APPEND).error == errno.ESTALE
    daemon.attributes_seconds(ino)
    daemon.close(daemon.opened(ino, os.O_WRONLY | os.O_APPEND))
    daemon.close(daemon.opened(ino, os.O_RDONLY))


def test_who_creates_what_is_there_is_sent_back_as_well(daemon: Daemon) -> None:
    _, handle = daemon.create()
    daemon.program(handle)
    create = kernel.CREATE.pack(os.O_RDWR | os.O_CREAT, 0o644, 0, 0) + b"file\0"
    assert daemon.call(Opcode.CREATE, ROOT, create).error == errno.ESTALE
    daemon.close(handle)


def append(daemon: Daemon, ino: int, handle: int, offset: int, text: bytes) -> None:
    """A request of a call that appends; ``offset``: what the kernel says."""
    write = kernel.WRITE.pack(handle, offset, len(text), 0, os.O_WRONLY | os.O_APPEND) + text
    assert daemon.call(Opcode.WRITE, ino, write).error == 0


def content(daemon: Daemon, ino: int) -> bytes:
    reader = daemon.opened(ino, os.O_RDONLY)
    found = bytes(daemon.store.read(reader, 0, 100))
    daemon.close(reader)
    return found


@pytest.mark.parametrize("believed", [0, 2, 4])
def test_who_appends_does_it_at_the_end_whatever_the_kernel_believes(
    daemon: Daemon, believed: int
) -> None:
    ino, handle = daemon.create()
    assert daemon.program(handle).write(0, b"data")
    daemon.close(handle)
    daemon.attributes_seconds(ino)
    appender = daemon.opened(ino, os.O_WRONLY | os.O_APPEND)
    for text in (b"one", b"two", b"six"):
        append(daemon, ino, appender, believed, text)
        believed += len(text)
    assert appender not in daemon.plane.allowed, "each of them is seen"
    daemon.close(appender)
    assert content(daemon, ino) == b"dataonetwosix"


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_one_call_that_appends_by_several_requests_does_it_in_its_order(
    daemon: Daemon, order: tuple[int, ...]
) -> None:
    """The kernel sends those of io_uring and libaio at once."""
    ino, handle = daemon.create()
    assert daemon.program(handle).write(0, b"data")
    daemon.close(handle)
    daemon.attributes_seconds(ino)
    appender = daemon.opened(ino, os.O_WRONLY | os.O_APPEND)
    for believed in (4, 13):
        for part in order:
            text = (b"one", b"two", b"six")[part]
            append(daemon, ino, appender, believed + 3 * part, text)
    assert content(daemon, ino) == b"data" + 2 * b"onetwosix"
    daemon.store.set_attributes(ino, size=6)
    append(daemon, ino, appender, 6, b"end")
    daemon.close(appender)
    assert content(daemon, ino) == b"dataonend"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_nothing_is_lost_where_the_kernel_was_never_told_the_size(
    daemon: Daemon, order: tuple[int, int]
) -> None:
    ino, handle = daemon.create()
    assert daemon.program(handle).write(0, b"data")
    daemon.close(handle)
    assert daemon.open(ino, os.O_WRONLY | os.O_APPEND).error == errno.ESTALE
    appender = daemon.opened(ino, os.O_WRONLY | os.O_APPEND)
    for part in order:
        append(daemon, ino, appender, 3 * part, (b"one", b"two")[part])
    append(daemon, ino, appender, 6, b"six")
    daemon.close(appender)
    found = content(daemon, ino)
    assert (found[:4], found[10:]) == (b"data", b"six")
    assert {found[4:7], found[7:10]} == {b"one", b"two"}


@pytest.mark.parametrize(
    ("flags", "file_flags"),
    [(0, os.O_WRONLY), (kernel.WRITE_CACHE, 0), (kernel.WRITE_CACHE, os.O_WRONLY | os.O_APPEND)],
)
def test_only_who_appends_now_does(daemon: Daemon, flags: int, file_flags: int) -> None:
    """O_APPEND was taken away, or the kernel writes a page back, for which any handle will do."""
    ino, handle = daemon.create()
    assert daemon.program(handle).write(0, b"data")
    daemon.close(handle)
    daemon.attributes_seconds(ino)
    appender = daemon.opened(ino, os.O_WRONLY | os.O_APPEND)
    write = kernel.WRITE.pack(appender, 1, 2, flags, file_flags) + b"xx"
    assert daemon.call(Opcode.WRITE, ino, write).error == 0
    daemon.close(appender)
    reader = daemon.opened(ino, os.O_RDONLY)
    assert bytes(daemon.store.read(reader, 0, 100)) == b"dxxa"
    daemon.close(reader)


def test_who_appends_to_other_files_is_left_to_the_kernel(daemon: Daemon) -> None:
    ino, handle = daemon.create(flags=os.O_WRONLY | os.O_APPEND)
    for text, offset in ((b"one", 0), (b"two", 1)):
        write = kernel.WRITE.pack(handle, offset, 3, 0, os.O_WRONLY | os.O_APPEND) + text
        assert daemon.call(Opcode.WRITE, ino, write).error == 0
    assert daemon.store.get_attributes(ino).size == 4
    daemon.close(handle)


def test_what_the_kernel_has_forgotten_is_an_ordinary_file_again(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.program(handle)
    daemon.close(handle)
    assert daemon.access.has_grown(ino)
    upcall = Upcall(Opcode.FORGET, 1, ino, 0, 0, 0, memoryview(kernel.NUMBER.pack(1)), 0, False)
    assert daemon.direct.serve(upcall) is None
    assert not daemon.access.has_grown(ino)
    daemon.close(daemon.opened(ino, os.O_RDONLY))


# --- MAP, UNMAP -----------------------------------------------------------------------------------


def test_a_map_says_where_a_file_lies(daemon: Daemon, rng: random.Random) -> None:
    ino, handle = daemon.create()
    data = rng.randbytes(60_000)
    daemon.store.write(handle, 0, data)
    answer = daemon.ask(handle, Command.MAP).data
    head = direct_wire.MAP_HEAD
    assert head.unpack_from(answer) == (0, 60_000, 60_000, 1, 1, 0, 0)
    row = struct.unpack_from("<6QII", answer, head.size)
    at = row[4] + row[3]
    assert daemon.store.media.read(at, 60_000) == data
    assert (row[0], row[1], row[7]) == (0, 60_000, 1)
    assert answer[head.size + 56 + 4 :] == bytes(direct_wire.MAP_PAYLOAD_BYTES - 60)
    daemon.locks.take(answer, at, 60_000)
    assert daemon.ask(handle, Command.CONFIRM).error == 0
    daemon.locks.drop(answer)
    assert daemon.ask(handle, Command.UNMAP).data == bytes(8)
    assert daemon.ask(handle, Command.CONFIRM).error == errno.EINVAL
    daemon.close(handle)
    assert daemon.store.get_attributes(ino).size == 60_000


def test_a_map_is_watched_on_request(daemon: Daemon) -> None:
    watches = Watches(daemon.store.media)
    head = direct_wire.MAP_HEAD
    _, handle = daemon.create()
    request = head.pack(0, 0, 0, 0, 0, direct_wire.MAP_WATCH, 0)
    assert daemon.ask(handle, Command.MAP, request).error == errno.EBUSY
    unknown = head.pack(0, 0, 0, 0, 0, 4, 0)
    assert daemon.ask(handle, Command.MAP, unknown).error == errno.EINVAL
    assert head.unpack_from(daemon.ask(handle, Command.MAP).data)[6] == 0
    assert not watches.held
    daemon.close(handle)


@pytest.mark.parametrize("offset", [1, 4096, 2**63, 2**64 - 1])
def test_a_map_begins_with_its_beginning(daemon: Daemon, offset: int) -> None:
    _, handle = daemon.create()
    answer = daemon.ask(handle, Command.MAP, struct.pack("<Q", offset))
    assert answer.error == errno.EINVAL
    daemon.close(handle)

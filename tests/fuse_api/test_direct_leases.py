"""Who is given room to store into by himself, and what is said of it, without a kernel."""

from __future__ import annotations

import errno
import itertools
import os
import random

import pytest

from cxlfs.fuse import direct_wire
from cxlfs.fuse.direct_wire import Command
from tests.support.direct_client import lease_request, leases_of, settle_request
from tests.support.direct_daemon import TID, Daemon


def test_what_is_stored_is_content(daemon: Daemon, rng: random.Random) -> None:
    ino, handle = daemon.create()
    program = daemon.program(handle)
    data = rng.randbytes(3000)
    assert program.write(0, data)
    settled = daemon.ask(handle, Command.SETTLE)
    assert direct_wire.SETTLE.unpack(settled.data)[-4:] == (0, 0, 1, 3000)
    assert program.write(3000, data)
    done = daemon.ask(handle, Command.SETTLE, settle_request(program.held().lease_id, flags=1))
    assert direct_wire.SETTLE.unpack(done.data)[-2:] == (2, 6000)
    assert not daemon.store.direct.is_open(ino)
    daemon.close(handle)
    assert daemon.store.get_attributes(ino).size == 6000


def test_who_is_given_room_is_a_writer(daemon: Daemon) -> None:
    _, handle = daemon.create()
    file = daemon.requests.files.get(handle)
    file.opener = None
    assert not file.writers
    daemon.program(handle)
    assert {writer.tgid for writer in file.writers} == {TID}
    daemon.close(handle)


def test_several_leases_are_given_and_returned_at_once(daemon: Daemon) -> None:
    _, handle = daemon.create()
    daemon.store.files.get(handle).inode.first_writer = None  # as where threads serve its data
    answer = daemon.ask(handle, Command.LEASE, lease_request(1 << 40, count=3))
    leases = leases_of(answer.data)
    ids = [lease.lease_id for lease in leases]
    assert len(set(ids)) == 3
    ranges = sorted((each.media_offset, each.length_bytes) for each in leases)
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(ranges))
    program = "program"
    for lease in leases[:2]:
        daemon.locks.take(program, lease.media_offset, lease.length_bytes)
    daemon.locks.take(program, leases[0].slip_offset, leases[0].slip_bytes)
    assert {lease.watch for lease in leases} == daemon.locks.watches.held
    before = daemon.store.volume.space.available_bytes
    assert daemon.ask(handle, Command.SETTLE, settle_request(*ids[:2])).error == 0
    between = daemon.store.volume.space.available_bytes
    assert between > before
    request = lease_request(4096, returned=ids[2:], watch=leases[0].watch)
    answer = daemon.ask(handle, Command.LEASE, request)
    assert answer.error == 0
    assert leases_of(answer.data)[0].watch == leases[0].watch, "it is the same slip"
    daemon.locks.drop(program)
    daemon.close(handle)


@pytest.mark.parametrize("count", [0, direct_wire.LEASES_MAX + 1, 2**32 - 1])
def test_nobody_gets_more_leases_than_an_answer_has(daemon: Daemon, count: int) -> None:
    _, handle = daemon.create()
    answer = daemon.ask(handle, Command.LEASE, lease_request(4096, count=count))
    assert answer.error == errno.EINVAL
    daemon.close(handle)


def test_who_has_not_locked_what_he_got_gets_no_more(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.store.files.get(handle).inode.first_writer = None  # as where threads serve its data
    answer = daemon.ask(handle, Command.LEASE, lease_request(4096))
    [lease] = leases_of(answer.data)
    more = lease_request(4096, watch=lease.watch)
    assert daemon.ask(handle, Command.LEASE, more).error == errno.EINVAL
    assert not daemon.store.direct.is_open(ino)
    assert not daemon.locks.watches.held
    daemon.close(handle)


def test_processes_that_share_an_open_file_share_no_slip(daemon: Daemon) -> None:
    """Both begin with the first descriptor: it would be that of one of them."""
    ino, handle = daemon.create()
    daemon.store.files.get(handle).inode.first_writer = None  # as where threads serve its data
    one, other = daemon.program(handle), daemon.program(handle)
    assert one.held().slip_offset != other.held().slip_offset
    assert not one.write(0, b"one"), "its slip is closed: the kernel takes it"
    assert other.write(0, b"other")
    assert daemon.store.get_attributes(ino).size == 5
    daemon.close(handle)


@pytest.mark.parametrize("flags", [2, 1 << 31, 3])
def test_flags_that_nobody_knows_are_refused(daemon: Daemon, flags: int) -> None:
    _, handle = daemon.create()
    answer = daemon.ask(handle, Command.SETTLE, settle_request(flags=flags))
    assert answer.error == errno.EINVAL
    answer = daemon.ask(handle, Command.LEASE, lease_request(4096, flags=flags))
    assert answer.error == errno.EINVAL
    answer = daemon.ask(handle, Command.LEASE, lease_request(4096, flags=direct_wire.LEASE_AHEAD))
    assert answer.error == 0
    daemon.close(handle)


LEASE = lease_request(4096)


def test_handles_that_the_kernel_writes_through_get_no_room(daemon: Daemon) -> None:
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_APPEND):
        _, handle = daemon.create(f"appends-{flags}".encode(), flags)
        assert daemon.ask(handle, Command.LEASE, LEASE).error == errno.EBUSY
        daemon.close(handle)
    daemon.plane.direct_mapping = False
    _, handle = daemon.create(b"cached")
    assert daemon.ask(handle, Command.LEASE, LEASE).error == errno.EBUSY
    daemon.close(handle)


def test_handles_that_do_not_write_get_no_room(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.close(handle)
    reader = daemon.opened(ino, os.O_RDONLY)
    assert daemon.ask(reader, Command.LEASE, LEASE).error == errno.EBADF
    daemon.close(reader)


def test_a_file_that_loses_privileges_by_writing_is_the_kernels(daemon: Daemon) -> None:
    ino, handle = daemon.create()
    daemon.requests.files.get(handle).may_keep_set_id = False
    daemon.store.set_attributes(ino, mode=0o4755)
    daemon.requests.privileges.changed(ino)
    assert daemon.ask(handle, Command.LEASE, LEASE).error == errno.EBUSY
    daemon.close(handle)

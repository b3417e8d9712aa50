"""Programs that store file data by themselves: what of it becomes content, when, and whose room it
is meanwhile.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import (
    BusyError,
    CxlfsError,
    InvalidArgumentError,
    NoSpaceError,
)
from cxlfs.media import Granularity
from cxlfs.native.direct import SLIP_CLOSED, SLIP_DESCRIPTOR_BYTES, SLIP_DESCRIPTORS_AT
from cxlfs.store import Store
from cxlfs.store.direct import LEASE_BYTES_MIN
from cxlfs.units import MIB
from tests.support.direct_format import descriptor
from tests.support.shop import Shop, fill
from tests.support.slips import Locks, Program
from tests.support.stores import clean_round, read_file, write_file

TRUNCATE = os.O_RDWR | os.O_TRUNC


def _bytes(rng: random.Random, length: int) -> bytes:
    return rng.randbytes(length)


def _close(store: Store, handle: int, *, killed: bool = False) -> None:
    store.flush(handle, writer_killed=killed)
    store.release(handle)


def _begin(store: Store, name: bytes = b"file") -> tuple[int, int, Program]:
    """A new file, its handle, and a program that has room for it."""
    attributes, handle = store.create(1, name, 0o644, 1, 1, os.O_RDWR)
    program = Program(store, handle, Locks(store.media))
    program.ask()
    return attributes.ino, handle, program


def test_what_was_appended_is_read_published_and_survives(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    ino, handle, program = _begin(store)
    content = _bytes(rng, 5000)
    assert program.write(0, content[:1234])
    assert store.get_attributes(ino).size == 1234
    assert program.write(1234, content[1234:])
    assert bytes(store.read(handle, 0, 10_000)) == content
    _close(store, handle)
    program.die()
    again = shop.reopen(store, clean=False)
    assert read_file(again, ino) == content


def test_a_closed_slip_takes_nothing_more_and_a_new_one_does(
    store: Store, rng: random.Random
) -> None:
    ino, handle, program = _begin(store)
    content = _bytes(rng, 3000)
    assert program.write(0, content[:1000])
    store.fsync(handle)
    assert not store.direct.is_open(ino)
    assert not program.write(1000, content[1000:2000])
    assert store.get_attributes(ino).size == 1000
    program.ask()
    assert program.write(1000, content[1000:])
    _close(store, handle)
    assert read_file(store, ino) == content
    program.die()


def test_another_opener_closes_the_slip_and_sees_everything(
    store: Store, rng: random.Random
) -> None:
    ino, handle, program = _begin(store)
    content = _bytes(rng, 2000)
    assert program.write(0, content)
    reader = store.open_file(ino, os.O_RDONLY)
    assert bytes(store.read(reader, 0, 4096)) == content
    assert not program.write(2000, b"more")
    with pytest.raises(BusyError, match="somebody else"):
        store.direct.lease(handle, 4096)
    store.release(reader)
    program.ask()
    assert program.write(2000, b"more")
    _close(store, handle)
    assert read_file(store, ino) == content + b"more"
    program.die()


def test_the_short_end_of_a_segment_is_no_want_of_room(shop: Shop, rng: random.Random) -> None:
    """Room is handed out in order, and the end of a segment may be less than a lease needs."""
    store = shop.new_ordinary(256 * MIB)
    Locks(store.media)
    for number in range(100):
        ino = write_file(store, 1, b"file", _bytes(rng, rng.randrange(MIB)))
        assert not store.volume.is_nearly_used_up, number
        handle = store.open_file(ino, os.O_RDWR)
        for lease in store.direct.lease(handle, 64 * MIB, count_max=8):
            assert lease.length_bytes >= LEASE_BYTES_MIN
        store.direct.settle(handle, done=True)
        _close(store, handle)


def test_a_killed_writer_leaves_the_old_content(store: Store, rng: random.Random) -> None:
    old = _bytes(rng, 9000)
    ino = write_file(store, 1, b"file", old)
    handle = store.open_file(ino, TRUNCATE)
    program = Program(store, handle, Locks(store.media))
    program.ask()
    assert program.write(0, _bytes(rng, 3000))
    program.count_copying(1)
    program.copy(b"half a write")
    program.die()
    _close(store, handle, killed=True)
    assert read_file(store, ino) == old
    assert store.direct.apart_bytes == 0


def test_room_waits_for_whoever_copies_and_comes_back_when_he_is_dead(
    store: Store, rng: random.Random
) -> None:
    ino, handle, program = _begin(store)
    lease = program.held()
    assert program.write(0, _bytes(rng, 500))
    program.count_copying(1)
    _close(store, handle)
    assert store.direct.apart_bytes == lease.length_bytes + lease.slip_bytes
    kept = read_file(store, ino)
    for number in range(40):  # whoever gets room now does not get this
        write_file(store, 1, b"other %d" % number, _bytes(rng, 3000))
    program.copy(_bytes(rng, lease.capacity_bytes - program.length))
    assert read_file(store, ino) == kept
    store.direct.maintain()
    assert store.direct.apart_bytes
    program.die()
    assert store.direct.maintain()
    assert store.direct.apart_bytes == 0


def test_room_comes_back_as_soon_as_nobody_copies(store: Store) -> None:
    _ino, handle, program = _begin(store)
    program.count_copying(1)
    assert not store.direct.apart_bytes
    _close(store, handle)
    assert store.direct.apart_bytes
    program.count_copying(-1)
    assert store.direct.maintain()
    # It may count itself there at any time, before it looks whether its slip is closed.
    assert store.direct.apart_bytes == program.held().slip_bytes
    program.die()
    assert store.direct.maintain()
    assert store.direct.apart_bytes == 0


@pytest.mark.parametrize("stopped", [False, True])
def test_what_was_stored_is_shared_with_a_copy(
    store: Store, rng: random.Random, stopped: bool
) -> None:
    """Of a program that goes on, and of one that is stopped in the middle of a write."""
    ino, handle, program = _begin(store)
    content = _bytes(rng, 5000)
    assert program.write(0, content)
    program.count_copying(int(stopped))
    if stopped:
        store.fsync(handle)
        assert store.direct.apart_bytes
    copy, target = store.create(1, b"copy", 0o644, 1, 1, os.O_RDWR)
    assert store.ranges.copy(handle, 0, target, 0, len(content)) == len(content)
    assert not store.direct.is_open(ino)
    _close(store, target)
    _close(store, handle)
    assert read_file(store, copy.ino) == read_file(store, ino) == content
    program.die()
    store.direct.maintain()
    assert store.direct.apart_bytes == 0


def test_room_of_a_file_that_is_gone_waits_as_well(store: Store, rng: random.Random) -> None:
    """Nothing is left in its segment but the room that somebody may still store into."""
    _ino, handle, program = _begin(store)
    lease = program.held()
    assert program.write(0, _bytes(rng, 500))
    program.count_copying(1)
    _close(store, handle)
    store.unlink(1, b"file")
    kept = [write_file(store, 1, b"other %d" % n, _bytes(rng, 30_000)) for n in range(30)]
    program.copy(_bytes(rng, lease.capacity_bytes - program.length))
    store.volume.space.collect_dead()
    for number, ino in enumerate(kept):
        assert len(read_file(store, ino)) == 30_000, number
    program.die()
    store.direct.maintain()
    assert store.direct.apart_bytes == 0


def test_a_program_that_is_done_gives_all_of_it_back(store: Store) -> None:
    _ino, handle, program = _begin(store)
    store.fsync(handle)
    program.ask()
    assert store.direct.apart_bytes
    store.direct.settle(handle, done=True)
    assert store.direct.apart_bytes == 0
    _close(store, handle)
    program.die()


def test_a_file_in_shreds_goes_through_the_kernel(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(128 << 20)
    ino, handle, program = _begin(store)
    content = bytearray(14_000)
    written = 0
    while store.direct.is_open(ino) and written < 7000:
        if program.length == program.held().capacity_bytes:
            store.direct.settle(handle, [program.held().lease_id])
            program.ask()
        offset = 2 * (6999 - written)
        data = _bytes(rng, 1)
        assert program.write(offset, data)
        content[offset : offset + 1] = data
        written += 1
        if written % 50 == 0:
            store.get_attributes(ino)
    assert 4000 < written < 4300
    size = store.get_attributes(ino).size
    assert bytes(store.read(handle, 0, size)) == bytes(content[:size])
    _close(store, handle)
    program.die()


def test_the_next_daemon_keeps_apart_what_a_survivor_can_store_into(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    ino = write_file(store, 1, b"kept", _bytes(rng, 2000))
    kept = read_file(store, ino)
    _lost, _handle, program = _begin(store)
    lease = program.held()
    assert program.write(0, _bytes(rng, 700))
    again = shop.reopen(store, clean=False)
    assert again.volume.space.held_count >= 1
    room_before = again.statfs().free_bytes
    rest = lease.capacity_bytes - program.length
    written = {}
    for number in range(60):
        name = b"new %d" % number
        written[write_file(again, 1, name, _bytes(rng, 3000))] = number
        if number % 7 == 0 and program.length < lease.capacity_bytes - rest // 10:
            program.copy(_bytes(rng, rest // 10))
    assert read_file(again, ino) == kept
    for other in written:
        assert len(read_file(again, other)) == 3000
    program.die()
    for number in range(60):
        again.unlink(1, b"new %d" % number)
    held_before = again.volume.space.held_count
    again.direct.maintain()
    assert again.volume.space.held_count == 0 < held_before
    while clean_round(again, 0.5):
        pass
    assert again.statfs().free_bytes >= room_before


def test_a_medium_that_somebody_can_store_into_is_not_made_anew(store: Store) -> None:
    _ino, _handle, program = _begin(store)
    store.abandon()
    with pytest.raises(BusyError, match="still has"):
        Store.format(store.media)
    program.die()


def _wrong(field: int, value: Callable[[int], int]) -> Callable[[list[int]], None]:
    def change(row: list[int]) -> None:
        row[field] = value(row[field])

    return change


@pytest.mark.parametrize(
    "change",
    [
        _wrong(0, lambda n: n + 1),
        _wrong(1, lambda n: n + 1),
        _wrong(2, lambda _: 1 << 63),
        _wrong(3, lambda _: 1 << 40),
        _wrong(4, lambda _: 0),
        _wrong(4, lambda _: 1 << 63),
        _wrong(6, lambda _: 1),
    ],
)
def test_a_wrong_descriptor_is_a_failed_write_of_that_file(
    store: Store, rng: random.Random, change: Callable[[list[int]], None]
) -> None:
    other = write_file(store, 1, b"other", b"untouched")
    old = _bytes(rng, 400)
    ino = write_file(store, 1, b"file", old)
    handle = store.open_file(ino, TRUNCATE)
    program = Program(store, handle, Locks(store.media))
    lease = program.ask()
    assert program.write(0, _bytes(rng, 100))
    start, tail_crc = program.copy(_bytes(rng, 100))
    row = [1, lease.lease_id, 100, start, 100, tail_crc, 0]
    change(row)
    at = lease.slip_offset + SLIP_DESCRIPTORS_AT + SLIP_DESCRIPTOR_BYTES
    store.media.store(at, descriptor(*row))
    store.media.store_u64(lease.slip_offset, 2)
    with pytest.raises(CxlfsError):
        store.flush(handle, writer_killed=False)
    assert not store.direct.is_open(ino)
    store.release(handle)
    assert read_file(store, ino) == old
    assert read_file(store, other) == b"untouched"
    program.die()


@pytest.mark.parametrize("count", [1000, 1 << 40, SLIP_CLOSED | 5])
def test_a_count_of_descriptors_that_are_not_there(store: Store, count: int) -> None:
    _ino, handle, program = _begin(store)
    store.media.store_u64(program.held().slip_offset, count)
    with pytest.raises(CxlfsError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    program.die()


def test_a_store_without_room_gives_no_lease(store: Store) -> None:
    fill(store)
    _attributes, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    with pytest.raises(NoSpaceError):
        store.direct.lease(handle, 1 << 20)
    _close(store, handle)


def test_a_write_that_needs_room_takes_back_what_is_not_used(
    store: Store, rng: random.Random
) -> None:
    ino, handle, program = _begin(store)
    assert program.write(0, _bytes(rng, 100))
    fill(store)
    assert not store.direct.is_open(ino)
    _close(store, handle)
    assert store.get_attributes(ino).size == 100
    program.die()


def test_writes_through_the_kernel_in_between(store: Store, rng: random.Random) -> None:
    ino, handle, program = _begin(store)
    model = bytearray(20_000)
    for _ in range(60):
        length = rng.randint(1, 900)
        offset = rng.randint(0, len(model) - length)
        data = _bytes(rng, length)
        if rng.random() < 0.5:
            store.write(handle, offset, data)
        else:
            if not store.direct.is_open(ino) or (
                program.length + length > program.held().capacity_bytes
            ):
                program.ask()
            assert program.write(offset, data)
        model[offset : offset + length] = data
    size = store.get_attributes(ino).size
    assert bytes(store.read(handle, 0, size)) == bytes(model[:size])
    _close(store, handle)
    assert read_file(store, ino) == bytes(model[:size])
    program.die()


def test_truncating_in_between(store: Store, rng: random.Random) -> None:
    ino, handle, program = _begin(store)
    content = _bytes(rng, 3000)
    assert program.write(0, content)
    store.set_attributes(ino, size=1000, handle=handle)
    assert store.get_attributes(ino).size == 1000
    store.set_attributes(ino, size=0, handle=handle)
    assert not store.direct.is_open(ino)
    program.ask()
    assert program.write(0, b"anew")
    _close(store, handle)
    assert read_file(store, ino) == b"anew"
    program.die()


def test_renaming_over_an_old_file_publishes(shop: Shop, store: Store, rng: random.Random) -> None:
    old = write_file(store, 1, b"final", _bytes(rng, 300))
    ino, handle, program = _begin(store, b"temporary")
    content = _bytes(rng, 4000)
    assert program.write(0, content)
    store.rename(1, b"temporary", 1, b"final")
    assert not program.write(4000, b"late")
    again = shop.reopen(store, clean=False)
    assert again.lookup(1, b"final").ino == ino != old
    assert read_file(again, ino) == content
    del handle
    program.die()


def test_a_removed_file_gives_its_room_back(shop: Shop, store: Store, rng: random.Random) -> None:
    shop.directory_times = False
    ino, handle, program = _begin(store)
    assert program.write(0, _bytes(rng, 1000))
    store.unlink(1, b"file")
    assert program.write(1000, _bytes(rng, 500))
    assert store.get_attributes(ino).size == 1500
    _close(store, handle)
    assert store.direct.describe().files == 0
    program.die()


def test_the_periodic_commit_publishes_what_was_appended(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    ino, _handle, program = _begin(store)
    content = _bytes(rng, 2000)
    assert program.write(0, content)
    store.commits.commit_all()
    assert not program.write(2000, b"x")
    again = shop.reopen(store, clean=False)
    assert read_file(again, ino) == content
    assert again.get_xattr(ino, b"user.cxlfs.state") == b"incomplete"
    program.die()


def test_a_wrong_checksum_is_found_by_whoever_reads(store: Store, rng: random.Random) -> None:
    ino, handle, program = _begin(store)
    start, tail_crc = program.copy(_bytes(rng, 100))
    assert program.append(0, start, 100, tail_crc ^ 1)
    _close(store, handle)
    reader = store.open_file(ino, os.O_RDONLY)
    with pytest.raises(CxlfsError):
        store.read(reader, 0, 100)
    store.release(reader)
    store.unlink(1, b"file")
    program.die()


def test_a_store_that_was_emptied_has_room_for_a_lease(shop: Shop, store: Store) -> None:
    shop.directory_times = False
    fill(store)
    store.unlink(1, b"filler")
    ino, handle, program = _begin(store)
    assert program.write(0, b"there is room")
    _close(store, handle)
    assert read_file(store, ino) == b"there is room"
    program.die()


def test_no_other_program_maps_memory_of_this_process(store: Store) -> None:
    with pytest.raises(InvalidArgumentError, match="memory of this process"):
        store.direct.attachments.attach()
    assert store.media.granularity in {Granularity.LINE, Granularity.PAGE}

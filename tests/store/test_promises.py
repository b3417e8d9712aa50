"""Room that fallocate promises: told at once, kept whatever others write, and given back."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.store import Store, UnfinishedError
from cxlfs.store.promises import RANGES_MAX
from cxlfs.store.unit_rules import UnitsMode
from tests.store.test_ranges import data_of
from tests.support.shop import Shop, close, create, until_no_space
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import finish_work, kept_count, make, remove_tree, save, shards

MIB = 1 << 20


def test_no_room_is_told_at_once(store: Store) -> None:
    ino, handle = create(store, b"a", b"abc")
    before = store.statfs()
    for keep_size in (False, True):
        with pytest.raises(NoSpaceError):
            store.allocate(handle, 0, before.free_bytes + 10_000, keep_size=keep_size)
    assert store.statistics().no_space_errors == 2
    assert store.statfs() == before
    assert store.get_attributes(ino).size == 3
    close(store, handle)  # it is no failed write
    assert read_file(store, ino) == b"abc"


@pytest.mark.parametrize("piece", [4096, 10_000, 65_536])
@pytest.mark.parametrize("size", [10_000, 500_000, 1_500_000])
def test_what_was_allocated_can_be_written(store: Store, size: int, piece: int) -> None:
    """Whatever others write meanwhile, and however."""
    ino, handle = create(store, b"a", b"begun")
    store.allocate(handle, 0, size)
    assert store.get_attributes(ino).size == size
    other, greedy = create(store, b"greedy")
    eaten = 0

    def eat() -> int:
        first = eaten // 3000
        return 3000 * until_no_space(
            lambda n: store.write(greedy, eaten + 3000 * n, data_of(3000, first + n))
        )

    eaten += eat()
    assert eaten > 100_000
    data = data_of(size)
    for start in range(0, size, piece):
        store.write(handle, start, data[start : start + piece])
        if start // piece % 7 == 0:
            eaten += eat()
    close(store, handle)
    assert read_file(store, ino) == data
    store.set_attributes(other, size=eaten, handle=greedy)
    close(store, greedy)


def test_a_file_keeps_its_own_promise(store: Store) -> None:
    """What it writes elsewhere does not use the room up."""
    ino, handle = create(store, b"a")
    store.allocate(handle, 0, 400_000, keep_size=True)
    start = 1 << 26
    written = until_no_space(lambda n: store.write(handle, start + 8192 * n, data_of(8192))) * 8192
    store.write(handle, 0, data_of(400_000))
    store.set_attributes(ino, size=start + written, handle=handle)
    close(store, handle)


def test_a_promise_ends(store: Store) -> None:
    """By writing, punching, truncation and overwriting; not by closing."""
    free = store.statfs().free_bytes
    promised = store.versions.promises.bytes_open

    def room_for(size: int) -> int:
        blocks = -(-size // 4096)
        return 4096 * (blocks + 4096 * blocks // store.volume.space.lease_bytes_max + 8)

    _, handle = create(store, b"a")
    store.allocate(handle, 0, 400_000)
    assert promised() == room_for(400_000)
    assert free - store.statfs().free_bytes == promised()
    store.allocate(handle, 100_000, 100_000)
    assert promised() == room_for(400_000)
    store.fsync(handle)
    assert promised() == room_for(400_000)
    store.write(handle, 0, bytes(200_000))
    assert promised() == room_for(401_408 - 200_000), "whole blocks are promised"
    store.allocate(handle, 200_000, 100_000, keep_size=True, punch=True)
    assert promised() == room_for(100_000)
    store.set_attributes(store.files.get(handle).inode.ino, size=350_000, handle=handle)
    assert promised() == room_for(50_000)
    store.allocate(handle, 0, 200_000, zero=True)
    assert promised() == room_for(53_248 + 200_704)
    store.set_attributes(store.files.get(handle).inode.ino, size=0, handle=handle)
    assert promised() == 0
    store.allocate(handle, 0, 100_000, keep_size=True)
    ino = store.files.get(handle).inode.ino
    close(store, handle)
    assert promised() == room_for(100_000)
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 0, bytes(50_000))
    close(store, handle)
    assert promised() == room_for(102_400 - 50_000)
    close(store, store.open_file(ino, os.O_WRONLY | os.O_TRUNC))
    assert promised() == 0
    handle = store.open_file(ino, os.O_WRONLY)
    store.allocate(handle, 0, 100_000, keep_size=True)
    store.unlink(1, b"a")
    assert promised() == room_for(100_000)
    store.release(handle)
    assert promised() == 0


def test_blocks_show_what_is_promised(store: Store) -> None:
    """As du shows it; also of a range that begins and ends inside blocks."""
    ino, handle = create(store, b"a")

    def blocks() -> int:
        assert store.get_attributes(ino).allocated_bytes % 4096 == 0
        return store.get_attributes(ino).allocated_bytes // 4096

    store.allocate(handle, 1, 4096, keep_size=True)
    assert blocks() == 2
    store.allocate(handle, 40_960, 8192)
    assert blocks() == 4
    for start, size in ((45_055, 2), (40_960, 4096)):
        store.write(handle, start, bytes(size))
        assert blocks() == 4
    store.write(handle, 81_920, bytes(4096))
    assert blocks() == 5
    close(store, handle)
    assert blocks() == 5
    store.set_attributes(ino, size=4096)
    assert blocks() == 1
    assert store.get_attributes(ino).size == 4096


@pytest.mark.parametrize("piece", [4096, 10_000, 65_536])
@pytest.mark.parametrize("ordinary", [False, True], ids=["small", "ordinary"])
def test_all_that_statfs_calls_available_can_be_allocated(
    shop: Shop, ordinary: bool, piece: int
) -> None:
    """To the block, and then written, whatever else wants room; a little more is refused."""
    store = shop.new_ordinary(64 << 20) if ordinary else shop.new()
    for number in range(20):
        write_file(store, 1, b"f%d" % number, data_of(8192, number))
    _, idle = create(store, b"idle", data_of(4096))
    ino, handle = create(store, b"a")
    before = store.statfs()
    size = before.available_bytes
    assert before.free_bytes // 2 < size < before.free_bytes
    with pytest.raises(NoSpaceError):
        store.allocate(handle, 0, before.free_bytes)
    store.allocate(handle, 0, size)
    assert store.statfs().available_bytes == 0
    greedy_ino, greedy = create(store, b"greedy")
    taken = 3000 * until_no_space(lambda n: store.write(greedy, 3000 * n, data_of(3000, n)))
    for start in range(0, size, piece):
        store.write(handle, start, data_of(min(piece, size - start), start))
    close(store, handle)
    assert store.get_attributes(ino).size == size
    store.set_attributes(greedy_ino, size=taken, handle=greedy)
    close(store, greedy)
    close(store, idle)


def test_room_of_idle_files_can_be_promised(store: Store) -> None:
    """What open files were given and do not use is taken back for it."""
    handles = []
    for number in range(20):
        handles.append(create(store, b"f%d" % number, data_of(1000))[1])
        store.fsync(handles[-1])
    _, handle = create(store, b"a")
    size = store.statfs().free_bytes * 3 // 4
    assert store.volume.space.available_bytes < size
    store.allocate(handle, 0, size)
    for opened in (*handles, handle):
        close(store, opened)


def test_many_small_promises_become_few(store: Store) -> None:
    ino, handle = create(store, b"a")
    count = RANGES_MAX + 40
    for number in range(count):
        store.allocate(handle, number * 8192, 1, keep_size=True)
    inode = store.namespace.get(ino)
    assert len(store.versions.promises.of(inode)) == RANGES_MAX
    assert inode.content.promised()[0] == (count + 40) * 4096
    for number in range(count):
        store.write(handle, number * 8192, data_of(4096, number))
    assert inode.content.promised()[0] == 40 * 4096
    close(store, handle)


def test_promises_against_a_count_of_holes(store: Store, rng: random.Random) -> None:
    """Whatever is written, punched, cut and shared."""
    ino, handle = create(store, b"a")
    _, other = create(store, b"b", data_of(100_000))
    inode = store.namespace.get(ino)
    end = 200_000
    for _ in range(300):
        offset, length = rng.randrange(end), rng.randrange(1, 20_000)
        what = rng.randrange(6)
        if what == 0:
            store.allocate(handle, offset, length, keep_size=rng.random() < 0.5)
        elif what == 1:
            store.allocate(handle, offset, length, keep_size=True, punch=True)
        elif what == 2:
            store.allocate(handle, offset, length, zero=True)
        elif what == 3:
            store.ranges.copy(other, rng.randrange(80_000), handle, offset, length)
        elif what == 4:
            store.write(handle, offset, data_of(length))
        else:
            size = rng.randrange(1, inode.content.size + 5000)
            store.set_attributes(ino, size=size, handle=handle)
        blocks = 0
        for low, high in store.versions.promises.of(inode):
            holes = high - low - inode.content.mapped(low, high - low)[0]
            blocks += -(-holes // 4096)
        assert inode.content.promised()[0] == blocks * 4096
        assert store.volume.engine.promised_bytes == blocks * 4096
    close(store, handle)
    close(store, other)


def test_allocating_makes_room(store: Store) -> None:
    """What is dead or kept aside is given back for it."""
    store.past.is_on = False
    for number in range(10):
        write_file(store, 1, b"f%d" % number, data_of(200_000, number))
    for number in range(0, 10, 2):
        store.unlink(1, b"f%d" % number)
    ino, handle = create(store, b"a")
    before = store.statfs().available_bytes
    assert store.volume.space.available_bytes < before * 3 // 4
    size = before * 9 // 10  # between what is left some room stays
    store.allocate(handle, 0, size)
    for start in range(0, size, 65536):
        store.write(handle, start, data_of(min(65536, size - start)))
    close(store, handle)
    assert store.get_attributes(ino).size == size


def half_emptied(shop: Shop) -> Store:
    """Full of small files, of which every other one was removed."""
    store, count = shop.new_ordinary(96 * MIB), 0
    while store.statfs().free_bytes > 4 * MIB:
        write_file(store, 1, b"f%d" % count, bytes(4096))
        count += 1
    for number in range(0, count, 2):
        store.unlink(1, b"f%d" % number)
    return store


def test_allocating_compacts_as_much_as_it_needs(shop: Shop) -> None:
    """However many steps nothing is free after: each moves a little of what is alive."""
    store = half_emptied(shop)
    _, handle = create(store, b"a")
    size = store.statfs().available_bytes * 6 // 10
    assert store.volume.space.available_bytes < size // 8
    store.allocate(handle, 0, size)
    assert store.volume.counters.moved_bytes > 8 * MIB
    assert store.volume.space.available_bytes >= size
    close(store, handle)


def allocate(store: Store, handle: int, size: int, between: Callable[[], object]) -> int:
    """As a request of the kernel does; how many steps came first."""
    steps = 0
    while True:
        try:
            store.ranges.allocate(handle, 0, size, in_steps=True)
        except UnfinishedError:
            steps += 1
            between()
        else:
            return steps


def test_others_have_their_turn_while_room_is_made(shop: Shop) -> None:
    """Behind each step of the cleaner; nothing is promised, and nobody refused, until all is."""
    store = half_emptied(shop)
    _, handle = create(store, b"a")
    size = store.statfs().available_bytes * 6 // 10
    moved = [store.volume.counters.moved_bytes]
    others: list[int] = []

    def other() -> None:
        assert store.versions.promises.bytes_open() == 0
        moved.append(store.volume.counters.moved_bytes)
        others.append(write_file(store, 1, b"other%d" % len(others), b"data"))

    steps = allocate(store, handle, size, other)
    print(f"{steps} steps, {moved[-1] - moved[0]} bytes moved")
    assert moved[-1] - moved[0] > 8 * MIB
    assert max(after - before for before, after in itertools.pairwise(moved)) <= 4 * MIB
    assert steps >= 5
    assert store.versions.promises.bytes_open() >= size
    assert store.volume.space.available_bytes >= size
    assert all(read_file(store, ino) == b"data" for ino in others)
    close(store, handle)


def test_what_cannot_be_had_in_steps_is_refused(shop: Shop) -> None:
    """However often it is asked for on one handle, and what was told before the steps is kept."""
    store = shop.new()
    for number in range(10):
        write_file(store, 1, b"f%d" % number, data_of(200_000, number))
    for number in range(0, 10, 2):
        store.unlink(1, b"f%d" % number)
    _, handle = create(store, b"a")
    before = store.statfs()
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            allocate(store, handle, before.free_bytes, lambda: None)
        assert store.files.get(handle).effort is None
        assert store.versions.promises.bytes_open() == 0
    allocate(store, handle, before.available_bytes * 9 // 10, lambda: None)
    close(store, handle)


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("kept", ["not wanted", "removed"])
def test_what_units_keep_is_given_up_for_it(shop: Shop, kept: str, in_steps: bool) -> None:
    """As for a write: what counts as kept although its room can be had refuses nobody. Whoever asks
    for more than the whole store has gets nothing, and it costs nothing.
    """
    store = shop.new(16 * MIB, units=UnitsMode.AUTO)
    directory = make(store, b"checkpoint-5")
    save(store, directory, shards(1, 60))
    finish_work(store)
    if kept == "not wanted":
        save(store, directory, shards(2, 60))
    elif kept == "removed":
        remove_tree(store, 1, b"checkpoint-5")
    _, handle = create(store, b"a")
    free, total = store.statfs().free_bytes, store.statfs().total_bytes
    if kept == "not wanted":
        assert kept_count(store) == 1
        with pytest.raises(NoSpaceError):
            store.ranges.allocate(handle, 0, total + 1, in_steps=in_steps)
    size = free + MIB
    if in_steps:
        assert allocate(store, handle, size, lambda: None) > 0
    else:
        store.allocate(handle, 0, size)
    assert store.versions.promises.bytes_open() > size
    store.set_attributes(store.files.get(handle).inode.ino, size=0, handle=handle)
    close(store, handle)

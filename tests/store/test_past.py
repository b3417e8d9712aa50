"""History: which deaths leave a row, what it says, and when it is given back."""

from __future__ import annotations

import os
import random

from cxlfs.errors import NoSpaceError
from cxlfs.store import Store
from cxlfs.store.namespace import FileKind
from cxlfs.store.past_order import Limits
from cxlfs.store.past_rows import Death, Row, may_see
from cxlfs.store.past_space import POOL_MIN
from tests.support.shop import Shop, close, create
from tests.support.stores import read_file, write_file


def overwrite(store: Store, name: bytes, data: bytes) -> None:
    handle = store.open_file(store.lookup(1, name).ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, data)
    close(store, handle)


def data_of(row: Row) -> bytes:
    found = row.data
    assert found is not None
    return bytes(found.read(0, found.size))


def fill(store: Store, rng: random.Random) -> dict[bytes, bytes]:
    """Files until one has no room; those that are complete."""
    contents: dict[bytes, bytes] = {}
    while True:
        name, data = b"f%d" % len(contents), rng.randbytes(60_000)
        _, handle = create(store, name)
        try:
            store.write(handle, 0, data)
            store.flush(handle, writer_killed=False)
        except NoSpaceError:
            return contents
        finally:
            store.release(handle)
        contents[name] = data


def rows(store: Store) -> list[tuple[bytes, Death]]:
    return [(row.name, row.death) for row in store.past]


# --- ways of dying ------------------------------------------------------------------------------


def test_an_overwrite_leaves_what_was_there(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"old")
    born = store.namespace.get(ino).commit_lsn
    store.set_xattr(ino, b"user.x", b"1")
    overwrite(store, b"a", b"new")
    [row] = store.past
    assert (row.name, row.parent, row.ino, row.kind) == (b"a", 1, ino, FileKind.FILE)
    assert (row.death, row.born_lsn, data_of(row)) == (Death.OVERWRITTEN, born, b"old")
    assert row.died_lsn == store.namespace.get(ino).commit_lsn
    assert (row.xattrs, row.size, row.is_incomplete) == ({b"user.x": b"1"}, 3, False)
    assert store.past.versions_of(1, b"a") == store.past.of_inode(ino) == [row]
    assert read_file(store, ino) == b"new"


def test_the_last_name_leaves_everything(store: Store) -> None:
    write_file(store, 1, b"file", b"content")
    store.make_symlink(1, b"link", b"target", 1, 2)
    store.make_node(1, b"fifo", 0o010640, 0, 1, 2)
    store.make_directory(1, b"dir", 0o750, 3, 4)
    for name in (b"file", b"link", b"fifo"):
        store.unlink(1, name)
    store.remove_directory(1, b"dir")
    file, link, fifo, directory = store.past
    assert data_of(file) == b"content"
    assert (link.target, link.kind, link.uid, link.gid) == (b"target", FileKind.SYMLINK, 1, 2)
    assert (fifo.kind, fifo.mode & 0o7777) == (FileKind.FIFO, 0o640)
    assert (directory.kind, directory.mode & 0o7777, directory.uid) == (
        FileKind.DIRECTORY,
        0o750,
        3,
    )
    assert {row.death for row in store.past} == {Death.REMOVED}
    assert len({row.key for row in store.past}) == 4


def test_a_rename_over_leaves_what_was_there(store: Store) -> None:
    write_file(store, 1, b"a", b"old")
    write_file(store, 1, b"b", b"new")
    store.rename(1, b"b", 1, b"a")
    assert rows(store) == [(b"a", Death.RENAMED_OVER)]
    assert data_of(next(iter(store.past))) == b"old"


def test_an_exchange_publishes_and_leaves_what_that_replaced(store: Store) -> None:
    write_file(store, 1, b"a", b"old")
    write_file(store, 1, b"b", b"other")
    handle = store.open_file(store.lookup(1, b"a").ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"new")
    store.rename(1, b"a", 1, b"b", exchange=True)
    close(store, handle)
    assert [data_of(row) for row in store.past] == [b"old"]


def test_a_change_in_place_leaves_the_bytes_before(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"x" * 10_000)
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 5000, b"yyy")
    close(store, handle)
    [row] = store.past
    assert (row.death, data_of(row)) == (Death.CHANGED, b"x" * 10_000)


def test_an_append_and_a_name_of_several_leave_nothing(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"x" * 8192)
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 8192, b"y" * 5000)
    close(store, handle)
    store.link(ino, 1, b"b")
    store.unlink(1, b"a")
    assert rows(store) == []
    store.unlink(1, b"b")
    assert rows(store) == [(b"b", Death.REMOVED)]


def test_what_was_never_committed_leaves_nothing(store: Store) -> None:
    _, handle = create(store, b"new")
    store.write(handle, 0, b"x")
    store.unlink(1, b"new")
    store.release(handle)
    write_file(store, 1, b"a", b"old")
    killed = store.open_file(store.lookup(1, b"a").ino, os.O_WRONLY | os.O_TRUNC)
    store.write(killed, 0, b"half")
    store.flush(killed, writer_killed=True)
    store.release(killed)
    assert rows(store) == []
    assert read_file(store, store.lookup(1, b"a").ino) == b"old"


def test_a_file_that_is_open_when_its_name_goes(store: Store) -> None:
    """What is written to it afterwards was never committed."""
    ino = write_file(store, 1, b"a", b"committed")
    handle = store.open_file(ino, os.O_RDWR)
    store.unlink(1, b"a")
    store.write(handle, 0, b"uncommitt")
    [row] = store.past
    assert data_of(row) == b"committed"
    store.release(handle)
    assert data_of(row) == b"committed"
    assert store.volume.engine.statistics().kept_bytes == 0


def test_a_large_content_in_several_records(shop: Shop, rng: random.Random) -> None:
    store = shop.new(16 << 20)
    first, second = rng.randbytes(3_000_000), rng.randbytes(3_000_000)
    write_file(store, 1, b"a", first)
    overwrite(store, b"a", second)
    assert [data_of(row) for row in store.past] == [first]


def test_off(shop: Shop) -> None:
    store = shop.new(history=False)
    write_file(store, 1, b"a", b"old")
    overwrite(store, b"a", b"new")
    store.unlink(1, b"a")
    assert len(store.past) == 0
    assert store.volume.engine.statistics().extents == 0


def test_who_may_see(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"old")
    store.set_attributes(ino, uid=7, mode=0o644)
    store.unlink(1, b"a")
    [row] = store.past
    assert [may_see(row, uid) for uid in (0, 7, 8)] == [True, True, False]


# --- room ---------------------------------------------------------------------------------------


def test_history_counts_as_free(store: Store, rng: random.Random) -> None:
    before = store.statfs()
    for _ in range(3):
        write_file(store, 1, b"a", rng.randbytes(300_000))
        store.unlink(1, b"a")
    assert store.volume.engine.statistics().past_bytes >= 900_000
    assert store.statfs().free_bytes == before.free_bytes


def test_all_room_can_be_filled_although_history_has_it(store: Store, rng: random.Random) -> None:
    """As much as in an empty store, and a deletion frees it at once."""
    amounts = []
    for _ in range(3):
        contents = fill(store, rng)
        amounts.append(len(contents))
        assert {n: read_file(store, store.lookup(1, n).ino) for n in contents} == contents
        for name in [entry[0] for entry in names(store)]:
            store.unlink(1, name)
    assert min(amounts[1:]) >= amounts[0] - 1


def names(store: Store) -> list[tuple[bytes, int]]:
    return list((store.namespace.get(1).entries or {}).items())


def test_the_pool_is_filled_in_the_background(store: Store, rng: random.Random) -> None:
    for number in range(100):
        write_file(store, 1, b"f", rng.randbytes(40_000))
        store.unlink(1, b"f")
        while store.maintain(float(number)):
            pass
    space = store.volume.space
    assert space.free_count >= store.volume.refresh_reserve() + POOL_MIN
    assert len(store.past) > 5
    assert [row.key for row in store.past] == sorted(row.key for row in store.past)


def test_the_oldest_goes_first_and_the_last_of_each_name_last(store: Store) -> None:
    for name, data in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", b"2"), (b"a", b"3")):
        write_file(store, 1, name, data * 3000)
        store.unlink(1, name)
    order = []
    while (row := store.past.order.next()) is not None:
        order.append((row.name, data_of(row)[:1]))
        store.past.forget(row)
    assert order == [(b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"b", b"2"), (b"a", b"3")]


def test_limits(store: Store) -> None:
    store.past.limits = Limits(rows=5)
    for number in range(20):
        write_file(store, 1, b"a", b"%d" % number)
        store.unlink(1, b"a")
    assert [data_of(row) for row in store.past] == [b"%d" % n for n in range(15, 20)]
    store.past.limits = Limits(memory_bytes=store.past.memory_bytes)
    write_file(store, 1, b"a", b"last")
    store.unlink(1, b"a")
    assert data_of(list(store.past)[-1]) == b"last"
    assert store.past.memory_bytes <= store.past.limits.memory_bytes


def test_held_rows_stay_until_a_write_would_fail(shop: Shop, rng: random.Random) -> None:
    store = shop.new()
    kept, pinned = rng.randbytes(200_000), rng.randbytes(200_000)
    for data in (kept, pinned):
        write_file(store, 1, b"a", data)
        store.unlink(1, b"a")
    first, second = store.past
    free = store.statfs().free_bytes
    store.past.hold(first)
    store.past.hold(second, pinned=True)
    assert store.statfs().free_bytes <= free - 400_000
    fill(store, rng)
    assert first.is_gone
    assert data_of(second) == pinned
    store.past.release(second)
    assert store.volume.space.history.make_free(len(store.volume.space.states))
    assert second.is_gone


def test_the_cleaner_moves_what_is_held_and_forgets_what_is_past(
    store: Store, rng: random.Random
) -> None:
    contents = {b"f%d" % number: rng.randbytes(9000) for number in range(60)}
    for name, data in contents.items():
        write_file(store, 1, name, data)
    for number in range(60):
        if number % 3:
            store.unlink(1, b"f%d" % number)
    held = list(store.past)[::4]
    for row in held:
        store.past.hold(row)
    before = store.volume.engine.usage().sum()
    while store.cleaner.compact(0.99):
        pass
    assert store.volume.engine.usage().sum() <= before
    assert store.volume.counters.moved_bytes > 0
    assert store.past.content_count < 40
    assert [data_of(row) for row in held] == [contents[row.name] for row in held]
    for number in range(0, 60, 3):
        name = b"f%d" % number
        assert read_file(store, store.lookup(1, name).ino) == contents[name]


def test_an_image_leaves_history_out(store: Store, rng: random.Random) -> None:
    write_file(store, 1, b"a", rng.randbytes(100_000))
    alone = store.volume.image_bytes_estimate()
    store.unlink(1, b"a")
    estimate = store.volume.image_bytes_estimate()
    assert estimate < alone
    store.volume.rollover()
    _, _, extents, _ = store.volume.engine.export_maps([])
    assert len(extents) == 0
    assert len(store.past) == 1


def test_the_image_of_a_closed_store_has_nothing_of_it(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"x" * 5000)
    store.unlink(1, b"a")
    store = shop.reopen(store, clean=True, history=False)
    assert len(store.past) == 0
    assert store.volume.engine.statistics().extents == 0


def test_two_hundred_thousand_rows_are_searched_by_columns(store: Store) -> None:
    """Without a look at each row: of the blocks, and what is found in them."""
    for number in range(9000):
        store.make_node(1, b"n%d" % (number % 100), 0o010644, 0, 0, 0)
        store.unlink(1, b"n%d" % (number % 100))
    past = store.past
    assert len(past) == 9000
    assert len(past.versions_of(1, b"n7")) == 90
    assert len(past.died_in(1)) == 9000
    for row in list(past)[:8900]:
        past.forget(row)
    assert len(past.versions_of(1, b"n7")) == 1
    assert len(past.died_in(1)) == 100

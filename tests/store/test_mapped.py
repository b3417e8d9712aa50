"""Files that programs have mapped: nothing of them moves, whatever becomes of the file."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import BusyError, ExistsError, InvalidArgumentError, LimitError
from cxlfs.native.direct import HeldContent
from cxlfs.store import Store
from tests.support.direct_format import rows_of
from tests.support.slips import Locks, Watches
from tests.support.stores import clean_round, write_file


def test_a_mapped_file_stays_where_it_is(store: Store, rng: random.Random) -> None:
    content = rng.randbytes(30_000)
    ino = write_file(store, 1, b"file", content)
    reader = store.open_file(ino, os.O_RDONLY)
    part = store.direct.mapped.map(reader, 0, 16_000)
    assert part.next_offset == part.size_bytes == len(content)
    rows = rows_of(part.payload, part.row_count)
    write_file(store, 1, b"file", rng.randbytes(10_000))
    for number in range(30):
        write_file(store, 1, b"other %d" % number, rng.randbytes(3000))
        store.unlink(1, b"other %d" % number)
    while clean_round(store, 0.9):
        pass
    seen = bytearray(len(content))
    for row in rows:
        seen[row.file_offset : row.file_offset + row.length_bytes] = store.media.read(
            row.extent_media_offset + row.extent_offset, row.length_bytes
        )
    assert bytes(seen) == content
    store.direct.mapped.unmap(reader)
    store.release(reader)
    assert store.direct.describe().mapped_files == 0


def test_a_file_in_very_many_pieces_is_not_mapped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cxlfs.store.mapped.PIECES_MAX", 2)
    ino = write_file(store, 1, b"file", b"x" * 9000)
    writer = store.open_file(ino, os.O_RDWR)
    for offset in (5000, 1000):
        store.write(writer, offset, b"y")
    with pytest.raises(LimitError, match="more than 2 pieces"):
        store.direct.mapped.map(writer, 0, 16_000)
    store.flush(writer, writer_killed=False)
    store.release(writer)
    assert store.direct.describe().mapped_files == 0


def test_a_mapping_outlives_its_handle_while_it_is_locked(store: Store) -> None:
    ino = write_file(store, 1, b"file", b"x" * 9000)
    locks = Locks(store.media)
    reader = store.open_file(ino, os.O_RDONLY)
    part = store.direct.mapped.map(reader, 0, 16_000)
    with pytest.raises(InvalidArgumentError, match="not locked"):
        store.direct.mapped.confirm(reader)
    for row in rows_of(part.payload, part.row_count):
        place, length = row.extent_media_offset + row.extent_offset, row.length_bytes
        locks.take("program", place, length)
    store.direct.mapped.confirm(reader)
    store.release(reader)
    store.unlink(1, b"file")
    for number in range(200):
        write_file(store, 1, b"other", bytes([number]) * 5000)
        store.volume.release_dead()
    assert store.media.read(place, length) == b"x" * length
    assert not store.direct.maintain()
    locks.drop("program")
    assert store.direct.maintain()


# --- watched files --------------------------------------------------------------------------------


def watch(store: Store, ino: int) -> tuple[int, int]:
    """A reader, and its watch."""
    reader = store.open_file(ino, os.O_RDONLY)
    return reader, store.direct.mapped.map(reader, 0, 16_000, watched=True).watch


def write_open(store: Store, ino: int) -> int:
    return store.open_file(ino, os.O_WRONLY)


@pytest.mark.parametrize(
    "change",
    [
        write_open,
        lambda store, ino: store.open_file(ino, os.O_RDWR | os.O_TRUNC),
        lambda store, ino: store.open_file(ino, os.O_RDONLY | os.O_TRUNC),
        lambda store, ino: store.set_attributes(ino, size=5),
        lambda store, _: store.create(1, b"file", 0o644, 0, 0, os.O_RDWR),
    ],
    ids=["opened", "emptied", "emptied by a reader", "cut by its name", "created again"],
)
def test_a_watch_ends_before_a_file_can_change(
    store: Store, change: Callable[[Store, int], object]
) -> None:
    watches = Watches(store.media)
    ino = write_file(store, 1, b"file", b"x" * 9000)
    other = write_file(store, 1, b"other", b"y" * 9000)
    _, watched = watch(store, ino)
    _, beside = watch(store, other)
    assert watches.held == {watched, beside}
    try:
        change(store, ino)
    except ExistsError:
        store.open_file(ino, os.O_RDWR)
    assert watches.held == {beside}


def test_a_file_that_somebody_may_write_to_is_not_watched(store: Store) -> None:
    watches = Watches(store.media)
    ino = write_file(store, 1, b"file", b"x" * 9000)
    writer = write_open(store, ino)
    reader = store.open_file(ino, os.O_RDONLY)
    with pytest.raises(BusyError, match="open for writing"):
        store.direct.mapped.map(reader, 0, 16_000, watched=True)
    assert store.direct.mapped.map(reader, 0, 16_000).watch == 0
    store.flush(writer, writer_killed=False)
    store.release(writer)
    first = store.direct.mapped.map(reader, 0, 16_000, watched=True).watch
    second = store.direct.mapped.map(reader, 0, 16_000, watched=True).watch
    assert watches.held == {second} != {first}
    assert store.direct.mapped.map(reader, 0, 16_000).watch == 0
    assert not watches.held


def test_a_watch_ends_before_its_bytes_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    watches = Watches(store.media)
    ino = write_file(store, 1, b"file", b"x" * 9000)
    held: list[set[int]] = []
    close = HeldContent.close
    monkeypatch.setattr(
        HeldContent, "close", lambda self: (held.append(set(watches.held)), close(self))[1]
    )
    reader, _ = watch(store, ino)
    store.direct.mapped.unmap(reader)
    store.release(reader)
    reader, _ = watch(store, ino)
    store.unlink(1, b"file")
    assert watches.held, "a name is nothing to the file"
    store.release(reader)
    kept = write_file(store, 1, b"kept", b"x" * 9000)
    watch(store, kept)
    store.close()
    assert len(held) >= 3
    assert not any(held)
    assert not watches.held


def test_a_medium_of_this_process_is_not_watched(store: Store) -> None:
    ino = write_file(store, 1, b"file", b"x" * 9000)
    with pytest.raises(BusyError, match="no other process"):
        watch(store, ino)
    assert store.direct.describe().mapped_files == 0


def test_so_many_files_are_watched(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cxlfs.store.mapped.WATCHES_MAX", 2)
    watches = Watches(store.media)
    ino = write_file(store, 1, b"file", b"x" * 9000)
    readers = [watch(store, ino)[0] for _ in range(2)]
    with pytest.raises(BusyError, match="2 files"):
        watch(store, ino)
    assert len(watches.held) == 2
    store.release(readers[0])
    watch(store, ino)

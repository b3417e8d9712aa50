"""Files that programs have mapped: nothing of them moves, whatever becomes of the file."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.errors import InvalidArgumentError, LimitError
from cxlfs.store import Store
from tests.support.direct_format import rows_of
from tests.support.slips import Locks
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
        store.direct.confirm(reader, 0)
    for row in rows_of(part.payload, part.row_count):
        place, length = row.extent_media_offset + row.extent_offset, row.length_bytes
        locks.take("program", place, length)
    store.direct.confirm(reader, 0)
    store.release(reader)
    store.unlink(1, b"file")
    for number in range(200):
        write_file(store, 1, b"other", bytes([number]) * 5000)
        store.volume.release_dead()
    assert store.media.read(place, length) == b"x" * length
    assert not store.direct.maintain()
    locks.drop("program")
    assert store.direct.maintain()

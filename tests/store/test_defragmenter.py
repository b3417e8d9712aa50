"""Files in pieces become sequential again by themselves: what for, when, and when not."""

from __future__ import annotations

import contextlib
import os
import random

import pytest

from cxlfs.errors import MediaError
from cxlfs.media import Granularity
from cxlfs.native import FaultKind, set_fault
from cxlfs.store import Store, defragmenter
from cxlfs.store.defragmenter import Defragmenter
from tests.store.test_cleaner import references, scatter
from tests.support.shop import Shop, close, create
from tests.support.stores import picture, read_file, write_file

MIB = 1 << 20
STORE_BYTES = 128 * MIB


def chunks_of_a_read(store: Store, name: bytes) -> int:
    """Chunks that are verified to read a file from front to back, 1 MiB at a time."""
    content = store.namespace.inodes[store.lookup(1, name).ino].content
    before = store.volume.engine.statistics().chunks_verified
    for offset in range(0, content.size, MIB):
        content.read(offset, MIB)
    return store.volume.engine.statistics().chunks_verified - before


def rest(store: Store, seconds: float = 60.0, *, start: float = 1000.0) -> None:
    """Maintenance as the daemon does it."""
    now = start
    while now < start + seconds:
        if not store.maintain(now):
            now += 0.5


def test_sequential_reads_recover(shop: Shop, rng: random.Random) -> None:
    """To at least 0.7 of the rate of a file that was written at once."""
    store = shop.new_ordinary(STORE_BYTES)
    data = scatter(store, b"f", rng, blocks=2500)
    write_file(store, 1, b"fresh", data)
    fresh, scattered = chunks_of_a_read(store, b"fresh"), chunks_of_a_read(store, b"f")
    assert scattered > 8 * fresh
    before = picture(store)
    rest(store)
    assert chunks_of_a_read(store, b"f") <= fresh / 0.7
    assert picture(store) == before
    assert store.volume.counters.moved_bytes <= 1.01 * len(data)
    expected = references(store)
    store = shop.reopen(store)
    assert references(store) == expected
    assert read_file(store, store.lookup(1, b"f").ino) == data


def test_it_keeps_to_its_rate(
    shop: Shop, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defragmenter, "RATE_BYTES_PER_SECOND", 8 * MIB)
    store = shop.new_ordinary(STORE_BYTES)
    for number in range(3):
        scatter(store, b"f%d" % number, rng, blocks=1100)
    moved, now = 0, 5.0
    for tick in range(6):
        while store.maintain(now):
            pass
        most = defragmenter.RATE_BYTES_PER_SECOND * 0.1 * tick
        most += defragmenter.RATE_BYTES_PER_SECOND * 0.5 + defragmenter.MOVE_BYTES_MAX
        moved = store.volume.counters.moved_bytes
        assert moved <= most
        now += 0.1
    assert MIB < moved < 3 * 1100 * 4096, "there was more to do"


def test_what_is_being_written_is_left_alone(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(STORE_BYTES)
    scatter(store, b"f", rng, blocks=600)
    handle = store.open_file(store.lookup(1, b"f").ino, os.O_RDWR)
    store.write(handle, 0, b"x")
    rest(store, 20)
    assert store.volume.counters.moved_bytes == 0
    close(store, handle)
    rest(store, 20, start=1020.0)
    assert store.volume.counters.moved_bytes > 600 * 4000


def test_what_was_committed_while_it_was_open_is_gathered_after_the_close(
    shop: Shop, rng: random.Random
) -> None:
    """The close has nothing to publish, so that no commit says that the file is at rest."""
    store = shop.new_ordinary(STORE_BYTES)
    scatter(store, b"f", rng, blocks=600)
    handle = store.open_file(store.lookup(1, b"f").ino, os.O_RDWR)
    store.write(handle, 0, b"x")
    store.fsync(handle)
    rest(store, 20)
    assert store.volume.counters.moved_bytes == 0
    close(store, handle)
    rest(store, 20, start=1020.0)
    assert store.volume.counters.moved_bytes > 600 * 4000


def test_what_is_shared_or_as_it_should_be_is_left_alone(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(STORE_BYTES)
    scatter(store, b"f", rng, blocks=600)
    for number in range(50):
        write_file(store, 1, b"small%d" % number, rng.randbytes(5000))
    source = store.open_file(store.lookup(1, b"f").ino, os.O_RDONLY)
    _, copy = create(store, b"copy")
    store.ranges.copy(source, 0, copy, 0, 600 * 4096)
    close(store, copy)
    store.release(source)
    write_file(store, 1, b"whole", rng.randbytes(10 * MIB))
    rest(store, 40)
    assert store.volume.counters.moved_bytes == 0


def test_nothing_moves_without_room(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(STORE_BYTES)
    scatter(store, b"f", rng, blocks=600)
    write_file(store, 1, b"filler", bytes(store.statfs().free_bytes - 12 * MIB))
    moved = store.volume.counters.moved_bytes
    for now in range(100):
        store.defragmenter.step(now)
    assert store.volume.counters.moved_bytes == moved


def test_a_file_is_gone_through_once_for_each_commit(
    shop: Shop, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it stays in pieces: here whatever it looks at is worth moving again."""
    monkeypatch.setattr(defragmenter, "_PIECES_MIN", -100)
    monkeypatch.setattr(
        Defragmenter,
        "_next_window",
        lambda self, content: 600 if self._offset < content.size else 0,
    )
    store = shop.new_ordinary(STORE_BYTES)
    scatter(store, b"f", rng, blocks=600)
    rest(store, 100)
    assert 600 * 4096 <= store.volume.counters.moved_bytes <= 600 * 4096 + 4096


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE])
def test_small_stores_too(shop: Shop, rng: random.Random, granularity: Granularity) -> None:
    """Whose records hold few moves."""
    store = shop.new(granularity=granularity)
    data = scatter(store, b"f", rng, blocks=200)
    refs = store.namespace.inodes[store.lookup(1, b"f").ino].content.ref_count
    rest(store, 20)
    content = store.namespace.inodes[store.lookup(1, b"f").ino].content
    assert content.ref_count < refs / 8
    store = shop.reopen(store)
    assert read_file(store, store.lookup(1, b"f").ino) == data


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_failed_fence_stops_writing(shop: Shop, rng: random.Random, nth: int) -> None:
    """Of a new segment, of what was moved, of the record."""
    store = shop.new_ordinary(STORE_BYTES)
    shop.damaged = True
    data = scatter(store, b"f", rng, blocks=600)
    set_fault(FaultKind.FENCE, nth)
    try:
        with contextlib.suppress(MediaError):
            rest(store, 5)
    finally:
        set_fault(FaultKind.FENCE, 0)
    assert store.read_only
    assert read_file(store, store.lookup(1, b"f").ino) == data


def test_damage_is_not_moved(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(STORE_BYTES)
    shop.damaged = True
    scatter(store, b"f", rng, blocks=600)
    content = store.namespace.inodes[store.lookup(1, b"f").ino].content
    extent = content.export(300 * 4096, 1)[0]
    infos = store.volume.engine.list()
    offset = int(infos[infos["id"] == extent["extent_id"]]["media_offset"][0])
    store.media.store(offset, bytes([store.media.read(offset, 1)[0] ^ 1]))
    rest(store, 40)
    assert not store.read_only
    assert content.ref_count > 100

"""What several checkpoints have in common is kept once: which files, which bytes, and when not."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.store import Store, deduplicator
from tests.store.test_defragmenter import rest
from tests.support.shop import Shop, close, create
from tests.support.stores import picture, read_file, write_file

KIB, MIB = 1 << 10, 1 << 20
STORE_BYTES = 128 * MIB


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new_ordinary(STORE_BYTES, dedup=True)


def used(store: Store) -> int:
    return store.volume.engine.statistics().kept_bytes


def settle(store: Store) -> None:
    rest(store, 40)


def test_frozen_weights_of_each_step_are_kept_once(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    base = rng.randbytes(10 * MIB)
    written: dict[int, bytes] = {}
    for step in range(3):
        top = store.make_directory(1, b"step-%d" % step, 0o755, 0, 0).ino
        written[step] = base + rng.randbytes(MIB)
        write_file(store, top, b"model.pt", written[step])
    before = picture(store)
    assert used(store) >= 33 * MIB
    settle(store)
    assert used(store) <= 10 * MIB + 3 * MIB + 2 * 64 * KIB
    assert store.deduplicator.shared_bytes >= 20 * MIB - 2 * 64 * KIB
    assert picture(store) == before
    for again in range(2):
        for step, data in written.items():
            top = store.lookup(1, b"step-%d" % step).ino
            assert read_file(store, store.lookup(top, b"model.pt").ino) == data
        if again == 0:
            store = shop.reopen(store)
    assert used(store) <= 13 * MIB + 2 * 64 * KIB


def test_what_was_shared_outlives_the_file_that_had_it_first(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    data = rng.randbytes(3 * MIB + 77)
    write_file(store, 1, b"a", data)
    write_file(store, 1, b"b", data)
    settle(store)
    assert used(store) < 4 * MIB
    store.unlink(1, b"a")
    store.volume.rollover()
    store = shop.reopen(store)
    assert read_file(store, store.lookup(1, b"b").ino) == data


def test_what_is_written_later_is_its_own(store: Store, rng: random.Random) -> None:
    data = rng.randbytes(2 * MIB)
    for name in (b"a", b"b"):
        write_file(store, 1, name, data)
    settle(store)
    handle = store.open_file(store.lookup(1, b"b").ino, os.O_RDWR)
    store.write(handle, 100_000, b"changed")
    close(store, handle)
    assert read_file(store, store.lookup(1, b"a").ino) == data
    found = read_file(store, store.lookup(1, b"b").ino)
    assert found == data[:100_000] + b"changed" + data[100_007:]


@pytest.mark.parametrize("shift", [0, 4096, 65_536 + 512])
def test_parts_that_are_the_same_in_between(store: Store, rng: random.Random, shift: int) -> None:
    """Wherever they begin."""
    frozen = rng.randbytes(3 * MIB)
    for name in (b"a", b"b"):
        write_file(store, 1, name, rng.randbytes(MIB + shift) + frozen + rng.randbytes(MIB))
    before = used(store)
    settle(store)
    assert before - used(store) >= 3 * MIB - 2 * 64 * KIB


def test_what_differs_or_is_not_at_rest_is_left_alone(store: Store, rng: random.Random) -> None:
    data = rng.randbytes(2 * MIB)
    write_file(store, 1, b"first", data)
    write_file(store, 1, b"of other bytes", rng.randbytes(2 * MIB))
    write_file(store, 1, b"of another size", data + b"x")
    write_file(store, 1, b"short", data[:1000])
    _, handle = create(store, b"open", data)
    store.fsync(handle)
    store.write(handle, 0, data[:1])
    _, other = store.create(1, b"of another user", 0o640, 77, 77, os.O_RDWR)
    store.write(other, 0, data)
    close(store, other)
    lsn = store.volume.last_lsn
    settle(store)
    assert store.deduplicator.shared_bytes == 0
    assert store.volume.last_lsn <= lsn + 1, "the open file was committed"
    close(store, handle)


def test_what_lies_page_by_page_stays_so(
    store: Store, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rng.randbytes(2 * MIB)
    write_file(store, 1, b"odd", b"x" * 100)
    for name in (b"a", b"b"):
        write_file(store, 1, name, data)
    offsets = iter([0, 1] * 1000)  # ours lies as in its file, the other one does not
    monkeypatch.setattr(
        deduplicator.Deduplicator, "_media_offset", lambda *_: 4096 * next(offsets) // 8
    )
    settle(store)
    assert store.deduplicator.shared_bytes == 0


def test_it_is_off_unless_asked_for(shop: Shop, rng: random.Random) -> None:
    """Damage of what is kept once is damage of every file that has it."""
    store = shop.new_ordinary(STORE_BYTES)
    data = rng.randbytes(2 * MIB)
    for name in (b"a", b"b"):
        write_file(store, 1, name, data)
    settle(store)
    assert used(store) >= 4 * MIB


def test_dense_steps_cost_a_few_samples(store: Store, rng: random.Random) -> None:
    for name in (b"a", b"b"):
        write_file(store, 1, name, rng.randbytes(16 * MIB))
    before = store.volume.engine.statistics().bytes_read
    settle(store)
    read = store.volume.engine.statistics().bytes_read - before
    assert read <= 2 * 16 * MIB // 100

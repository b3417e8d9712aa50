"""Compacting half-dead segments: every content stays equal, whatever happens afterwards."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.errors import CorruptionError
from cxlfs.media import Granularity
from cxlfs.store import Store
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import picture, read_file, write_file


def fragment(store: Store, rng: random.Random, *, files: int = 100) -> dict[bytes, bytes]:
    """Files of which every second is deleted again; what is left."""
    contents = {}
    for number in range(files):
        name = b"f%d" % number
        contents[name] = rng.randbytes(rng.randrange(1, 30_000))
        write_file(store, 1, name, contents[name])
    for number in range(0, files, 2):
        store.unlink(1, b"f%d" % number)
        del contents[b"f%d" % number]
    return contents


def clean_everything(store: Store) -> int:
    """Until nothing is left to compact; how many segments were."""
    before = store.volume.counters.cleaned_segments
    for _ in range(100):
        if not store.cleaner._clean_round(0.9):
            break
    return store.volume.counters.cleaned_segments - before


@pytest.mark.parametrize("clean", [False, True])
def test_content_stays(shop: Shop, store: Store, rng: random.Random, clean: bool) -> None:
    contents = fragment(store, rng)
    before = picture(store)
    free = store.volume.space.free_count
    assert clean_everything(store) > 5
    assert store.volume.space.free_count > free
    assert picture(store) == before
    store = shop.reopen(store, clean=clean)
    assert picture(store) == before
    assert {n: read_file(store, store.lookup(1, n).ino) for n in contents} == contents


def test_crash_after_each_round(shop: Shop, store: Store, rng: random.Random) -> None:
    fragment(store, rng, files=60)
    before = picture(store)
    for _ in range(8):
        assert store.cleaner._clean_round(0.9)
        store = shop.reopen(store)
        assert picture(store) == before


def test_all_three_contents_move(shop: Shop, store: Store, rng: random.Random) -> None:
    """Committed, live and kept aside, shared between two names and several references."""
    fragment(store, rng, files=30)
    old, new, aside = (rng.randbytes(20_000) for _ in range(3))
    write_file(store, 1, b"a", old)
    close(store, open_for_overwrite(store, b"a", aside), killed=True)
    ino = store.lookup(1, b"a").ino
    store.link(ino, 1, b"second")
    for number in range(31, 60, 2):
        write_file(store, 1, b"f%d" % number, rng.randbytes(9000))
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 5000, new[:3000])
    store.fsync(handle)
    store.write(handle, 6000, new[3000:5000])
    expected = bytearray(old)
    expected[5000:8000] = new[:3000]
    committed = bytes(expected)
    expected[6000:8000] = new[3000:5000]
    for number in range(1, 30, 4):
        store.unlink(1, b"f%d" % number)
    assert clean_everything(store) > 2
    assert read_file(store, ino) == expected
    content = store.namespace.get(ino).aside
    assert content is None or bytes(content.read(0, 20_000)) == aside
    store = shop.reopen(store)
    assert read_file(store, ino) == committed


def test_open_versions_move(shop: Shop, store: Store, rng: random.Random) -> None:
    """Overwrites in progress, staged or not, go on over a cleaned store."""
    fragment(store, rng, files=40)
    old, new = rng.randbytes(15_000), rng.randbytes(30_000)
    write_file(store, 1, b"a", old)
    handle = open_for_overwrite(store, b"a", new[:10_000])
    store.commits.commit_old(older_than=1e18)
    write_file(store, 1, b"between", rng.randbytes(50_000))
    store.write(handle, 10_000, new[10_000:20_000])
    store.unlink(1, b"between")
    clean_everything(store)
    assert read_file(store, store.lookup(1, b"a").ino) == new[:20_000]
    store.write(handle, 20_000, new[20_000:])
    clean_everything(store)
    close(store, handle)
    store = shop.reopen(store)
    assert read_file(store, store.lookup(1, b"a").ino) == new


def test_unlinked_open_file_moves(store: Store, rng: random.Random) -> None:
    fragment(store, rng, files=40)
    data = rng.randbytes(20_000)
    _, handle = create(store, b"gone", data)
    store.flush(handle, writer_killed=False)
    write_file(store, 1, b"after", rng.randbytes(100_000))
    store.unlink(1, b"after")
    store.unlink(1, b"gone")
    clean_everything(store)
    assert bytes(store.read(handle, 0, 20_000)) == data
    store.release(handle)


def test_maintain_cleans_when_space_is_low(shop: Shop, rng: random.Random) -> None:
    store = shop.new(granularity=Granularity.LINE)
    contents = {}
    number = 0
    while store.volume.space.free_count > store.volume.refresh_reserve() + 3:
        contents[b"f%d" % number] = data = rng.randbytes(9000)
        write_file(store, 1, b"f%d" % number, data)
        number += 1
    for dead in range(number):
        if dead % 3:
            store.unlink(1, b"f%d" % dead)
            del contents[b"f%d" % dead]
    free = store.volume.space.free_count
    now, slices = 0.0, 0
    while store.maintain(now):
        now, slices = now + 0.1, slices + 1
        assert slices < 1000
    assert store.volume.space.free_count > free
    assert store.statistics().cleaned_segments > 0
    store = shop.reopen(store)
    assert {n: read_file(store, store.lookup(1, n).ino) for n in contents} == contents


def test_damage_is_not_moved(shop: Shop, store: Store, rng: random.Random) -> None:
    shop.damaged = True
    contents = fragment(store, rng, files=40)
    name = next(iter(contents))
    ino = store.lookup(1, name).ino
    extent = store.namespace.get(ino).content.export(0, 1)[0]
    infos = store.volume.engine.list()
    offset = int(infos[infos["id"] == extent["extent_id"]]["media_offset"][0])
    store.media.store(offset, bytes([store.media.read(offset, 1)[0] ^ 1]))
    clean_everything(store)
    assert store.cleaner.unmovable
    assert any(e.kind == "damage" and e.media_offset is not None for e in shop.events)
    with pytest.raises(CorruptionError):
        read_file(store, ino)
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"damaged"
    for other, data in contents.items():
        if other != name:
            assert read_file(store, store.lookup(1, other).ino) == data

"""Compacting half-dead segments: every content stays equal, whatever happens afterwards."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from cxlfs.errors import CorruptionError
from cxlfs.media import Granularity
from cxlfs.native.extents import LIVE_RANGE_DTYPE, Engine, FileMap
from cxlfs.store import Store, mover
from cxlfs.store.space import State
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import clean_round, picture, read_file, write_file


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
        if not clean_round(store, 0.9):
            break
    return store.volume.counters.cleaned_segments - before


@pytest.mark.parametrize(
    ("old", "young"),
    [((0.95, 100), (0.80, 10)), ((0.90, 100), (0.80, 30)), ((0.60, 30), (0.40, 8))],
)
def test_emptier_segments_come_before_older_ones(
    store: Store, monkeypatch: pytest.MonkeyPatch, old: tuple[float, int], young: tuple[float, int]
) -> None:
    """(part that is alive, age); room · age / cost would move what is old and nearly full."""
    assert _first_candidate(store, monkeypatch, old, young) == 1


def test_old_segments_come_before_ones_as_empty(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written a moment ago will die by itself, if anything does."""
    assert _first_candidate(store, monkeypatch, (0.50, 100), (0.45, 5)) == 0


def _first_candidate(
    store: Store, monkeypatch: pytest.MonkeyPatch, *segments: tuple[float, int]
) -> int:
    """Which of ``segments`` is compacted first, were these all."""
    space = store.volume.space
    indexes = [index for index, state in enumerate(space.states) if state is State.FREE]
    usage = np.zeros(len(space.states), dtype=np.uint64)
    states, born = list(space.states), list(space.born)
    for index, (part, age) in zip(indexes, segments, strict=False):
        usage[index] = int(part * store.volume.superblock.segment_payload_bytes)
        states[index], born[index] = State.DATA, space.next_epoch - age
    with monkeypatch.context() as patch:
        patch.setattr(space, "states", states)
        patch.setattr(space, "born", born)
        patch.setattr(Engine, "usage", lambda _engine: usage)
        found = store.cleaner.candidates(0.99)
    return indexes.index(found[0][0])


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
    for _ in range(4):
        assert clean_round(store, 0.9)
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
    store = shop.new(granularity=Granularity.LINE, history=False)
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


# --- short steps, and references that follow them ---------------------------------------------


def scatter(store: Store, name: bytes, rng: random.Random, *, blocks: int) -> bytes:
    """A file whose blocks were overwritten one by one, in random order: each lies by itself."""
    data = bytearray(rng.randbytes(blocks * 4096))
    write_file(store, 1, name, bytes(data))
    handle = store.open_file(store.lookup(1, name).ino, os.O_RDWR)
    for block in rng.sample(range(blocks), blocks):
        data[block * 4096 : (block + 1) * 4096] = piece = rng.randbytes(4096)
        store.write(handle, block * 4096, piece)
    close(store, handle)
    return bytes(data)


STEP_BYTES_MAX, STEP_RANGES_MAX = 8 << 20, 2048
"""Twice what the store chooses: some milliseconds, whatever it chooses one day."""


def test_a_step_is_short_and_follows_at_once(
    shop: Shop, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many references a file has: one record and one walk over them for each step. Blocks,
    long pieces and short ones.
    """
    store = shop.new_ordinary(64 << 20)
    data = scatter(store, b"big", rng, blocks=3000)
    write_file(store, 1, b"other", rng.randbytes(16 << 20))
    for number in range(4000):
        write_file(store, 1, b"small%d" % number, b"x")
    calls: list[int] = []
    move = Engine.move
    monkeypatch.setattr(Engine, "move", lambda *args: (calls.append(len(args[2])), move(*args))[1])
    counters, engine = store.volume.counters, store.volume.engine
    steps = 0
    while True:
        before, walked = (counters.moved_bytes, counters.commits), engine.statistics()
        calls.clear()
        if not store.cleaner.compact(1.0) or steps > 50:
            break
        steps += 1
        after = engine.statistics()
        assert 0 < counters.moved_bytes - before[0] <= STEP_BYTES_MAX
        assert counters.commits - before[1] == 1
        assert len(calls) == 1
        assert calls[0] <= STEP_RANGES_MAX
        assert after.refs_visited - walked.refs_visited <= 4 * walked.refs
    assert 3 < steps <= 50
    assert read_file(store, store.lookup(1, b"big").ino) == data


def test_long_pieces_are_moved_in_part(store: Store) -> None:
    """Where segments are large a step ends in the middle of one."""
    rows = np.zeros(4, dtype=LIVE_RANGE_DTYPE)
    rows["length"], rows["owner_count"] = 3 << 20, 1
    chosen = store.cleaner.mover.choose(rows)
    assert 1 << 20 <= chosen["length"].sum() <= STEP_BYTES_MAX
    assert chosen["length"][-1] < 3 << 20
    assert rows["length"].tolist() == 4 * [3 << 20], "those that were found stay as they are"


Place = tuple[int, int, int, int]


def references(store: Store) -> dict[int, tuple[list[Place], list[Place]]]:
    """Where the committed content of each file lies, and what is kept aside."""

    def places(content: FileMap | None) -> list[Place]:
        return [] if content is None else content.export(0, content.size).tolist()

    return {
        inode.ino: (places(inode.committed or inode.live), places(inode.aside))
        for inode in store.namespace.inodes.values()
        if inode.live is not None
    }


def move_all_kinds(store: Store, rng: random.Random) -> None:
    """Contents that are committed, live and kept aside, some of them shared; all is moved."""
    fragment(store, rng, files=30)
    scatter(store, b"scattered", rng, blocks=12)
    write_file(store, 1, b"a", rng.randbytes(20_000))
    close(store, open_for_overwrite(store, b"a", rng.randbytes(18_000)), killed=True)
    source = store.open_file(store.lookup(1, b"a").ino, os.O_RDONLY)
    _, copy = create(store, b"copy")
    store.ranges.copy(source, 500, copy, 100, 9000)
    close(store, copy)
    store.release(source)
    overwritten = open_for_overwrite(store, b"scattered", rng.randbytes(9000))
    store.commits.commit_old(older_than=1e18)
    handle = store.open_file(store.lookup(1, b"a").ino, os.O_RDWR)
    store.write(handle, 5000, rng.randbytes(3000))
    write_file(store, 1, b"last", rng.randbytes(100_000))
    store.volume.rollover()
    counters = store.volume.counters
    rollovers, moved = counters.rollovers, counters.moved_bytes
    while counters.moved_bytes - moved < 800_000 and store.cleaner.compact(1.0):
        pass
    assert counters.moved_bytes - moved > 300_000
    assert counters.rollovers == rollovers
    del overwritten


def test_the_journal_refers_to_what_the_running_store_does(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    """Or the set before would refer to space that is used again."""
    move_all_kinds(store, rng)
    expected = references(store)
    assert references(shop.reopen(store)) == expected


def test_moves_of_several_records_are_followed_together(
    shop: Shop, store: Store, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One walk over each content, however many records moved parts of it."""
    fragment(store, rng, files=10)
    scatter(store, b"scattered", rng, blocks=200)
    store.volume.rollover()
    commits, rollovers = store.volume.counters.commits, store.volume.counters.rollovers
    for _ in range(6):
        assert store.cleaner.compact(1.0)
    assert store.volume.counters.commits - commits == 6
    assert store.volume.counters.rollovers == rollovers
    expected = references(store)
    walked: list[FileMap] = []
    move = Engine.move
    monkeypatch.setattr(Engine, "move", lambda *args: (walked.extend(args[1]), move(*args))[1])
    reopened = shop.reopen(store)
    assert references(reopened) == expected
    assert 0 < len(walked) == len(set(map(id, walked)))


@pytest.mark.parametrize("missed", ["aside", "committed", "live"])
def test_a_content_that_does_not_follow_is_noticed(
    shop: Shop, rng: random.Random, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    """Planted: a batch of moves leaves out one of an inode's contents."""
    store = shop.new(granularity=Granularity.LINE)
    contents = mover._contents
    monkeypatch.setattr(
        mover,
        "_contents",
        lambda inode, part: [c for c in contents(inode, part) if c is not getattr(inode, missed)],
    )
    move_all_kinds(store, rng)
    expected = references(store)
    monkeypatch.undo()
    assert references(shop.reopen(store)) != expected

"""Opening and closing: read-only, twice, after damage to a root or image, with the journal full."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from collections.abc import Callable

import pytest

from cxlfs.errors import CorruptionError, CxlfsError, MediaError, NotACxlfsError, ReadOnlyError
from cxlfs.format import layout, roots
from cxlfs.media import Granularity, Media, MemoryMedia
from cxlfs.native import FaultKind, set_fault
from cxlfs.store import Store, StoreOptions, loading, recovery
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import (
    clean_round,
    format_small,
    make_media,
    picture,
    read_file,
    write_file,
)


def populate(store: Store, rng: random.Random) -> None:
    """Enough of everything that the journal rolls over a few times."""
    for number in range(60):
        write_file(store, 1, b"f%d" % (number % 20), rng.randbytes(rng.randrange(30_000)))
        store.set_attributes(1, mtime_ns=number)
        directory = store.make_directory(1, b"d%d" % number, 0o755, 0, 0).ino
        for name in range(8):
            store.make_symlink(directory, b"s%d" % name, b"t" * 200, 0, 0)
        if number % 3:
            store.rename(1, b"d%d" % number, 1, b"e%d" % number)
        if number % 5 == 0:
            store.unlink(directory, b"s0")


def whole(media: Media) -> bytes:
    return bytes(media.unguarded_memory())


def zero(media: Media, offset: int, length: int) -> None:
    media.store(offset, bytes(length))


@pytest.mark.parametrize("clean", [False, True])
def test_read_only_writes_nothing(store: Store, rng: random.Random, clean: bool) -> None:
    populate(store, rng)
    before = picture(store)
    store.close() if clean else store.abandon()
    image = whole(store.media)
    reader = Store.open(store.media, StoreOptions(read_only=True))
    assert picture(reader) == before
    assert reader.read_only
    ino = reader.lookup(1, b"f0").ino
    refused: list[Callable[[], object]] = [
        lambda: reader.create(1, b"x", 0o644, 0, 0, os.O_RDWR),
        lambda: reader.open_file(ino, os.O_WRONLY),
        lambda: reader.open_file(ino, os.O_RDWR | os.O_TRUNC),
        lambda: reader.make_directory(1, b"x", 0o755, 0, 0),
        lambda: reader.make_symlink(1, b"x", b"y", 0, 0),
        lambda: reader.make_node(1, b"x", 0o010644, 0, 0, 0),
        lambda: reader.unlink(1, b"f0"),
        lambda: reader.remove_directory(1, b"d0"),
        lambda: reader.rename(1, b"f0", 1, b"g"),
        lambda: reader.link(ino, 1, b"g"),
        lambda: reader.set_attributes(ino, mode=0),
        lambda: reader.set_attributes(ino, size=0),
        lambda: reader.set_xattr(ino, b"user.k", b"v"),
        lambda: reader.remove_xattr(ino, b"user.k"),
    ]
    for verb in refused:
        with pytest.raises(ReadOnlyError):
            verb()
    reader.fsync_directory(1)
    assert not reader.maintain(1e9)
    assert reader.statfs().total_bytes > 0
    assert reader.statistics().state == "READ-ONLY"
    reader.close()
    assert whole(store.media) == image


def test_recovery_is_idempotent(shop: Shop, store: Store, rng: random.Random) -> None:
    populate(store, rng)
    before = picture(store)
    for number in range(20):
        store = shop.reopen(store, clean=number % 4 == 3)
        assert picture(store) == before
        assert store.recovery.problems == []
        assert store.recovery.clean == (number % 4 == 3)


def test_inode_numbers_are_not_used_again(shop: Shop, store: Store) -> None:
    seen: set[int] = set()
    for number in range(10):
        ino = write_file(store, 1, b"a", b"x")
        assert ino not in seen
        seen.add(ino)
        store.unlink(1, b"a")
        store = shop.reopen(store, clean=number % 2 == 0)


def test_rollover_between_any_two_verbs(shop: Shop, store: Store) -> None:
    """At every moment of a file's life."""
    roll = store.volume.rollover
    ino, handle = create(store, b"a")
    roll()
    store.write(handle, 0, b"one")
    roll()
    store.flush(handle, writer_killed=False)
    roll()
    store.release(handle)
    roll()
    overwrite = open_for_overwrite(store, b"a", b"half")
    roll()
    store = shop.reopen(store, history=False)
    assert read_file(store, ino) == b"one"
    roll = store.volume.rollover
    overwrite = open_for_overwrite(store, b"a", b"half")
    store.commits.commit_old(older_than=1e18)
    roll()
    store.write(overwrite, 4, b"more")
    roll()
    store = shop.reopen(store, history=False)
    assert read_file(store, ino) == b"one"
    assert [e.size_bytes for e in store.list_checkpoints() if e.kept_aside] == [4]
    roll = store.volume.rollover
    appending = store.open_file(ino, os.O_RDWR)
    store.write(appending, 3, b"two")
    roll()
    store.fsync(appending)
    store.write(appending, 6, b"three")
    store.unlink(1, b"a")
    roll()
    assert bytes(store.read(appending, 0, 20)) == b"onetwothree"
    store.release(appending)
    roll()
    assert store.volume.engine.statistics().extents == 0


def test_losing_the_newest_root_in_one_ring(shop: Shop, store: Store, rng: random.Random) -> None:
    shop.damaged = True
    populate(store, rng)
    before = picture(store)
    for ring in (0, 1):
        slot = store.volume.root.generation % store.superblock.ring_slots
        zero(store.media, store.superblock.ring_offsets[ring] + slot * layout.SLOT_BYTES, 2048)
        store = shop.reopen(store)
        assert picture(store) == before
        assert not store.read_only


@pytest.mark.parametrize("lost", ["root", "image"])
@pytest.mark.parametrize("clean", [False, True])
def test_losing_the_newest_root_or_image_loses_nothing(
    shop: Shop, store: Store, rng: random.Random, lost: str, clean: bool
) -> None:
    """The fallback image and its journal lead to the same state, over reused segments too."""
    shop.damaged = True
    populate(store, rng)
    store.volume.rollover()
    write_file(store, 1, b"last", b"last")
    before = picture(store)
    volume = store.volume
    store.close() if clean else store.abandon()
    store.abandon()
    if lost == "root":
        slot = volume.root.generation % volume.superblock.ring_slots
        for ring in volume.superblock.ring_offsets:
            zero(store.media, ring + slot * layout.SLOT_BYTES, 2048)
    else:
        for index in volume.root.image_segments:
            zero(store.media, volume.superblock.segment_offset(index), 8192)
    again = Store.open(store.media)
    assert picture(again) == before
    assert not again.read_only
    again.abandon()


def test_losing_the_journal_is_told(shop: Shop, store: Store, rng: random.Random) -> None:
    """Records that are known to have been durable are missing: read-only, and it says so."""
    shop.damaged = True
    populate(store, rng)
    store.volume.rollover()
    before = picture(store)
    for number in range(10):
        write_file(store, 1, b"g%d" % number, b"g")
    journal = store.volume.current.journal_segments
    store.abandon()
    for index in journal:
        zero(store.media, store.superblock.segment_offset(index) + 4096 + 64, 64)
    again = Store.open(store.media)
    assert again.read_only
    assert "journal record" in (again.read_only_reason or "")
    assert again.statistics().state in ("READ-ONLY", "NEEDS-CHECK")
    for path, entry in before.items():
        if path != b"/":
            assert picture(again)[path].content == entry.content
    again.abandon()


def test_one_journal_copy_is_enough(shop: Shop, store: Store, rng: random.Random) -> None:
    shop.damaged = True
    for copy in (0, 1):
        populate(store, rng) if copy == 0 else write_file(store, 1, b"again", b"a")
        before = picture(store)
        index = store.volume.current.journal_segments[copy]
        store.abandon()
        zero(store.media, store.superblock.segment_offset(index), 65536)
        store = shop.reopen(store)
        assert picture(store) == before
        assert not store.read_only


def test_every_root_lost(store: Store) -> None:
    media = store.media
    store.abandon()
    copy = MemoryMedia(media.size_bytes, media.granularity)
    copy.unguarded_memory()[:] = whole(media)
    for ring in store.superblock.ring_offsets:
        zero(copy, ring, store.superblock.ring_slots * layout.SLOT_BYTES)
    with pytest.raises(CorruptionError):
        Store.open(copy)
    copy.close()


def test_ring_wraps(shop: Shop, store: Store) -> None:
    before = picture(store)
    for number in range(3 * layout.RING_SLOTS_MAX):
        store = shop.reopen(store, clean=number % 3 == 0)
    states = roots.read_slots(store.media, store.superblock)
    assert all(state.root is not None and state.problem is None for state in states)
    assert picture(store) == before


def test_not_a_store() -> None:
    media = make_media()
    with pytest.raises(NotACxlfsError):
        Store.open(media)
    media.close()
    for size in (4096, 65536):
        small = make_media(size)
        with pytest.raises(CxlfsError):
            Store.open(small)
        small.close()


def test_close_is_idempotent_and_final(store: Store) -> None:
    write_file(store, 1, b"a", b"x")
    store.close()
    store.close()
    store.abandon()
    assert Store.open(store.media).recovery.clean


@pytest.mark.parametrize("kind", [FaultKind.FENCE, FaultKind.WRITE_BACK])
@pytest.mark.parametrize("nth", range(1, 9))
def test_failed_fence_under_a_write_stops_writing(shop: Shop, kind: FaultKind, nth: int) -> None:
    """Line granularity: also where the engine fences, and where a segment is taken into use."""
    shop.damaged = True
    store = shop.new(granularity=Granularity.LINE)
    ino = write_file(store, 1, b"a", b"durable")
    handle = store.open_file(ino, os.O_RDWR)
    set_fault(kind, nth)
    failed = 0
    try:
        for number in range(40):
            try:
                store.write(handle, number * 5000, b"x" * 5000)
            except MediaError:
                failed += 1
                break
            assert not store.read_only
    finally:
        set_fault(kind, 0)
    if failed:
        assert store.read_only
        with pytest.raises(ReadOnlyError):
            store.write(handle, 0, b"again")
        with pytest.raises(MediaError):
            store.flush(handle, writer_killed=False)
        assert any(event.kind == "read-only" for event in shop.events)
    store.release(handle)
    assert failed or kind is FaultKind.WRITE_BACK
    store.close()
    if failed:
        assert read_file(shop.reopen(store), ino) == b"durable"


def test_failed_copy_fails_its_range_alone(shop: Shop) -> None:
    """A media fault says nothing about what was stored elsewhere."""
    store = shop.new(granularity=Granularity.LINE)
    ino = write_file(store, 1, b"a", b"durable")
    handle = store.open_file(ino, os.O_RDWR)
    set_fault(FaultKind.COPY, 1)
    try:
        with pytest.raises(MediaError):
            store.write(handle, 0, b"x" * 5000)
    finally:
        set_fault(FaultKind.COPY, 0)
    assert not store.read_only
    store.write(handle, 0, b"y" * 5000)
    close(store, handle)
    assert read_file(store, ino) == b"y" * 5000


@pytest.mark.parametrize("nth", range(1, 5))
def test_failed_fence_of_the_cleaner_stops_writing(shop: Shop, nth: int) -> None:
    shop.damaged = True
    store = shop.new(granularity=Granularity.LINE)
    for number in range(40):
        write_file(store, 1, b"f%d" % number, b"%d" % number * 3000)
    for number in range(0, 40, 2):
        store.unlink(1, b"f%d" % number)
    ino = store.lookup(1, b"f1").ino
    set_fault(FaultKind.FENCE, nth)
    try:
        with contextlib.suppress(MediaError):
            clean_round(store, 0.97)
    finally:
        set_fault(FaultKind.FENCE, 0)
    assert store.read_only
    assert read_file(store, ino) == b"1" * 3000


def test_failed_fence_of_the_padding_stops_writing(shop: Shop) -> None:
    """What is published ends where no later byte shares its word: the last bytes come at close."""
    shop.damaged = True
    store = shop.new(granularity=Granularity.LINE)
    ino, handle = create(store, b"n", b"x" * 4100)
    set_fault(FaultKind.FENCE, 1)
    try:
        with pytest.raises(MediaError):
            store.flush(handle, writer_killed=False)
    finally:
        set_fault(FaultKind.FENCE, 0)
    assert store.read_only
    assert read_file(store, ino) == b"x" * 4100


@pytest.mark.parametrize("nth", range(1, 8))
def test_failed_write_back_stops_writing(shop: Shop, nth: int) -> None:
    """It is never retried into a false success: the store turns read-only, reads go on."""
    shop.damaged = True
    store = shop.new(granularity=Granularity.PAGE)
    ino = write_file(store, 1, b"a", b"durable")
    set_fault(FaultKind.FENCE, nth)
    failed = 0
    try:
        for number in range(4):
            try:
                write_file(store, 1, b"b%d" % number, b"b")
            except MediaError:
                failed += 1
                break
            except ReadOnlyError:
                break
    finally:
        set_fault(FaultKind.FENCE, 0)
    if failed:
        assert store.read_only
        assert read_file(store, ino) == b"durable"
        with pytest.raises(ReadOnlyError):
            store.make_directory(1, b"d", 0o755, 0, 0)
        assert any(event.kind == "read-only" for event in shop.events)
    store.close()
    assert read_file(shop.reopen(store), ino) == b"durable"
    assert failed or nth > 4


def test_events_have_paths(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"old")
    close(store, open_for_overwrite(store, b"a", b"x"), killed=True)
    assert [(e.kind, e.path) for e in shop.events] == [("reverted", "/a")]


def torn(old: bytes, new: bytes, missing: int) -> bytes:
    """``new`` written over ``old``, but for one word."""
    at = slice(missing * 8, missing * 8 + 8)
    return new[: at.start] + old[at] + new[at.stop :]


def media_with(image: bytes | bytearray, granularity: Granularity) -> MemoryMedia:
    media = make_media(len(image), granularity)
    media.unguarded_memory()[:] = image
    return media


def recovered_but_for_its_root(
    image: bytes, granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> tuple[bytes, int, bytes]:
    """What lies on the media before a recovery writes its root; then where, and the root."""
    seen: list[bytes] = []
    write = roots.write

    def look_and_write(media: Media, *rest: object) -> None:
        seen.append(whole(media))
        write(media, *rest)  # type: ignore[arg-type]

    media = media_with(image, granularity)
    with monkeypatch.context() as patch:
        patch.setattr(roots, "write", look_and_write)
        store = Store.open(media)
    assert not store.read_only
    slot = store.volume.root.generation % store.superblock.ring_slots
    place = store.superblock.ring_offsets[0] + slot * layout.SLOT_BYTES
    root = whole(media)[place : place + layout.ROOT_DTYPE.itemsize]
    store.abandon()
    media.close()
    return seen[0], place, root


def test_a_torn_root_is_not_completed_by_the_next_one(
    granularity: Granularity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut tears a root but for one word. The recovery uses the segments of its image, and
    is cut in turn after it has written that one word of its own root.
    """
    media = make_media(granularity=granularity)
    format_small(media)
    store = Store.open(media)
    write_file(store, 1, b"file", b"content" * 999)
    block = store.superblock
    before = whole(media)
    store.volume.rollover()
    before_cut = picture(store)
    size = layout.ROOT_DTYPE.itemsize
    slot = store.volume.root.generation % block.ring_slots * layout.SLOT_BYTES
    first, second = (start + slot for start in block.ring_offsets)
    after = bytearray(whole(media))
    store.abandon()
    media.close()
    old, new = before[first : first + size], bytes(after[first : first + size])
    after[second : second + size] = before[second : second + size]
    words = [i for i in range(size // 8) if old[i * 8 : i * 8 + 8] != new[i * 8 : i * 8 + 8]]
    assert len(words) > 4
    for missing in words:
        after[first : first + size] = torn(old, new, missing)
        image, place, root = recovered_but_for_its_root(bytes(after), granularity, monkeypatch)
        assert place == first
        cut_again = bytearray(image)
        at = slice(place + missing * 8, place + missing * 8 + 8)
        cut_again[at] = root[missing * 8 : missing * 8 + 8]
        last = media_with(cut_again, granularity)
        again = Store.open(last)
        assert again.recovery.lost is None, f"word {missing}"
        assert not again.recovery.problems, f"word {missing}"
        assert picture(again) == before_cut
        again.close()
        last.close()


def test_a_large_store_is_nothing_that_the_collector_looks_at(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        write_file(store, 1, b"f%d" % number, b"x")
    monkeypatch.setattr(recovery, "FREEZE_INODES", 20)
    store = shop.reopen(store)
    try:
        seen = {id(thing) for thing in gc.get_objects()}
        assert not any(id(inode) in seen for inode in store.namespace.inodes.values())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("is_small", [True, False], ids=["small", "large"])
def test_an_image_is_loaded_by_a_second_thread_only_where_that_pays(
    shop: Shop, store: Store, rng: random.Random, monkeypatch: pytest.MonkeyPatch, is_small: bool
) -> None:
    populate(store, rng)
    before = picture(store)
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    if not is_small:
        monkeypatch.setattr(loading, "ALONE_BYTES_MAX", 0)
    store = shop.reopen(store, clean=True)
    assert len(started) == (0 if is_small else 1)
    assert picture(store) == before

"""One-operation workloads that need a store in a certain situation first.

Each brings the bench there, begins the tape anew, and does one thing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from cxlfs.store import Store, deduplicator
from cxlfs.store.rolling import is_short
from cxlfs.store.space import State
from tests.support.crash import operations
from tests.support.crash.bench import Bench
from tests.support.shop import fill
from tests.support.stores import clean_round, write_file

Workload = Callable[[Bench], None]
BLOCK_BYTES = 4096
SCATTERED = 460
"""References of 32 bytes: one more record than a quarter of a 64 KiB segment."""


def rollovers_around_the_ring(bench: Bench) -> None:
    """More roots than a ring has slots."""
    for step in range(bench.store.superblock.ring_slots + 1):
        if step == bench.store.superblock.ring_slots - 1:
            bench.tape.start()
        operations.rollover(bench)
    operations.make_directory(bench)


def journal_wraps_in_a_verb(bench: Bench) -> None:
    """The record does not fit: a verb finds itself writing an image and a root."""
    journal = bench.store.volume.journal
    assert journal is not None
    ino = bench.inode(b"other").ino
    while journal.free_bytes > 4096:
        size = min(8000, max(100, journal.free_bytes - 2000))
        bench.store.set_xattr(ino, b"user.filler", bench.fresh(size))
    bench.store.fsync_directory(1)
    bench.tape.start()
    generation = bench.store.volume.root.generation
    bench.xattr(b"other", b"user.filler", bench.fresh(6000))
    bench.rename(b"other", b"old")
    assert bench.store.volume.journal is not journal
    if bench.after_each is None and is_short(bench.store.volume.image_bytes_estimate()):
        assert bench.store.volume.root.generation == generation + 1


def segment_wraps_in_a_write(bench: Bench) -> None:
    """The data of one write lies in two segments, the second one begun for it."""
    space = bench.store.volume.space
    write_file(bench.store, 1, b"filler", b"f")
    while space._head is None or space._head.end - space._head.position > 6000:
        write_file(bench.store, 1, b"filler", bench.fresh(3000))
    bench.store.fsync_directory(1)
    bench.tape.start()
    operations.create_big(bench)


def _begin_beside_a_large_file(bench: Bench) -> None:
    """With segments of its own; in the one that is written to there is hardly any room left."""
    space = bench.store.volume.space
    handle = bench.create(b"large")
    for step in range(5):
        bench.write(handle, 32_000 * step, 32_000)
    bench.close(handle)
    while space._head is None or space._head.end - space._head.position > 3000:
        write_file(bench.store, 1, b"filler", bench.fresh(1500))
    bench.store.fsync_directory(1)
    bench.tape.start()


def space_of_a_removed_file(bench: Bench) -> None:
    """A file that had segments of its own is removed; the next one must not get them yet."""
    _begin_beside_a_large_file(bench)
    bench.unlink(b"large")
    operations.create_big(bench)


def dead_space_used_at_once(bench: Bench) -> None:
    """The room of a file that was removed is used again without a root in between."""
    _begin_beside_a_large_file(bench)
    bench.unlink(b"large")
    bench.do("free", bench.store.volume.free_dead, late=True)
    operations.create_big(bench)


def rollover_without_room(bench: Bench) -> None:
    """The fallback's segments are given up for the new image."""
    bench.store.volume.rollover()
    space = bench.store.volume.space
    while space.free_count > 2:
        space.take(State.DATA)
    bench.tape.start()
    operations.rollover(bench)
    operations.make_directory(bench)
    operations.rollover(bench)


def aside_dropped_and_its_room_used(bench: Bench) -> None:
    operations.overwrite_killed(bench)
    bench.tape.start()
    operations.drop_aside(bench)
    operations.rollover(bench)
    operations.create_big(bench)


def aside_replaced(bench: Bench) -> None:
    """A second writer is killed too."""
    operations.overwrite_killed(bench)
    bench.tape.start()
    operations.overwrite_killed(bench)
    operations.overwrite(bench)


def cleaning_many(bench: Bench) -> None:
    store = bench.store
    for number in range(24):
        write_file(store, 1, b"f%d" % number, bench.fresh(9000))
    for number in range(0, 24, 2):
        store.unlink(1, b"f%d" % number)
    store.fsync_directory(1)
    bench.tape.start()
    before = store.volume.counters.cleaned_segments
    bench.do("clean", lambda: clean_round(store, 0.9), late=True)
    assert store.volume.counters.cleaned_segments > before


def cleaning_under_open_files(bench: Bench) -> None:
    """What is moved has a live content, a committed one and one kept aside."""
    operations.overwrite_left_open(bench)
    operations.change_left_open(bench)
    operations.commit_periodically(bench)
    bench.store.fsync_directory(1)
    bench.tape.start()
    bench.do("clean", lambda: clean_round(bench.store, 1.0), late=True)
    operations.go_on(bench)
    operations.go_on(bench)


def gathering_a_file_in_pieces(bench: Bench) -> None:
    """Its blocks, overwritten one by one, become one piece in the background, in two records."""
    store = bench.store
    ino = write_file(store, 1, b"pieces", bench.fresh(10 * BLOCK_BYTES))
    handle = store.open_file(ino, os.O_RDWR)
    for block in (7, 2, 9, 4, 0, 8, 1, 6, 3, 5):
        store.write(handle, block * BLOCK_BYTES, bench.fresh(BLOCK_BYTES))
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.fsync_directory(1)
    bench.tape.start()

    def gather() -> None:
        for now in range(5):
            store.defragmenter.step(float(now))

    bench.do("gather", gather, late=True)
    assert store.namespace.get(ino).content.ref_count <= 2


def keeping_the_same_bytes_once(bench: Bench) -> None:
    """Two files with a part in common, which one of them loses afterwards, and a third one."""
    store = bench.store
    same = bench.fresh(6 * BLOCK_BYTES)
    inos = [
        write_file(store, 1, name, bench.fresh(BLOCK_BYTES) + same) for name in (b"one", b"two")
    ]
    store.fsync_directory(1)
    bench.tape.start()

    def share() -> None:
        for now in range(5):
            store.deduplicator.step(float(now))

    with deduplicating_blocks(store):
        bench.do("share", share, late=True)
    assert store.deduplicator.shared_bytes == len(same), inos
    bench.unlink(b"one")
    bench.save(b"third", 9000)
    bench.do("clean", lambda: clean_round(store, 1.0), late=True)


@contextlib.contextmanager
def deduplicating_blocks(store: Store) -> Iterator[None]:
    """Files as small as these are compared, too."""
    before = deduplicator._FILE_BYTES_MIN, deduplicator._BLOCK_BYTES, deduplicator._BLOCKS_MIN
    deduplicator._FILE_BYTES_MIN, deduplicator._BLOCK_BYTES = 0, BLOCK_BYTES
    deduplicator._BLOCKS_MIN = 1
    store.deduplicator.is_on = True
    try:
        yield
    finally:
        store.deduplicator.is_on = False
        deduplicator._FILE_BYTES_MIN, deduplicator._BLOCK_BYTES = before[:2]
        deduplicator._BLOCKS_MIN = before[2]


def committing_what_is_open(bench: Bench) -> None:
    operations.create_left_open(bench)
    operations.overwrite_left_open(bench)
    bench.tape.start()
    operations.commit_periodically(bench)
    operations.go_on(bench)
    operations.go_on(bench)


def closing_cleanly(bench: Bench) -> None:
    """A new file, an overwrite and an ordinary change are open."""
    operations.create_left_open(bench)
    operations.overwrite_left_open(bench)
    operations.change_left_open(bench)
    bench.tape.start()

    def close() -> None:
        bench.store.settle_all()
        bench.store.volume.close_cleanly()

    bench.do("close", close, commits=True, steps=True)


def staging(bench: Bench) -> None:
    """An overwrite with more references than a record holds: several records, one promotion."""
    handle = bench.open(b"old", operations.TRUNCATE)
    assert handle is not None
    _scatter(bench, handle)
    bench.tape.start()
    commits = bench.store.volume.counters.commits
    bench.close(handle)
    assert bench.store.volume.counters.commits > commits + 1


def _scatter(bench: Bench, handle: int) -> None:
    """A few words here and there: each needs a reference of its own."""
    for piece in range(SCATTERED):
        bench.store.write(handle, piece * 8192, b"%08d" % piece)
    bench.contents.pop(bench.store.files.get(handle).inode.ino)


def staging_a_new_file(bench: Bench) -> None:
    """Its name appears first, marked incomplete."""
    handle = bench.create(b"new")
    assert handle is not None
    _scatter(bench, handle)
    bench.tape.start()
    store = bench.store
    bench.do("close", lambda: store.flush(handle, writer_killed=False), commits=True, steps=True)


def renaming_over_an_open_file(bench: Bench) -> None:
    handle = bench.open(b"old", os.O_RDWR)
    bench.write(handle, 0, 200)
    bench.tape.start()
    bench.rename(b"other", b"old")
    bench.close(handle)


def unlinking_on_a_full_store(bench: Bench) -> None:
    space = bench.store.volume.space
    while space.free_count > bench.store.volume.refresh_reserve():
        space.take(State.IMAGE)
    handle = bench.create(b"filler")
    step = 0
    while bench.write(handle, 16_000 * step, 16_000):
        step += 1
    bench.close(handle)
    bench.tape.start()
    bench.unlink(b"old")
    bench.unlink(b"dir/below")
    operations.sync_directory(bench)


def writing_behind_moved_data(bench: Bench) -> None:
    """Less than a segment is dead in all: what a write gets of it lies behind what was moved."""
    store, space = bench.store, bench.store.volume.space
    while space.free_count > store.volume.refresh_reserve() + 2:
        space.take(State.IMAGE)
    fill(store)
    handle = store.open_file(bench.inode(b"filler").ino, os.O_RDWR)
    store.allocate(handle, 0, 20_480, keep_size=True, punch=True)
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.fsync_directory(1)
    bench.tape.start()
    moved = store.volume.counters.moved_bytes
    handle = bench.create(b"new")
    assert bench.write(handle, 0, 9000), "there is room for it"
    assert store.volume.counters.moved_bytes > moved
    assert not space.cleaner_room_bytes, "it was given to data"
    bench.close(handle)


SITUATIONS: list[Workload] = [
    rollovers_around_the_ring, journal_wraps_in_a_verb, segment_wraps_in_a_write,
    space_of_a_removed_file, dead_space_used_at_once,
    rollover_without_room, aside_dropped_and_its_room_used, aside_replaced, cleaning_many,
    cleaning_under_open_files, gathering_a_file_in_pieces,
    keeping_the_same_bytes_once, committing_what_is_open,
    closing_cleanly, staging, staging_a_new_file, renaming_over_an_open_file,
    unlinking_on_a_full_store, writing_behind_moved_data,
]  # fmt: skip

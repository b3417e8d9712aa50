"""One-operation workloads, the power cut at every fence: the old state or the new one, never else."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from cxlfs import layout
from cxlfs.errors import CxlfsError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.crash import EventLog
from cxlfs.native import EventKind
from cxlfs.store import Store
from tests.support.power_cut import (
    MEDIA_BYTES,
    Counts,
    State,
    Tape,
    cut_everywhere,
    format_tiny,
    judge,
    masks,
    state_of,
)
from tests.support.stores import CHUNK_BYTES, SEGMENT_BYTES, picture, read_file, write_file

MEDIA = [Granularity.LINE, Granularity.PAGE]
BIG = bytes(range(256)) * 80  # 20 KiB: five chunks, three leases
Workload = Callable[[Store, Tape], None]


def _prepare(store: Store) -> None:
    write_file(store, 1, b"old", b"old content " * 500)
    write_file(store, 1, b"other", b"other")
    directory = store.make_directory(1, b"dir", 0o755, 0, 0).ino
    write_file(store, directory, b"below", b"below" * 100)
    store.make_directory(1, b"empty", 0o755, 0, 0)
    store.make_symlink(1, b"symlink", b"old", 0, 0)
    store.set_xattr(store.lookup(1, b"old").ino, b"user.a", b"1")


def _ino(store: Store, name: bytes) -> int:
    return store.lookup(1, name).ino


def _write_and_close(store: Store, tape: Tape, handle: int, data: bytes) -> None:
    tape.verb("write", lambda: store.write(handle, 0, data), late=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def create_close(store: Store, tape: Tape) -> None:
    handle = 0

    def create() -> None:
        nonlocal handle
        handle = store.create(1, b"new", 0o644, 1, 1, os.O_WRONLY)[1]

    tape.verb("create", create, late=True)
    _write_and_close(store, tape, handle, BIG)


def overwrite(store: Store, tape: Tape) -> None:
    handle = 0

    def start() -> None:
        nonlocal handle
        handle = store.open_file(_ino(store, b"old"), os.O_WRONLY | os.O_TRUNC)

    tape.verb("open", start, late=True)
    _write_and_close(store, tape, handle, BIG)


def overwrite_in_place(store: Store, tape: Tape) -> None:
    handle = store.open_file(_ino(store, b"old"), os.O_RDWR)
    tape.verb("write", lambda: store.write(handle, 100, b"X" * 5000), late=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def overwrite_killed(store: Store, tape: Tape) -> None:
    handle = store.open_file(_ino(store, b"old"), os.O_WRONLY | os.O_TRUNC)
    tape.verb("write", lambda: store.write(handle, 0, BIG), late=True)
    tape.verb("killed", lambda: store.flush(handle, writer_killed=True), late=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def append_fsync(store: Store, tape: Tape) -> None:
    handle = store.open_file(_ino(store, b"old"), os.O_WRONLY)
    for step in range(3):
        offset = 6000 + 777 * step
        tape.verb("write", lambda at=offset: store.write(handle, at, b"a" * 777), late=True)
        tape.verb("fsync", lambda: store.fsync(handle), commits=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def rename_over(store: Store, tape: Tape) -> None:
    tape.verb("rename", lambda: store.rename(1, b"other", 1, b"old"), commits=True)


def rename_open(store: Store, tape: Tape) -> None:
    handle = store.create(1, b"temporary", 0o644, 1, 1, os.O_WRONLY)[1]
    tape.verb("write", lambda: store.write(handle, 0, BIG), late=True)
    tape.verb("rename", lambda: store.rename(1, b"temporary", 1, b"old"), commits=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def rename_directory(store: Store, tape: Tape) -> None:
    below = store.open_file(store.lookup(_ino(store, b"dir"), b"below").ino, os.O_TRUNC | os.O_RDWR)
    store.write(below, 0, b"unpublished")
    tape.verb("rename", lambda: store.rename(1, b"dir", 1, b"empty"), commits=True)
    tape.verb("close", lambda: store.flush(below, writer_killed=False), commits=True)


def rename_exchange(store: Store, tape: Tape) -> None:
    tape.verb("exchange", lambda: store.rename(1, b"dir", 1, b"old", exchange=True), commits=True)


def unlink(store: Store, tape: Tape) -> None:
    tape.verb("unlink", lambda: store.unlink(1, b"old"))
    tape.verb("fsync", lambda: store.fsync_directory(1), commits=True)


def link(store: Store, tape: Tape) -> None:
    tape.verb("link", lambda: store.link(_ino(store, b"old"), 1, b"second"), commits=True)
    tape.verb("unlink", lambda: store.unlink(1, b"old"))


def link_new(store: Store, tape: Tape) -> None:
    attributes, handle = store.create(1, b"first", 0o644, 1, 1, os.O_WRONLY)
    tape.verb("write", lambda: store.write(handle, 0, BIG), late=True)
    tape.verb("link", lambda: store.link(attributes.ino, 1, b"second"), commits=True)


def directories(store: Store, tape: Tape) -> None:
    tape.verb("mkdir", lambda: store.make_directory(1, b"made", 0o700, 5, 5))
    tape.verb("rmdir", lambda: store.remove_directory(1, b"empty"))
    tape.verb("symlink", lambda: store.make_symlink(1, b"s", b"x" * 300, 5, 5))
    tape.verb("mknod", lambda: store.make_node(1, b"fifo", 0o010600, 0, 5, 5))
    tape.verb("fsync", lambda: store.fsync_directory(1), commits=True)


def attributes(store: Store, tape: Tape) -> None:
    ino = _ino(store, b"old")
    tape.verb("chmod", lambda: store.set_attributes(ino, mode=0o600, uid=7))
    tape.verb("utimes", lambda: store.set_attributes(ino, mtime_ns=5, atime_ns=6))
    tape.verb("setxattr", lambda: store.set_xattr(ino, b"user.b", b"2" * 500))
    tape.verb("setxattr", lambda: store.set_xattr(ino, b"user.a", b"3"))
    tape.verb("removexattr", lambda: store.remove_xattr(ino, b"user.a"))


def truncate(store: Store, tape: Tape) -> None:
    ino = _ino(store, b"old")
    tape.verb("shrink", lambda: store.set_attributes(ino, size=100), commits=True)
    tape.verb("grow", lambda: store.set_attributes(ino, size=9000), commits=True)
    tape.verb("empty", lambda: store.set_attributes(ino, size=0), commits=True)


def rollover(store: Store, tape: Tape) -> None:
    tape.verb("rollover", store.volume.rollover, late=True)
    tape.verb("mkdir", lambda: store.make_directory(1, b"made", 0o700, 5, 5))
    tape.verb("rollover", store.volume.rollover, late=True)


def cleaning(store: Store, tape: Tape) -> None:
    for number in range(24):
        write_file(store, 1, b"f%d" % number, bytes([number]) * 9000)
    for number in range(0, 24, 2):
        store.unlink(1, b"f%d" % number)
    store.fsync_directory(1)
    tape.start()
    before = store.volume.counters.cleaned_segments
    tape.verb("clean", lambda: store.cleaner._clean_round(0.9), late=True)
    assert store.volume.counters.cleaned_segments > before


def periodic_commit(store: Store, tape: Tape) -> None:
    created = store.create(1, b"log", 0o644, 1, 1, os.O_WRONLY)[1]
    store.write(created, 0, BIG)
    overwritten = store.open_file(_ino(store, b"old"), os.O_WRONLY | os.O_TRUNC)
    store.write(overwritten, 0, BIG)
    tape.start()
    tape.verb("maintain", lambda: store.files.commit_old_versions(older_than=1e18), commits=True)
    tape.verb("write", lambda: store.write(overwritten, 3, b"more"), late=True)
    tape.verb("close", lambda: store.flush(overwritten, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(overwritten), late=True)
    tape.verb("close", lambda: store.flush(created, writer_killed=False), commits=True)


def clean_close(store: Store, tape: Tape) -> None:
    tape.verb("close", store.close, commits=True)


WORKLOADS: list[Workload] = [
    create_close,
    overwrite,
    overwrite_in_place,
    overwrite_killed,
    append_fsync,
    rename_over,
    rename_open,
    rename_directory,
    rename_exchange,
    unlink,
    link,
    link_new,
    directories,
    attributes,
    truncate,
    rollover,
    cleaning,
    periodic_commit,
    clean_close,
]


def _record(workload: Workload, granularity: Granularity) -> Tape:
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    format_tiny(media)
    store = Store.open(media)
    _prepare(store)
    store.fsync_directory(1)
    tape = Tape(media)
    tape.start()
    workload(store, tape)
    store.abandon()
    return tape


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_power_cut(workload: Workload, granularity: Granularity, rng: random.Random) -> None:
    tape = _record(workload, granularity)
    counts = cut_everywhere(tape, rng, workload.__name__)
    tape.media.close()
    print(f"{counts.points} points, {counts.images} images")
    assert counts.images > counts.points


@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
@pytest.mark.parametrize("name", ["create_close", "overwrite", "periodic_commit", "cleaning"])
def test_power_cut_in_recovery(name: str, granularity: Granularity, rng: random.Random) -> None:
    """Cut once in the workload, then at every fence of the recovery: the state stays."""
    workload = next(w for w in WORKLOADS if w.__name__ == name)
    tape = _record(workload, granularity)
    cursor = tape.media.cursor()
    total = Counts()
    events = range(len(cursor.log))
    for event in sorted(rng.sample(events, min(len(events), 6))):
        cursor.advance(event)
        in_flight = cursor.in_flight()
        every = list(masks(in_flight, rng, page=granularity is Granularity.PAGE))
        image = cursor.image(rng.choice(every))
        counts = _cut_recovery(image, granularity, rng, f"{name} at {event}")
        total.points += counts.points
        total.images += counts.images
    tape.media.close()
    print(f"{total.points} points, {total.images} images")
    assert total.images > total.points > 0


def _cut_recovery(
    image: bytes, granularity: Granularity, rng: random.Random, label: str
) -> Counts:
    media = SimulatedMedia(len(image), granularity, image=image)
    tape = Tape(media)
    tape.start()
    store = Store.open(media)
    try:
        tape.verb("recovery", lambda: None, commits=True)
        assert state_of(tape.images[0], granularity) == state_of(tape.images[1], granularity)
        return cut_everywhere(tape, rng, f"recovery after {label}", work_every=8)
    finally:
        store.abandon()
        media.close()


@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_killed_daemon_then_power_cut(granularity: Granularity, rng: random.Random) -> None:
    """Stores that were never fenced survive the kill of the daemon: what its successor showed must
    survive a power cut after that, though nothing the first one left behind was durable."""
    total = Counts()
    for workload in (create_close, overwrite, attributes, rollover):
        tape = _record(workload, granularity)
        cursor = tape.media.cursor()
        for event in sorted(rng.sample(range(len(cursor.log)), min(len(cursor.log), 8))):
            total.images += _kill_then_cut(tape, event, rng, workload.__name__)
        tape.media.close()
    print(f"{total.images} images")
    assert total.images > 100


def _kill_then_cut(tape: Tape, event: int, rng: random.Random, label: str) -> int:
    """The log of the killed daemon up to ``event`` goes on with that of its successor."""
    granularity = tape.media.granularity
    cursor = tape.media.cursor()
    cursor.advance(event)
    seen = cursor.image(cursor.in_flight().all())
    media = SimulatedMedia(len(seen), granularity)
    media.load(tape.images[0])
    media.restart()
    _repeat(media, cursor.log, event)
    assert media.image() == seen
    store = Store.open(media)
    opened = len(media.events())
    shown = picture(store)
    write_file(store, 1, b"successor", b"durable")
    after = picture(store)
    store.abandon()
    images = 0
    successor = media.cursor()
    fences = successor.log.indexes(EventKind.FENCE)
    for place in [*fences[fences >= opened].tolist(), len(successor.log)]:
        successor.advance(place)
        in_flight = successor.in_flight()
        allowed = [shown, after] if place < len(successor.log) else [after]
        for mask in masks(in_flight, rng, page=granularity is Granularity.PAGE):
            cut = SimulatedMedia(len(seen), granularity, image=successor.image(mask))
            problem = judge(cut, allowed, work=False)
            cut.close()
            assert problem is None, f"{label}, killed at {event}, cut at {place}: {problem}"
            images += 1
    media.close()
    return images


def _repeat(media: SimulatedMedia, log: EventLog, end: int) -> None:
    """Do to ``media`` what a log says."""
    for index in range(end):
        kind, _thread, offset, length = log.entries[index]
        if kind == EventKind.STORE:
            media.store(offset, bytes(log.payload(index)))
        elif kind == EventKind.COPY:
            media.copy(offset, bytes(log.payload(index)))
        elif kind == EventKind.WRITE_BACK:
            media.write_back(offset, length)
        elif kind == EventKind.FENCE:
            media.fence()


@pytest.mark.parametrize("old_store", [False, True])
@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_power_cut_in_mkfs(granularity: Granularity, rng: random.Random, old_store: bool) -> None:
    """Afterwards: the old store, no store, or the new empty one; never a mixture."""
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    if old_store:
        format_tiny(media)
        store = Store.open(media)
        _prepare(store)
        store.close()
    media.restart()
    old = state_of(media.image(), granularity) if old_store else None
    Store.format(
        media,
        segment_size_bytes=SEGMENT_BYTES,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
        uuid=bytes(range(100, 116)),
    )
    new = state_of(media.image(), granularity)
    cursor = media.cursor()
    outcomes: Counter[str] = Counter()
    for event in [*cursor.log.indexes(EventKind.FENCE).tolist(), len(cursor.log)]:
        cursor.advance(event)
        in_flight = cursor.in_flight()
        for mask in masks(in_flight, rng, page=granularity is Granularity.PAGE):
            cut = SimulatedMedia(MEDIA_BYTES, granularity, image=cursor.image(mask))
            outcomes[_mkfs_outcome(cut, old, new)] += 1
            cut.close()
    print(dict(outcomes))
    assert outcomes["new"] > 0
    assert outcomes["none"] > 0
    assert (outcomes["old"] > 0) == old_store
    assert cursor.image(cursor.in_flight().none()) == media.image()


def _mkfs_outcome(media: SimulatedMedia, old: State | None, new: State) -> str:
    try:
        store = Store.open(media)
    except CxlfsError:
        return "none"
    found = picture(store)
    store.abandon()
    assert found in (old, new), "neither the old store nor the new one"
    return "old" if found == old else "new"


def test_state_is_what_the_workload_means() -> None:
    """The judge compares states that recovery itself tells: they must be the right ones."""
    tape = _record(overwrite, Granularity.LINE)
    store = Store.open(tape.media)
    assert read_file(store, _ino(store, b"old")) == BIG
    assert store.get_xattr(_ino(store, b"old"), b"user.a") == b"1"
    store.abandon()
    tape.media.close()
    before = SimulatedMedia(MEDIA_BYTES, Granularity.LINE, image=tape.images[0])
    store = Store.open(before)
    assert read_file(store, _ino(store, b"old")) == b"old content " * 500
    store.abandon()
    before.close()

"""One-operation workloads on a tiny recorded store; each verb is marked on the tape."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.space import State
from cxlfs.store import Store
from tests.support.power_cut import MEDIA_BYTES, Tape, format_tiny
from tests.support.stores import write_file

BIG = bytes(range(256)) * 80  # 20 KiB: five chunks, three leases
Workload = Callable[[Store, Tape], None]


def prepare(store: Store) -> None:
    write_file(store, 1, b"old", b"old content " * 500)
    write_file(store, 1, b"other", b"other")
    directory = store.make_directory(1, b"dir", 0o755, 0, 0).ino
    write_file(store, directory, b"below", b"below" * 100)
    store.make_directory(1, b"empty", 0o755, 0, 0)
    store.make_symlink(1, b"symlink", b"old", 0, 0)
    store.set_xattr(store.lookup(1, b"old").ino, b"user.a", b"1")


def ino_of(store: Store, name: bytes) -> int:
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
        handle = store.open_file(ino_of(store, b"old"), os.O_WRONLY | os.O_TRUNC)

    tape.verb("open", start, late=True)
    _write_and_close(store, tape, handle, BIG)


def overwrite_in_place(store: Store, tape: Tape) -> None:
    handle = store.open_file(ino_of(store, b"old"), os.O_RDWR)
    tape.verb("write", lambda: store.write(handle, 100, b"X" * 5000), late=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def overwrite_killed(store: Store, tape: Tape) -> None:
    handle = store.open_file(ino_of(store, b"old"), os.O_WRONLY | os.O_TRUNC)
    tape.verb("write", lambda: store.write(handle, 0, BIG), late=True)
    tape.verb("killed", lambda: store.flush(handle, writer_killed=True), late=True)
    tape.verb("release", lambda: store.release(handle), late=True)


def append_fsync(store: Store, tape: Tape) -> None:
    handle = store.open_file(ino_of(store, b"old"), os.O_WRONLY)
    for step in range(3):
        offset = 6000 + 777 * step
        append = functools.partial(store.write, handle, offset, b"a" * 777)
        tape.verb("write", append, late=True)
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
    below = store.open_file(
        store.lookup(ino_of(store, b"dir"), b"below").ino, os.O_TRUNC | os.O_RDWR
    )
    store.write(below, 0, b"unpublished")
    tape.verb("rename", lambda: store.rename(1, b"dir", 1, b"empty"), commits=True)
    tape.verb("close", lambda: store.flush(below, writer_killed=False), commits=True)


def rename_exchange(store: Store, tape: Tape) -> None:
    tape.verb("exchange", lambda: store.rename(1, b"dir", 1, b"old", exchange=True), commits=True)


def unlink(store: Store, tape: Tape) -> None:
    tape.verb("unlink", lambda: store.unlink(1, b"old"))
    tape.verb("fsync", lambda: store.fsync_directory(1), commits=True)


def link(store: Store, tape: Tape) -> None:
    tape.verb("link", lambda: store.link(ino_of(store, b"old"), 1, b"second"), commits=True)
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
    ino = ino_of(store, b"old")
    tape.verb("chmod", lambda: store.set_attributes(ino, mode=0o600, uid=7))
    tape.verb("utimes", lambda: store.set_attributes(ino, mtime_ns=5, atime_ns=6))
    tape.verb("setxattr", lambda: store.set_xattr(ino, b"user.b", b"2" * 500))
    tape.verb("setxattr", lambda: store.set_xattr(ino, b"user.a", b"3"))
    tape.verb("removexattr", lambda: store.remove_xattr(ino, b"user.a"))


def truncate(store: Store, tape: Tape) -> None:
    ino = ino_of(store, b"old")
    tape.verb("shrink", lambda: store.set_attributes(ino, size=100), commits=True)
    tape.verb("grow", lambda: store.set_attributes(ino, size=9000), commits=True)
    tape.verb("empty", lambda: store.set_attributes(ino, size=0), commits=True)


def rollover(store: Store, tape: Tape) -> None:
    tape.verb("rollover", store.volume.rollover, late=True)
    tape.verb("mkdir", lambda: store.make_directory(1, b"made", 0o700, 5, 5))
    tape.verb("rollover", store.volume.rollover, late=True)


def rollover_without_room(store: Store, tape: Tape) -> None:
    """The fallback's segments are given up for the new image."""
    store.volume.rollover()
    space = store.volume.space
    while space.free_count > 2:
        space.take(State.DATA)
    tape.start()
    tape.verb("rollover", store.volume.rollover, late=True)
    tape.verb("mkdir", lambda: store.make_directory(1, b"made", 0o700, 5, 5))
    tape.verb("rollover", store.volume.rollover, late=True)


def aside_dropped(store: Store, tape: Tape) -> None:
    """What is kept aside is given up, and its room written again."""
    overwrite_killed(store, tape)
    tape.start()
    tape.verb("drop", store.versions.drop_oldest_aside, late=True)
    tape.verb("rollover", store.volume.rollover, late=True)
    tape.verb("write", lambda: write_file(store, 1, b"new", BIG), commits=True)


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
    overwritten = store.open_file(ino_of(store, b"old"), os.O_WRONLY | os.O_TRUNC)
    store.write(overwritten, 0, BIG)
    tape.start()
    tape.verb("maintain", lambda: store.files.commit_old_versions(older_than=1e18), commits=True)
    tape.verb("write", lambda: store.write(overwritten, 3, b"more"), late=True)
    tape.verb("close", lambda: store.flush(overwritten, writer_killed=False), commits=True)
    tape.verb("release", lambda: store.release(overwritten), late=True)
    tape.verb("close", lambda: store.flush(created, writer_killed=False), commits=True)


# --- ranges of files --------------------------------------------------------------------------


def _copy(store: Store, tape: Tape, source: int, target: int, place: int) -> None:
    tape.verb("copy", lambda: store.copy_range(source, 0, target, place, 1 << 40), late=True)


def copy_committed(store: Store, tape: Tape) -> None:
    """Then the source goes, and its room is written again."""
    source = store.open_file(ino_of(store, b"old"), os.O_RDONLY)
    target = store.create(1, b"new", 0o644, 1, 1, os.O_RDWR)[1]
    _copy(store, tape, source, target, 100)
    tape.verb("close", lambda: store.flush(target, writer_killed=False), commits=True)
    store.release(source)
    tape.verb("unlink", lambda: store.unlink(1, b"old"))
    tape.verb("rollover", store.volume.rollover, late=True)
    tape.verb("write", lambda: write_file(store, 1, b"next", BIG), commits=True)


def copy_unpublished(store: Store, tape: Tape) -> None:
    """The copy is published before the source, which grows on, and is published, too."""
    source = store.create(1, b"new", 0o644, 1, 1, os.O_RDWR)[1]
    tape.verb("write", lambda: store.write(source, 0, BIG[:9001]), late=True)
    target = store.open_file(ino_of(store, b"old"), os.O_RDWR)
    _copy(store, tape, source, target, 3000)
    tape.verb("write", lambda: store.write(source, 9001, b"more"), late=True)
    tape.verb("fsync", lambda: store.fsync(target), commits=True)
    tape.verb("write", lambda: store.write(source, 9005, b"and more"), late=True)
    tape.verb("close", lambda: store.flush(source, writer_killed=False), commits=True)


def copy_of_a_killed_writer(store: Store, tape: Tape) -> None:
    source = store.open_file(ino_of(store, b"old"), os.O_RDWR | os.O_TRUNC)
    tape.verb("write", lambda: store.write(source, 0, BIG), late=True)
    target = store.open_file(ino_of(store, b"other"), os.O_RDWR | os.O_TRUNC)
    _copy(store, tape, source, target, 0)
    tape.verb("killed", lambda: store.flush(source, writer_killed=True), late=True)
    tape.verb("release", lambda: store.release(source), late=True)
    tape.verb("close", lambda: store.flush(target, writer_killed=False), commits=True)
    tape.verb("drop", store.versions.drop_oldest_aside, late=True)
    tape.verb("rollover", store.volume.rollover, late=True)


def copy_within(store: Store, tape: Tape) -> None:
    handle = store.open_file(ino_of(store, b"old"), os.O_RDWR)
    tape.verb("write", lambda: store.write(handle, 6000, BIG[:5000]), late=True)
    tape.verb("copy", lambda: store.copy_range(handle, 2000, handle, 20_000, 8000), late=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)


def cleaning_shared(store: Store, tape: Tape) -> None:
    """What others share is moved; one copy is committed, one is not yet."""
    made: list[int] = []
    for number in range(12):
        write_file(store, 1, b"f%d" % number, bytes([number]) * 9000)
        source = store.open_file(ino_of(store, b"f%d" % number), os.O_RDONLY)
        made.append(store.create(1, b"c%d" % number, 0o644, 1, 1, os.O_RDWR)[1])
        store.copy_range(source, 1000, made[-1], 0, 5000)
        store.release(source)
        if number % 3:
            store.flush(made[-1], writer_killed=False)
        if number % 2:
            store.unlink(1, b"f%d" % number)
    store.fsync_directory(1)
    tape.start()
    before = store.volume.counters.moved_bytes
    tape.verb("clean", lambda: store.cleaner._clean_round(0.9), late=True)
    assert store.volume.counters.moved_bytes > before
    tape.verb("close", lambda: store.flush(made[0], writer_killed=False), commits=True)


def allocate(store: Store, tape: Tape) -> None:
    handle = store.open_file(ino_of(store, b"old"), os.O_RDWR)
    tape.verb("allocate", lambda: store.allocate(handle, 5000, 9000), late=True)
    punch = functools.partial(store.allocate, handle, 100, 4500, keep_size=True, punch=True)
    tape.verb("punch", punch, late=True)
    tape.verb("write", lambda: store.write(handle, 7000, b"in the middle"), late=True)
    tape.verb("fsync", lambda: store.fsync(handle), commits=True)
    tape.verb("zero", lambda: store.allocate(handle, 13_990, 100, zero=True), late=True)
    tape.verb("close", lambda: store.flush(handle, writer_killed=False), commits=True)


def sync(store: Store, tape: Tape) -> None:
    created = store.create(1, b"log", 0o644, 1, 1, os.O_WRONLY)[1]
    tape.verb("write", lambda: store.write(created, 0, BIG), late=True)
    overwritten = store.open_file(ino_of(store, b"old"), os.O_WRONLY | os.O_TRUNC)
    tape.verb("write", lambda: store.write(overwritten, 0, b"half"), late=True)
    tape.verb("mkdir", lambda: store.make_directory(1, b"made", 0o700, 5, 5))
    tape.verb("sync", store.sync, commits=True)


RANGE_WORKLOADS: list[Workload] = [
    copy_committed,
    copy_unpublished,
    copy_of_a_killed_writer,
    copy_within,
    cleaning_shared,
    allocate,
    sync,
]


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
    rollover_without_room,
    aside_dropped,
    cleaning,
    periodic_commit,
    clean_close,
    *RANGE_WORKLOADS,
]


def record(workload: Workload, granularity: Granularity) -> Tape:
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    format_tiny(media)
    store = Store.open(media)
    prepare(store)
    store.fsync_directory(1)
    tape = Tape(media)
    tape.start()
    workload(store, tape)
    store.abandon()
    return tape

"""Programs that survive their daemon, sleep, lock late or not at all, and what they may do to the
store of others: nothing; and what is said to those who look.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable

from cxlfs.errors import BusyError, CxlfsError, InvalidArgumentError, invariant
from cxlfs.media import SimulatedMedia
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.crash.bench import Bench
from tests.support.crash.direct_operations import (
    WANTED_BYTES,
    begin,
    direct_create,
    direct_overwrite,
)
from tests.support.crash.tape import MEDIA_BYTES, format_tiny
from tests.support.slips import Locks, Program, Watches
from tests.support.stores import read_file, write_file

LITTLE_BYTES = 4096
"""Too little for a slip."""


def _record_from_here(bench: Bench, operation: Callable[[Bench], None]) -> None:
    """What is there is durable, and nothing of it is looked for any more."""
    bench.store.fsync_directory(1)
    bench.contents.clear()
    bench.tape.start()
    operation(bench)


def direct_survivor(bench: Bench) -> None:
    """The daemon is killed in the middle of a program's writes, which goes on storing, into its
    lease and its slip, while the next daemon fills the store; beside the tape.
    """
    media = SimulatedMedia(MEDIA_BYTES, bench.tape.media.granularity)
    rng = random.Random(7)
    try:
        format_tiny(media)
        _survive(Store.open(media), media, rng)
    finally:
        media.close()
    direct_create(bench)


def _survive(store: Store, media: SimulatedMedia, rng: random.Random) -> None:
    locks = Locks(media)
    kept = {write_file(store, 1, b"kept", rng.randbytes(3000)): b""}
    kept = {ino: read_file(store, ino) for ino in kept}
    for _ in range(4):  # the first free segments are for the next daemon's image and journal
        write_file(store, 1, b"filler", bytes(3000))
        _fill_the_segment(store)
    store.unlink(1, b"filler")
    store.fsync_directory(1)
    _, handle = store.create(1, b"lost", 0o644, 1, 1, os.O_RDWR)
    program = Program(store, handle, locks)
    program.ask(WANTED_BYTES)
    program.write(0, rng.randbytes(1000))
    program.count_copying(1)
    store.abandon()
    store = Store.open(media)
    for number in range(200):
        data = rng.randbytes(rng.randrange(1, 6000))
        try:
            kept[write_file(store, 1, b"new %d" % number, data)] = data
        except CxlfsError:
            break
        if number in {1, 30, 60}:
            start, tail_crc = program.copy(rng.randbytes(700))
            program.append(start, start, 700, tail_crc)
    program.copy(rng.randbytes(program.held().capacity_bytes - program.length))
    for ino, data in kept.items():
        invariant(read_file(store, ino) == data, "a survivor changed a file that is not its own")
    program.die()
    store.direct.maintain()
    invariant(store.volume.space.held_count == 0, "nobody is left to wait for")
    store.abandon()
    invariant(not list(run_passes(media, structure_only=False)), "a survivor stored into the store")


def _fill_the_segment(store: Store) -> None:
    """What is given next begins another one."""
    space = store.volume.space
    while space._head is None or space._head.end - space._head.position > LITTLE_BYTES:
        write_file(store, 1, b"filler", bytes(3000))


def direct_sleeper(bench: Bench) -> None:
    """A program is stopped in the middle of a copy. Its file is closed, the store is filled and
    emptied; then it wakes up and finishes.
    """
    store = bench.store
    writer = begin(bench, b"new")
    writer.write(0, 1000)
    program = writer.program
    program.count_copying(1)
    bench.close(writer.handle)
    names = [b"new", *(b"other %d" % number for number in range(8))]
    for name in names[1:]:
        write_file(store, 1, name, bench.fresh(4000))
    contents = [read_file(store, bench.inode(name).ino) for name in names]
    start, tail_crc = program.copy(bench.fresh(program.held().capacity_bytes - program.length))
    invariant(not program.append(0, start, 100, tail_crc), "its slip was closed")
    now = [read_file(store, bench.inode(name).ino) for name in names]
    invariant(now == contents, "it stored into a file")
    program.count_copying(-1)
    store.direct.maintain()
    slip_bytes = program.held().slip_bytes
    invariant(store.direct.apart_bytes == slip_bytes, "nobody copies any more")
    program.die()
    store.direct.maintain()
    invariant(store.direct.apart_bytes == 0, "nobody has it mapped any more")
    _record_from_here(bench, direct_create)


def direct_unlocked(bench: Bench) -> None:
    """A program that has not locked its room is given no more."""
    handle = bench.create(b"new")
    locks = bench.locks = Locks(bench.store.media)
    [lease] = bench.store.direct.lease(handle or 0, WANTED_BYTES)
    locks.take("program", lease.media_offset, lease.length_bytes - 1)
    locks.take("program", lease.slip_offset, lease.slip_bytes)
    try:
        bench.store.direct.lease(handle or 0, WANTED_BYTES)
    except InvalidArgumentError:
        pass
    else:
        raise AssertionError("more room was given to who has not locked what he has")
    locks.drop("program")
    bench.close(handle)


def direct_late(bench: Bench) -> None:
    """A program is stopped between LEASE and the lock; its file is closed meanwhile, and others get
    the room. It wakes up, locks, and goes on if it may.
    """
    store = bench.store
    writer = begin(bench, b"new")
    if writer.handle is None:
        return
    [lease] = store.direct.lease(writer.handle, WANTED_BYTES)
    bench.close(writer.handle)
    names = [b"other %d" % number for number in range(12)]
    for name in names:
        write_file(store, 1, name, bench.fresh(4000))
    contents = [read_file(store, bench.inode(name).ino) for name in names]
    program = writer.program
    if program.take(lease):
        program.count_copying(1)
        program.copy(bench.fresh(2000))
        program.count_copying(-1)
    now = [read_file(store, bench.inode(name).ino) for name in names]
    invariant(now == contents, "it stored into a file")
    program.die()
    store.direct.maintain()
    invariant(store.direct.apart_bytes == 0, "nobody has it mapped")
    _record_from_here(bench, direct_create)


def direct_mapped(bench: Bench) -> None:
    """What a reader has mapped stays, while the file is overwritten and its room is wanted."""
    store = bench.store
    _fill_the_segment(store)
    write_file(store, 1, b"mapped", bench.fresh(5000))
    _fill_the_segment(store)
    store.unlink(1, b"filler")
    old = bytes(bench.content(bench.inode(b"mapped")))
    reader = store.open_file(bench.inode(b"mapped").ino, os.O_RDONLY)
    held = bench.inode(b"mapped").content.hold()
    (place, length), *more = held.ranges()
    held.close()
    part = store.direct.mapped.map(reader, 0, 16_000)
    invariant(part.next_offset == part.size_bytes == 5000 and not more, "one extent")
    write_file(store, 1, b"mapped", bench.fresh(4000))
    for number in range(40):
        write_file(store, 1, b"other", bench.fresh(6000 + number))
        store.volume.release_dead()
    invariant(store.media.read(place, length) == old, "mapped bytes have changed")
    store.direct.mapped.unmap(reader)
    store.release(reader)
    _record_from_here(bench, direct_overwrite)


def direct_watched(bench: Bench) -> None:
    """Whoever reads by himself asks again as soon as somebody may write, or nothing is held."""
    store = bench.store
    watches = Watches(store.media)
    write_file(store, 1, b"watched", bench.fresh(5000))
    ino = bench.inode(b"watched").ino
    reader = store.open_file(ino, os.O_RDONLY)

    def watch() -> int:
        return store.direct.mapped.map(reader, 0, 16_000, watched=True).watch

    def require_none(when: str) -> None:
        invariant(not watches.held, f"the file is watched {when}")

    invariant(watches.held == {watch()}, "it is watched")
    writer = store.open_file(ino, os.O_WRONLY)
    require_none("beside a writer")
    with contextlib.suppress(BusyError):
        watch()
    require_none("beside a writer who was there before")
    store.write(writer, 10, bench.fresh(100))
    store.flush(writer, writer_killed=False)
    store.release(writer)
    watch()
    store.set_attributes(ino, size=4000)
    require_none("when it was cut")
    watch()
    store.release(reader)
    require_none("when nobody holds it")
    store.unlink(1, b"watched")
    _record_from_here(bench, direct_overwrite)


def direct_verified(bench: Bench) -> None:
    """Nobody is told that a content was verified of which less is known than all, lately."""
    store, size = bench.store, 5000
    verified, mapped = store.direct.verified, store.direct.mapped
    now = [1000.0]
    verified.for_seconds, verified.piece_bytes_min, verified._clock = 60, 1024, lambda: now[0]
    write_file(store, 1, b"verified", bench.fresh(size))
    ino = bench.inode(b"verified").ino
    first, second = (store.open_file(ino, os.O_RDONLY) for _ in range(2))

    def is_verified(reader: int) -> bool:
        return mapped.map(reader, 0, 16_000, shared=True).is_verified

    def verify(reader: int, pieces: int) -> None:
        piece = mapped.verify(reader, (0, 0))
        for _ in range(pieces):
            piece = mapped.verify(reader, (piece.offset, piece.length_bytes))

    def verify_all() -> None:
        invariant(not is_verified(first), "it was not verified")
        verify(first, 5)
        invariant(is_verified(second), "all of it was verified")

    invariant(not is_verified(first) and not is_verified(second), "nobody has compared anything")
    mapped.verify(first, (0, 0))
    for offset in range(0, size, 1024):
        mapped.verify(second, (offset, min(1024, size - offset)))
    invariant(not is_verified(second), "what was compared was given to another")
    verify(first, 2)
    invariant(not is_verified(second), "a part of it was verified")
    verified.forget()
    verify_all()
    now[0] += 61
    verify_all()
    store.health.met()
    verify_all()
    writer = store.open_file(ino, os.O_RDWR)
    store.write(writer, 0, bench.fresh(size))
    store.flush(writer, writer_killed=False)
    invariant(not is_verified(first), "another content has taken its place")
    for handle in (writer, first, second):
        store.release(handle)
    store.unlink(1, b"verified")
    _record_from_here(bench, direct_overwrite)


DIRECT_SITUATIONS = [
    direct_survivor,
    direct_sleeper,
    direct_unlocked,
    direct_late,
    direct_mapped,
    direct_watched,
    direct_verified,
]

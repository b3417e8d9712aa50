"""Operations of programs that store file data by themselves, beside the daemon; and what a program
that survives its daemon may do to the next one's store: nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Sequence

from cxlfs.errors import BusyError, CxlfsError, InvalidArgumentError, invariant
from cxlfs.media import SimulatedMedia
from cxlfs.store import Store
from cxlfs.store.direct import Lease
from cxlfs.verify import run_passes
from tests.support.crash.bench import Bench
from tests.support.crash.tape import MEDIA_BYTES, format_tiny
from tests.support.model import write_bytes as write_model
from tests.support.slips import Locks, Program, Watches
from tests.support.stores import read_file, write_file

TRUNCATE = os.O_RDWR | os.O_TRUNC
WANTED_BYTES = 16 << 10
SEVERAL_BYTES = 96 << 10
"""More than a segment, so that leases lie as the file does, and little pieces elsewhere."""
LITTLE_BYTES = 4096
"""Too little for a slip."""


class DirectWriter:
    """A program and its handle, in the words of a bench."""

    def __init__(self, bench: Bench, handle: int | None) -> None:
        self.bench = bench
        self.handle = handle
        if bench.locks is None:
            bench.locks = Locks(bench.store.media)
        self.program = Program(bench.store, handle or 0, bench.locks)

    def ask(self) -> bool:
        ask = functools.partial(self.program.ask, WANTED_BYTES)
        return self.bench.do("lease", ask, late=True, keeps=True, steps=True)

    def write(self, offset: int, length: int, *, look: bool = True) -> None:
        """Asks for room where there is none; ``look``: at the size, behind it."""
        bench, program = self.bench, self.program
        if self.handle is None:
            return
        inode = bench.store.files.get(self.handle).inode
        full = program.lease is not None and program.length + length > WANTED_BYTES // 2
        wants = not bench.store.direct.is_open(inode.ino) or full
        if inode.handles != 1 or (wants and not self.ask()):
            bench.write(self.handle, offset, length)
            return
        payload = bench.fresh(length)
        content = bench.content(inode)
        write = functools.partial(program.write, offset, payload)
        bench.do("direct write", write, late=True, keeps=True)
        write_model(content, offset, payload)
        if look:
            size = bench.store.get_attributes(inode.ino).size
            invariant(size == len(content), "what was appended shows in the size")

    def write_in_several(self, offset: int, lengths: Sequence[int]) -> None:
        """A piece into each lease of one request, and what is left of them goes back."""
        bench, store = self.bench, self.bench.store
        inode = None if self.handle is None else store.files.get(self.handle).inode
        if inode is None or inode.handles != 1:  # of two openers none has room
            bench.write(self.handle, offset, sum(lengths))
            return
        content = bench.content(inode)
        leases: list[Lease] = []

        def ask() -> None:
            more = store.direct.lease(
                self.handle or 0, SEVERAL_BYTES, file_offset=offset, count_max=16
            )
            leases.extend(more)

        if not bench.do("lease", ask, late=True, keeps=True, steps=True):
            return
        for lease, length in zip(leases, lengths, strict=False):
            self.program.take(lease)
            payload = bench.fresh(min(length, lease.capacity_bytes))
            write = functools.partial(self.program.write, offset, payload)
            bench.do("direct write", write, late=True, keeps=True)
            write_model(content, offset, payload)
            offset += len(payload)
        returned = [lease.lease_id for lease in leases]
        settle = functools.partial(store.direct.settle, self.handle, returned)
        bench.do("settle", settle, late=True, keeps=True)

    def end(self, *, killed: bool = False) -> None:
        """Close, or die; then nobody has the room mapped any more."""
        if killed and self.program.lease is not None:
            self.program.count_copying(1)
            self.program.copy(b"half a write", fence=False)
            self.program.die()
        self.bench.close(self.handle, killed=killed)
        self.program.die()


def _begin(bench: Bench, path: bytes, flags: int = TRUNCATE) -> DirectWriter:
    handle = bench.open(path, flags)
    if handle is None:
        handle = bench.create(path)
    return DirectWriter(bench, handle)


def direct_create(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    for offset, length in ((0, 5000), (5000, 3333), (8333, 1)):
        writer.write(offset, length)
    writer.end()


def direct_overwrite(bench: Bench) -> None:
    writer = _begin(bench, b"old")
    writer.write(0, 4096, look=False)
    writer.write(4096, 3000, look=False)
    writer.end()


def direct_refused(bench: Bench) -> None:
    """A commit closes the slip under the program, which then goes through the kernel."""
    writer = _begin(bench, b"new")
    writer.write(0, 500)
    bench.fsync(writer.handle)
    if writer.handle is None or writer.program.lease is None:
        return
    content = bench.content(bench.store.files.get(writer.handle).inode)
    if writer.program.write(500, b"late" * 100):
        write_model(content, 500, b"late" * 100)
    else:
        bench.write(writer.handle, 500, 400)
    writer.end()


def direct_overwrite_killed(bench: Bench) -> None:
    writer = _begin(bench, b"old")
    writer.write(0, 4096)
    writer.end(killed=True)


def direct_create_killed(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    writer.write(0, 700)
    writer.end(killed=True)


def direct_in_place(bench: Bench) -> None:
    writer = _begin(bench, b"old", os.O_RDWR)
    writer.write(100, 50)
    writer.write(9000, 600)
    writer.end()


def direct_fsync(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    writer.write(0, 777)
    bench.fsync(writer.handle)
    writer.write(777, 3000)
    bench.fsync(writer.handle)
    writer.write(50, 200)
    writer.end()


def direct_and_through_the_kernel(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    writer.write(0, 2000)
    bench.write(writer.handle, 1000, 2000)
    writer.write(2500, 2000)
    bench.write(writer.handle, 10, 20)
    writer.end()


def direct_truncated(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    writer.write(0, 5000)
    bench.ftruncate(writer.handle, 1234)
    writer.write(2000, 500)
    bench.ftruncate(writer.handle, 0)
    writer.write(0, 600)
    writer.end()


def direct_renamed(bench: Bench) -> None:
    """The rename publishes; what is appended behind it is refused, and asked for anew."""
    writer = _begin(bench, b"temporary")
    writer.write(0, 3000)
    bench.rename(b"temporary", b"old")
    writer.write(3000, 1000)
    writer.end()


def direct_unlinked(bench: Bench) -> None:
    writer = _begin(bench, b"new")
    writer.write(0, 3000)
    bench.unlink(b"new")
    writer.write(3000, 100)
    writer.end()


def direct_left_open(bench: Bench) -> None:
    writer = _begin(bench, b"old")
    if writer.handle is not None:
        writer.write(0, 3000)
        bench.left_open.append(writer.handle)


def direct_beside_another(bench: Bench) -> None:
    """Its slip ends with the other's open, which sees everything."""
    writer = _begin(bench, b"new")
    writer.write(0, 900)
    other = bench.open(b"new", os.O_RDWR)
    bench.write(other, 500, 800)
    with contextlib.suppress(BusyError):
        writer.program.ask()
        raise AssertionError("room was given although somebody else has the file open")
    writer.write(1300, 100)  # through the kernel: there are two
    bench.close(other)
    writer.end()


def direct_committed_in_between(bench: Bench) -> None:
    """The periodic commit, of a new file."""
    writer = _begin(bench, b"new")
    writer.write(0, 2222)
    commit = bench.store.commits.commit_all
    bench.do("commit", commit, steps=True, commits=True)
    writer.write(2222, 333)
    writer.end()


def direct_in_several(bench: Bench) -> None:
    """Leases of one request, of different segments, and the room passed over between them."""
    writer = _begin(bench, b"new")
    writer.write_in_several(12_000, (700, 5000, 333))
    writer.write_in_several(18_033, (64, 4096, 900))
    writer.end()


DIRECT_OPERATIONS = [
    direct_create, direct_overwrite, direct_overwrite_killed, direct_create_killed, direct_in_place,
    direct_fsync, direct_and_through_the_kernel, direct_truncated, direct_renamed, direct_unlinked,
    direct_left_open, direct_refused, direct_beside_another, direct_committed_in_between,
    direct_in_several,
]  # fmt: skip


# --- who dies when ------------------------------------------------------------------------------


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
    writer = _begin(bench, b"new")
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
    store.fsync_directory(1)
    bench.contents.clear()
    bench.tape.start()
    direct_create(bench)


def direct_unlocked(bench: Bench) -> None:
    """A program that has not locked its room is not told to go on."""
    handle = bench.create(b"new")
    locks = bench.locks = Locks(bench.store.media)
    [lease] = bench.store.direct.lease(handle or 0, WANTED_BYTES)
    locks.take("program", lease.media_offset, lease.length_bytes - 1)
    try:
        bench.store.direct.confirm(handle or 0, [lease.lease_id])
    except InvalidArgumentError:
        pass
    else:
        raise AssertionError("room was confirmed that nobody has locked")
    locks.drop("program")
    bench.close(handle)


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
    store.fsync_directory(1)
    bench.contents.clear()
    bench.tape.start()
    direct_overwrite(bench)


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
    store.fsync_directory(1)
    bench.contents.clear()
    bench.tape.start()
    direct_overwrite(bench)


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
    store.fsync_directory(1)
    bench.contents.clear()
    bench.tape.start()
    direct_overwrite(bench)


DIRECT_SITUATIONS = [
    direct_survivor,
    direct_sleeper,
    direct_unlocked,
    direct_mapped,
    direct_watched,
    direct_verified,
]

"""Operations of programs that store file data by themselves, beside the daemon."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence

from cxlfs.errors import BusyError, invariant
from cxlfs.store.direct import Lease
from tests.support.crash.bench import Bench
from tests.support.model import write_bytes as write_model
from tests.support.slips import Locks, Program

TRUNCATE = os.O_RDWR | os.O_TRUNC
WANTED_BYTES = 16 << 10
SEVERAL_BYTES = 96 << 10
"""More than a segment, so that leases lie as the file does, and little pieces elsewhere."""


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
            invariant(self.program.take(lease), "nobody has closed the slip in between")
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


def begin(bench: Bench, path: bytes, flags: int = TRUNCATE) -> DirectWriter:
    handle = bench.open(path, flags)
    if handle is None:
        handle = bench.create(path)
    return DirectWriter(bench, handle)


def direct_create(bench: Bench) -> None:
    writer = begin(bench, b"new")
    for offset, length in ((0, 5000), (5000, 3333), (8333, 1)):
        writer.write(offset, length)
    writer.end()


def direct_overwrite(bench: Bench) -> None:
    writer = begin(bench, b"old")
    writer.write(0, 4096, look=False)
    writer.write(4096, 3000, look=False)
    writer.end()


def direct_refused(bench: Bench) -> None:
    """A commit closes the slip under the program, which then goes through the kernel."""
    writer = begin(bench, b"new")
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
    writer = begin(bench, b"old")
    writer.write(0, 4096)
    writer.end(killed=True)


def direct_create_killed(bench: Bench) -> None:
    writer = begin(bench, b"new")
    writer.write(0, 700)
    writer.end(killed=True)


def direct_in_place(bench: Bench) -> None:
    writer = begin(bench, b"old", os.O_RDWR)
    writer.write(100, 50)
    writer.write(9000, 600)
    writer.end()


def direct_fsync(bench: Bench) -> None:
    writer = begin(bench, b"new")
    writer.write(0, 777)
    bench.fsync(writer.handle)
    writer.write(777, 3000)
    bench.fsync(writer.handle)
    writer.write(50, 200)
    writer.end()


def direct_ended(bench: Bench) -> None:
    """The program closes its slip itself; whoever looks next takes in what there is."""
    writer = begin(bench, b"new")
    writer.write(0, 900, look=False)
    if writer.handle is not None and writer.program.lease is not None:
        inode = bench.store.files.get(writer.handle).inode
        invariant(bench.store.direct.is_open(inode.ino), "it goes on")
        bench.do("end", writer.program.end, late=True, keeps=True)
        size = bench.store.get_attributes(inode.ino).size
        invariant(size == len(bench.content(inode)), "what was appended shows in the size")
        invariant(not bench.store.direct.is_open(inode.ino), "it has ended")
    writer.write(900, 700)
    writer.end()


def direct_and_through_the_kernel(bench: Bench) -> None:
    writer = begin(bench, b"new")
    writer.write(0, 2000)
    bench.write(writer.handle, 1000, 2000)
    writer.write(2500, 2000)
    bench.write(writer.handle, 10, 20)
    writer.end()


def direct_truncated(bench: Bench) -> None:
    writer = begin(bench, b"new")
    writer.write(0, 5000)
    bench.ftruncate(writer.handle, 1234)
    writer.write(2000, 500)
    bench.ftruncate(writer.handle, 0)
    writer.write(0, 600)
    writer.end()


def direct_renamed(bench: Bench) -> None:
    """The rename publishes; what is appended behind it is refused, and asked for anew."""
    writer = begin(bench, b"temporary")
    writer.write(0, 3000)
    bench.rename(b"temporary", b"old")
    writer.write(3000, 1000)
    writer.end()


def direct_unlinked(bench: Bench) -> None:
    writer = begin(bench, b"new")
    writer.write(0, 3000)
    bench.unlink(b"new")
    writer.write(3000, 100)
    writer.end()


def direct_left_open(bench: Bench) -> None:
    writer = begin(bench, b"old")
    if writer.handle is not None:
        writer.write(0, 3000)
        bench.left_open.append(writer.handle)


def direct_beside_another(bench: Bench) -> None:
    """Its slip ends with the other's open, which sees everything."""
    writer = begin(bench, b"new")
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
    writer = begin(bench, b"new")
    writer.write(0, 2222)
    commit = bench.store.commits.commit_all
    bench.do("commit", commit, steps=True, commits=True)
    writer.write(2222, 333)
    writer.end()


def direct_in_several(bench: Bench) -> None:
    """Leases of one request, of different segments, and the room passed over between them."""
    writer = begin(bench, b"new")
    writer.write_in_several(12_000, (700, 5000, 333))
    writer.write_in_several(18_033, (64, 4096, 900))
    writer.end()


DIRECT_OPERATIONS = [
    direct_create, direct_overwrite, direct_overwrite_killed, direct_create_killed, direct_in_place,
    direct_fsync, direct_and_through_the_kernel, direct_truncated, direct_renamed, direct_unlinked,
    direct_left_open, direct_refused, direct_beside_another, direct_committed_in_between,
    direct_in_several, direct_ended,
]  # fmt: skip

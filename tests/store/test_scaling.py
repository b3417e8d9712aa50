"""What each verb costs in a store of a hundred thousand files, compared with one of a thousand.

Work is counted, never timed: calls of Python and of C functions, references that the engine visits,
maps that are copied. N: files of the store; besides them N/10 are open and unlinked, N/10 are open,
N/10 have promised room, and N/1000 handles list the directory that all of them are in.

| verb | cost |
|---|---|
| lookup, stat, read, seek | the path's last step; the references of the range |
| create, mkdir, mknod, symlink, link, rename, unlink, rmdir | one record, one name |
| open, release, O_TRUNC | the writable handles of the same file |
| the first write to a file | its references, once, in parts: a second map is made, kept if large |
| write, fallocate, copy_file_range | the references of the range, and promises that it touches |
| close, fsync | the references that changed |
| a write that needs a lease | a search in a sorted list of what leases gave back |
| opendir, readdir, releasedir | the names returned; the first reader since opening copies all |
| statfs, statistics | a fixed number of counters |
| setxattr, removexattr, listxattr | the attributes of the file |
| a refused write | what is told at once: episodes are counted (``store.events``) |
| syncfs | the files that are open for writing |
| the end of a large content | nothing: its references are dropped in steps (``store.room``) |
| maintain | what is due: versions by age, one step of the cleaner, of a rollover |
| a rollover | everything, in steps between which others are served (``store.rollover``) |
| the end of all writing, list, verify | everything, once |
| opening | everything, once, as columns; and each record of the journal, whatever else there is |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest

from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from tests.support.shop import Shop, close, create
from tests.support.stores import write_file

MIB = 1 << 20
FEW, MANY = 1000, 100_000
SPARE = 40
"""Calls that may come on top: a deeper search, a number with one digit more."""


def crowd(store: Store, count: int) -> None:
    """Files that share pieces of one, by the shortest way; in the end all of it is an image."""
    source_ino = write_file(store, 1, b"source", os.urandom(MIB))
    namespace, engine = store.namespace, store.volume.engine
    source = namespace.get(source_ino).content
    directory = store.make_directory(1, b"all", 0o755, 0, 0).ino
    for number in range(count):
        inode = Inode(namespace.allocate_ino(), 0o100644, 0, 0)
        inode.live = FileMap(engine, owner=inode.ino)
        source.share(number * 8 % MIB, 8, inode.live, 0)
        inode.live.take_delta().apply(inode.live, None)
        namespace.add(inode)
        namespace.link(directory, b"%d" % number, inode.ino)
    store.volume.rollover()
    for number in range(count // 10):
        ino = store.lookup(directory, b"%d" % number).ino
        store.open_file(ino, os.O_RDWR)
        store.files.open(namespace.get(ino), os.O_RDONLY)
    for number in range(count // 10):
        store.unlink(directory, b"%d" % number)
        ino = store.lookup(directory, b"%d" % (number + count // 10)).ino
        store.open_file(ino, os.O_RDONLY)
        ino = store.lookup(directory, b"%d" % (number + count // 5)).ino
        handle = store.open_file(ino, os.O_RDWR)
        store.allocate(handle, 4096 * 8, 4096, keep_size=True)
    for _ in range(count // 1000):
        next(store.read_directory(store.open_directory(directory), 0))


def count_work(store: Store, verb: Callable[[], object]) -> int:
    """Calls, references that the engine visits, and maps that are copied."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    engine, clones = store.volume.engine, store.versions.clones
    before, made = engine.statistics().refs_visited, clones.made
    sys.setprofile(count)
    try:
        verb()
    finally:
        sys.setprofile(None)
    visited = engine.statistics().refs_visited - before
    return calls + visited + 100 * (clones.made - made)


class Measured:
    """A store with so many files, and what a verb costs in it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.directory = store.lookup(1, b"all").ino
        self.number = 0
        self.ino = write_file(store, self.directory, b"file", bytes(20_000))
        self.handle = store.open_file(self.ino, os.O_RDWR)
        store.write(self.handle, 0, bytes(5000))
        self.reader = store.open_file(self.ino, os.O_RDONLY)
        self.listing = store.open_directory(self.directory)
        next(store.read_directory(self.listing, 0))

    def name(self) -> bytes:
        """One that was not used before, always of the same length."""
        self.number += 1
        return b"new%06d" % self.number

    def work(self, verb: Callable[[], object]) -> int:
        """Calls and visits of the cheapest of three runs: the others may have met a rollover."""
        return min(self._once(verb) for _ in range(3))

    def _once(self, verb: Callable[[], object]) -> int:
        return count_work(self.store, verb)


Verbs = Iterator[tuple[str, Callable[[], object]]]


def verbs_on_names(at: Measured) -> Verbs:
    """Names that come and go in the directory of the crowd."""
    store, directory = at.store, at.directory

    def come_and_go() -> None:
        name = at.name()
        write_file(store, directory, name, b"x")
        store.unlink(directory, name)

    def directories() -> None:
        name = at.name()
        store.make_directory(directory, name, 0o755, 0, 0)
        store.remove_directory(directory, name)

    def links() -> None:
        name = at.name()
        store.link(at.ino, directory, name)
        store.unlink(directory, name)

    def attributes() -> None:
        store.set_xattr(at.ino, b"user.a", b"value")
        store.remove_xattr(at.ino, b"user.a")

    yield "lookup", lambda: store.lookup(directory, b"file")
    yield "stat", lambda: store.get_attributes(at.ino)
    yield "chmod", lambda: store.set_attributes(at.ino, mode=0o600)
    yield "create and unlink", come_and_go
    yield "mkdir and rmdir", directories
    yield "link and unlink", links
    yield "symlink", lambda: store.make_symlink(directory, at.name(), b"to", 0, 0)
    yield "mknod", lambda: store.make_node(directory, at.name(), 0o010644, 0, 0, 0)
    yield "xattr", attributes


def verbs_on_data(at: Measured) -> Verbs:
    """A file that is open beside the crowd."""
    store, directory, ino, handle = at.store, at.directory, at.ino, at.handle

    def save() -> None:
        name = at.name()
        _, opened = store.create(directory, name, 0o644, 0, 0, os.O_RDWR)
        store.write(opened, 0, bytes(4096))
        close(store, opened)
        store.rename(directory, name, directory, b"file2")

    def overwrite() -> None:
        opened = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
        store.write(opened, 0, bytes(4096))
        close(store, opened)

    def lease() -> None:
        store.versions.leases.close(store.namespace.get(ino).content)
        store.write(handle, 0, bytes(5000))

    def allocate() -> None:
        store.allocate(handle, 1 << 20, 4096, keep_size=True)
        store.allocate(handle, 1 << 20, 4096, keep_size=True, punch=True)

    yield "read", lambda: store.read(at.reader, 0, 4096)
    yield "seek", lambda: store.seek(at.reader, 0, os.SEEK_DATA)
    yield "write and statfs", lambda: (store.write(handle, 0, bytes(5000)), store.statfs())
    yield "write and fsync", lambda: (store.write(handle, 0, bytes(5000)), store.fsync(handle))
    yield "lease", lease
    yield "lease ahead", lambda: store.files.lease_ahead(ino)
    yield "truncate", lambda: store.set_attributes(ino, size=10_000, handle=handle)
    yield "save", save
    yield "overwrite", overwrite
    yield "fallocate", allocate
    yield "copy_file_range", lambda: store.ranges.copy(at.reader, 0, handle, 1 << 21, 8192)
    yield "open and release", lambda: store.release(store.open_file(ino, os.O_RDWR))


def other_verbs(at: Measured) -> Verbs:
    """Listings, and what concerns the whole store."""
    store = at.store

    def list_some() -> None:
        opened = store.open_directory(at.directory)
        entries = store.read_directory(opened, 0)
        for _ in range(20):
            next(entries)
        store.release_directory(opened)

    def list_from_the_middle() -> None:
        assert next(store.read_directory(at.listing, 500)).cookie_next == 501

    def pins() -> None:
        store.pin(at.ino)
        store.unpin(at.ino)

    yield "statfs", store.statfs
    yield "statistics", store.statistics
    yield "opendir and readdir", list_some
    yield "readdir from the middle", list_from_the_middle
    yield "forget", pins
    yield "event", lambda: store.volume.event("not-published", "x", ino=at.ino)
    yield "maintain", lambda: store.maintain(0.0)


@pytest.mark.timeout(300)
def test_no_verb_costs_more_in_a_larger_store(shop: Shop) -> None:
    found: dict[int, dict[str, int]] = {}
    shop.directory_times = False
    shop.damaged = True  # what is open in the end is not compared: it is all about work
    for count in (FEW, MANY):
        store = shop.new_ordinary(256 * MIB)
        crowd(store, count)
        at = Measured(store)
        verbs = (*verbs_on_names(at), *verbs_on_data(at), *other_verbs(at))
        found[count] = {name: at.work(verb) for name, verb in verbs}
        assert not store.read_only
    dearer = {
        name: (few, found[MANY][name])
        for name, few in found[FEW].items()
        if found[MANY][name] > few + SPARE
    }
    print(f"calls of each verb with {FEW} and {MANY} files:")
    for name, few in found[FEW].items():
        print(f"  {name}: {few} {found[MANY][name]}")
    assert not dearer


@pytest.mark.timeout(300)
def test_a_step_of_the_cleaner_costs_no_more_beside_many_references(shop: Shop) -> None:
    """Those to segments that it does not empty, of files that it moves, too."""
    costs: list[int] = []
    for count in (FEW, MANY):
        store = shop.new_ordinary(256 * MIB)
        for number in range(200):
            write_file(store, 1, b"%d" % number, os.urandom(20_000))
        source = store.namespace.get(write_file(store, 1, b"source", os.urandom(8 * MIB))).content
        for name in range(0, 200, 2):
            store.unlink(1, b"%d" % name)
        handle = store.open_file(store.lookup(1, b"1").ino, os.O_RDWR)
        store.write(handle, 20_000, b"x")
        content = store.files.content_of(handle)
        for number in range(count):
            source.share(4 * MIB + number * 4096 % (4 * MIB), 2048, content, 32768 + number * 4096)
        close(store, handle)
        assert store.volume.engine.statistics().refs > count
        store.volume.rollover()
        costs.append(count_work(store, partial(store.cleaner.compact, 0.6)))
        assert store.volume.counters.cleaned_segments == 2
    print(f"calls and references visited in a step with {FEW} and {MANY} references: {costs}")
    assert costs[1] <= costs[0] + SPARE


def test_a_second_map_is_made_once_for_many_openings(store: Store) -> None:
    """Of a fragmented file that is overwritten piece by piece, and closed each time."""
    ino, handle = create(store, b"f")
    for number in range(300):
        store.write(handle, number * 8192, bytes([number & 255]) * 100)
    close(store, handle)
    assert store.namespace.get(ino).content.ref_count >= 300
    made = store.versions.clones.made
    for number in range(50):
        handle = store.open_file(ino, os.O_WRONLY)
        store.write(handle, number * 8192, b"again")
        close(store, handle)
    assert store.versions.clones.made == made + 1


STRIDE_BYTES = 512
"""From one of many references to the next, half a hole. Short: the file is read as a whole in the
end, several times.
"""


def large_file(store: Store, name: bytes, count: int) -> int:
    """A committed one with so many references: its inode number."""
    source = store.namespace.get(write_file(store, 1, name + b"-0", os.urandom(8 * MIB))).content
    ino, handle = create(store, name)
    content = store.files.content_of(handle)
    for number in range(count):
        source.share(number * 4096 % (8 * MIB), STRIDE_BYTES // 2, content, number * STRIDE_BYTES)
    close(store, handle)
    assert store.namespace.get(ino).content.ref_count == count
    return ino


class Longest:
    """References and pieces of extents that the longest of some steps looked at."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.references = self.pieces = 0

    def step(self, verb: Callable[[], object]) -> object:
        engine = self.store.volume.engine
        before = engine.statistics()
        result = verb()
        after = engine.statistics()
        self.references = max(self.references, after.refs_visited - before.refs_visited)
        self.pieces = max(self.pieces, after.pieces_visited - before.pieces_visited)
        return result

    def maintain(self) -> None:
        while self.store.volume.engine.statistics().discarded_refs:
            self.step(lambda: self.store.maintain(0.0))


@pytest.mark.sampled(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["cut", "emptied", "removed", "replaced"])
def test_the_end_of_many_references_is_spread_over_steps(shop: Shop, way: str) -> None:
    """However many a file has that is cut, emptied, removed, or published anew."""
    found = []
    for count in (150_000, 300_000):
        store = shop.new_ordinary(256 * MIB)
        free_bytes = store.statfs().free_bytes
        ino = large_file(store, b"large", count)
        store.volume.rollover()  # none is under way
        longest = Longest(store)
        if way == "removed":
            longest.step(partial(store.unlink, 1, b"large"))
        elif way == "replaced":
            handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
            store.write(handle, 0, b"x")
            longest.step(partial(close, store, handle))
        else:
            handle = store.open_file(ino, os.O_WRONLY)
            store.write(handle, 0, b"x")
            kept = 100 if way == "cut" else 0
            size = kept * STRIDE_BYTES
            longest.step(partial(store.set_attributes, ino, size=size, handle=handle))
            longest.step(partial(close, store, handle))
        assert store.volume.engine.statistics().discarded_refs >= 100_000
        longest.maintain()
        if way != "cut":
            left = store.statfs().free_bytes
            assert free_bytes - 9 * MIB < left < free_bytes - 7 * MIB
        found.append((longest.references, longest.pieces))
    print(f"references and pieces in the longest step: {found}")
    assert max(found[0]) > 10_000
    assert found[1][0] <= found[0][0] + SPARE
    assert found[1][1] <= found[0][1] + 10_000


@pytest.mark.timeout(300)
def test_the_second_map_of_many_references_is_made_in_parts(shop: Shop) -> None:
    """And whoever writes to the file finds it made; what the cleaner moved meanwhile has moved in
    both.
    """
    found = []
    for count in (150_000, 300_000):
        store = shop.new_ordinary(256 * MIB)
        ino = large_file(store, b"large", count)
        handle, longest, parts = store.open_file(ino, os.O_RDWR), Longest(store), 0
        before = bytes(store.read(handle, 0, MIB))
        store.unlink(1, b"large-0")
        while longest.step(partial(store.versions.prepare_change, ino)):
            parts += 1
            if parts == 2:
                store.volume.rollover()
                while store.cleaner.compact(0.99) and not store.volume.counters.cleaned_segments:
                    pass
        assert 0 <= parts - count // 50_000 <= 1, "moving may have cut some references"
        assert store.volume.counters.moved_bytes > 0
        refs = store.files.content_of(handle).export(0, 1 << 40).tolist()
        assert longest.step(partial(store.write, handle, 100, b"new")) == 3
        found.append((longest.references, longest.pieces))
        committed = store.namespace.get(ino).committed
        assert committed is not None
        assert committed.export(0, 1 << 40).tolist() == refs
        assert bytes(committed.read(0, MIB)) == before
        assert bytes(store.read(handle, 0, MIB)) == before[:100] + b"new" + before[103:]
        close(store, handle)
    print(f"references and pieces in the longest step: {found}")
    assert found[1][0] <= found[0][0] + SPARE
    assert found[1][1] <= found[0][1] + 10_000


def test_room_that_ended_contents_have_is_had_before_a_write_fails(shop: Shop) -> None:
    store = shop.new_ordinary(64 * MIB)
    ino, handle = create(store, b"large")
    pieces = 60_000
    content = store.files.content_of(handle)
    store.write(handle, 0, os.urandom(24 * MIB))
    close(store, handle)
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 0, b"x")
    for number in range(pieces):
        content.punch(number * 400 + 100, 100)
    close(store, handle)
    assert content.ref_count > pieces
    free_bytes = store.statfs().free_bytes
    store.unlink(1, b"large")
    assert store.volume.engine.statistics().discarded_refs > pieces
    other, handle = create(store, b"other")
    store.allocate(handle, 0, free_bytes + 8 * MIB)
    store.write(handle, 0, os.urandom(free_bytes + 8 * MIB))
    close(store, handle)
    assert store.get_attributes(other).size == free_bytes + 8 * MIB


def test_many_handles_of_other_files_cost_nothing(store: Store) -> None:
    """Opening, emptying and releasing look at the handles of that file alone."""
    at_few: list[int] = []
    for count in (10, 2000):
        others = [create(store, b"%d-%d" % (count, number))[1] for number in range(count)]
        ino = write_file(store, 1, b"f", b"data")
        calls = 0

        def note(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in {"call", "c_call"}

        sys.setprofile(note)
        close(store, store.open_file(ino, os.O_WRONLY | os.O_TRUNC))
        sys.setprofile(None)
        at_few.append(calls)
        for handle in others:
            close(store, handle)
    assert at_few[1] <= at_few[0] + SPARE

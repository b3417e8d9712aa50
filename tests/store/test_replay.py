"""Replay in batches: the state does not depend on how the records are divided."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cxlfs.errors import CorruptionError, CxlfsError
from cxlfs.format import journal_reader, operations
from cxlfs.format.journal_reader import RecordBatch
from cxlfs.media import Media, MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.store.replay import Replayer
from tests.support.corrupt import populated_media
from tests.support.fuzz_operations import OperationMaker
from tests.support.shop import close, create, open_for_overwrite
from tests.support.stores import read_file, write_file

State = dict[int, tuple[object, ...]] | str


def state_of(media: Media) -> State:
    """All that recovery knows of every inode, reachable or not; or the error that it ends with."""
    try:
        store = Store.open(media, StoreOptions(read_only=True))
    except CorruptionError as error:
        return type(error).__name__
    state: State = {}
    for inode in store.namespace.inodes.values():
        contents = [
            None if content is None else (content.size, content.export(0, 1 << 60).tobytes())
            for content in (inode.live, inode.committed, inode.aside)
        ]
        plain = (
            *("ino", "mode", "uid", "gid", "rdev", "flags", "atime_ns", "mtime_ns", "ctime_ns"),
            *("birth_ns", "committed_mtime_ns", "committed_ctime_ns", "commit_lsn", "commit_ns"),
            *("links", "subdirectories", "parent", "entries", "target", "xattrs"),
        )
        state[inode.ino] = (*(getattr(inode, name) for name in plain), *contents)
    volume = store.volume
    state[0] = (volume.next_extent_id, volume.last_lsn, volume.last_commit_ns, store.namespace)
    state[0] = (*state[0][:3], store.namespace.next_ino, volume.engine.list().tobytes())
    state[0] = (*state[0], store.recovery.lost is not None)
    store.abandon()
    return state


def divided(pieces: Callable[[int], int]) -> Callable[[Replayer, RecordBatch], None]:
    """``Replayer.apply`` of so many records after the other."""
    original = Replayer.apply

    def apply(self: Replayer, batch: RecordBatch) -> None:
        first = 0
        while first < len(batch):
            end = first + pieces(len(batch) - first)
            parts = {
                name: getattr(batch, name)[first:end]
                for name in ("starts", "rows", "media_offsets", "copy_numbers")
            }
            original(self, dataclasses.replace(batch, **parts))
            first = end

    return apply


WAYS = ("one by one", "at random")


def each_way(media: Media, rng: random.Random) -> Iterator[tuple[str, State]]:
    for way in WAYS:
        with pytest.MonkeyPatch.context() as patch:
            if way == "one by one":
                patch.setattr(Replayer, "apply", divided(lambda _left: 1))
            else:
                patch.setattr(Replayer, "apply", divided(lambda left: rng.randint(1, left)))
            yield way, state_of(media)


def assert_one_state(media: Media, rng: random.Random) -> State:
    plain = state_of(media)
    for way, state in each_way(media, rng):
        assert state == plain, way
    return plain


def many_changes(store: Store, rng: random.Random) -> None:
    """Long runs of overwrites, with everything else in between."""
    names = [b"f%d" % number for number in range(12)]
    for number in range(220):
        name = rng.choice(names)
        write_file(store, 1, name, rng.randbytes(rng.choice((10, 3000, 9000))))
        if number % 37 == 5:
            handle = open_for_overwrite(store, name, rng.randbytes(5000))
            close(store, handle, killed=True)
        if number % 41 == 6:
            store.rename(1, name, 1, rng.choice(names))
        if number % 29 == 7 and store.namespace.find(1, names[0]) is not None:
            store.unlink(1, names[0])
        if number % 31 == 8:
            ino, handle = create(store, b"n%d" % number, rng.randbytes(700))
            store.set_xattr(ino, b"user.k", b"v%d" % number)
            close(store, handle)
        if number % 53 == 9:
            store.make_symlink(1, b"s%d" % number, b"target", 0, 0)
            directory = store.make_directory(1, b"d%d" % number, 0o755, 0, 0).ino
            store.rename(1, b"s%d" % number, directory, b"s")
        if number % 17 == 3:
            write_file(store, 1, name, b"old")
            handle = open_for_overwrite(store, name, b"q" * 20_000)
            store.write(handle, 0, b"p" * 100)
            store.fsync(handle)
            store.write(handle, 50, b"r" * 100)
            close(store, handle)


def test_a_long_life(store: Store, rng: random.Random) -> None:
    many_changes(store, rng)
    store.abandon()
    state = assert_one_state(store.media, rng)
    assert isinstance(state, dict)
    assert len(state) > 10


class Changes:
    """Of files of an image, in a tree whose directories come and go."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        made = [store.make_directory(1, b"%d" % n, 0o755, 0, 0).ino for n in range(3)]
        self.directories = [1, *made]
        self.number = 0
        store.make_directory(1, b"tree", 0o755, 0, 0)

    def place(self) -> tuple[int, bytes]:
        return self.rng.choice(self.directories), b"f%d" % self.rng.randrange(25)

    def new_name(self) -> bytes:
        self.number += 1
        return b"new%d" % self.number

    def one(self) -> None:
        store, rng = self.store, self.rng
        place = self.place()
        inode = store.namespace.find(*place)
        if inode is None:
            write_file(store, *place, rng.randbytes(rng.choice((0, 10, 5000))))
            return
        ino = inode.ino
        rng.choice(
            [
                lambda: store.unlink(*place),
                lambda: store.rename(*place, *self.place()),
                lambda: write_file(store, *place, rng.randbytes(100)),
                lambda: store.set_xattr(ino, b"user.%d" % rng.randrange(3), b"value"),
                lambda: [store.remove_xattr(ino, name) for name in store.list_xattrs(ino)],
                lambda: store.set_attributes(ino, mode=rng.choice((0o600, 0o644))),
                lambda: store.set_attributes(ino, size=rng.randrange(200)),
                lambda: store.link(ino, 1, self.new_name()),
                self.directory,
                self.move_directory,
                self.move_directory,
            ]
        )()

    def directory(self) -> None:
        """A new one with something in it, which half of the time goes away again."""
        store, name = self.store, self.new_name()
        ino = store.make_directory(1, name, 0o755, 0, 0).ino
        write_file(store, ino, b"file", b"x")
        store.make_symlink(ino, b"link", b"to", 0, 0)
        if self.rng.random() < 0.5:
            store.unlink(ino, b"file")
            store.unlink(ino, b"link")
            store.remove_directory(1, name)
        elif self.rng.random() < 0.2:
            store.rename(1, name, self.directories[1], self.new_name())

    def move_directory(self) -> None:
        """Anywhere, also over another one, and where it cannot go; some are new."""
        store, rng = self.store, self.rng
        names = [b"a", b"b", b"c"]
        places = [(1, b"tree")]
        for parent, name in places:
            inode = store.namespace.find(parent, name)
            assert inode is not None
            places += [(inode.ino, below) for below in inode.entries or {}]
        parents = [store.lookup(*place).ino for place in places]
        new = rng.choice(parents), rng.choice(names)
        with contextlib.suppress(CxlfsError):
            if rng.random() < 0.3:
                store.make_directory(*new, 0o755, 0, 0)
            else:
                exchange = rng.random() < 0.3
                store.rename(*rng.choice(places[1:] or places), *new, exchange=exchange)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(6), ids="seed={}".format)
def test_changes_of_an_image(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    changes = Changes(store, rng)
    for _ in range(150):
        changes.one()
    store.volume.rollover()
    for _ in range(250):
        changes.one()
    store.abandon()
    state = assert_one_state(store.media, rng)
    assert isinstance(state, dict)
    assert len(state) > 30


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40), ids="seed={}".format)
def test_forged_moves_of_directories(seed: int) -> None:
    """Into each other, below themselves, under two names or none: the same state or refusal."""
    rng = random.Random(seed)
    store = Store.open(populated_media(closed=True))
    inos = [store.make_directory(1, b"%d" % n, 0o755, 0, 0).ino for n in range(4)]
    places = {ino: (1, b"%d" % number) for number, ino in enumerate(inos)}
    store.volume.rollover()
    journal = store.volume.journal
    assert journal is not None
    new = store.namespace.next_ino
    for number in range(rng.randrange(1, 8)):
        ops: list[operations.Operation] = []
        for _ in range(rng.choice((1, 1, 2))):
            ino = rng.choice(inos)
            if rng.random() < 0.3:
                ino = new + number
                ops.append(operations.InodeOperation(ino, 0o040755, 0, 0, 0, 0, 1, 2, 3, 4))
                inos.append(ino)
            if rng.random() < 0.9 and ino in places:
                ops.append(operations.UnlinkOperation(*places[ino]))
            if rng.random() < 0.9 or ino not in places:
                places[ino] = rng.choice((1, *inos)), rng.choice((b"x", b"y", b"%d" % number))
            parent, name = places[ino]
            ops.append(operations.LinkOperation(parent, ino, name))
        journal.append(operations.encode(ops), len(ops))
    journal.fence()
    store.abandon()
    assert_one_state(store.media, rng)
    store.media.close()


def test_a_directory_is_given_the_name_that_it_has(rng: random.Random) -> None:
    media = populated_media(closed=True)
    store = Store.open(media)
    ino = store.make_directory(1, b"has one", 0o755, 0, 0).ino
    store.volume.rollover()
    journal = store.volume.journal
    assert journal is not None
    journal.append(operations.encode([operations.LinkOperation(1, ino, b"has one")]), 1)
    journal.fence()
    store.abandon()
    found = assert_one_state(media, rng)
    assert isinstance(found, dict), "the record is not applied"
    assert ino in found
    media.close()


@pytest.mark.parametrize("closed", [True, False])
def test_forged_transactions(closed: bool, rng: random.Random) -> None:
    """Operations of any kind, possible or not: the same state, or the same refusal."""
    refused = accepted = 0
    for _ in range(50):
        media = populated_media(closed=closed)
        store = Store.open(media)
        maker = OperationMaker(rng, store.superblock)
        journal = store.volume.journal
        assert journal is not None
        for _ in range(rng.choice((1, 1, 1, 2))):
            ops = maker.transaction()
            payload = operations.encode(ops)
            if rng.random() < 0.05:
                payload = payload[: rng.randrange(len(payload) + 1)]
            journal.append(payload, len(ops))
            journal.fence()
            write_file(store, 1, b"in between", rng.randbytes(500))
        store.abandon()
        state = assert_one_state(media, rng)
        is_refused = isinstance(state, str) or bool(state[0][-1])
        refused += is_refused
        accepted += not is_refused
        media.close()
    assert refused > 5
    assert accepted > 1


def test_damaged_primary_records(store: Store, rng: random.Random) -> None:
    """With the mirror's help the same state comes out, wherever the primary copy is damaged."""
    many_changes(store, rng)
    store.abandon()
    media = store.media
    expected = state_of(media)
    journal = store.volume.journal
    assert isinstance(media, MemoryMedia)
    assert journal is not None
    base = store.superblock.segment_offset(journal.header.index)
    reader = journal_reader.SegmentReader(
        media, store.superblock, journal.header, expected_lsn=journal.header.first_lsn
    )
    offsets = [record.media_offset for record in reader]
    assert len(offsets) > 20
    for count in (1, 2, len(offsets) // 2, len(offsets)):
        damaged = rng.sample(offsets, count)
        good = media.read(base, store.superblock.segment_size_bytes)
        for offset in damaged:
            media.store(offset + rng.choice((0, 16, 60, 70)), b"\xff\xee")
        assert state_of(media) == expected
        reader = journal_reader.SegmentReader(
            media, store.superblock, journal.header, expected_lsn=journal.header.first_lsn
        )
        assert len(list(reader)) == len(offsets)
        assert reader.scan.mirror_used == count
        media.store(base, good)


def test_error_names_the_record(store: Store) -> None:
    """Whichever of many records is at fault, and whether a name, an extent or a reference is."""
    ino = write_file(store, 1, b"f", b"x" * 100)
    refs = np.array([(0, 10, 1 << 40, 0)], dtype="u8,u8,u8,u8").tobytes()
    wrong: list[operations.Operation] = [
        operations.UnlinkOperation(1, b"nothing"),
        operations.ExtentOperation(1 << 40, 0, 10, 0, bytes(4)),
        operations.ContentOperation(ino, aside=False, cut=0, size=10, refs=refs),
        operations.PromoteOperation(ino),
    ]
    for op in wrong:
        media = populated_media(closed=True)
        victim = Store.open(media)
        journal = victim.volume.journal
        assert journal is not None
        for number in range(100):
            write_file(victim, 1, b"before", b"%d" % number)
        lsn, _ = journal.append(operations.encode([op]), 1)
        journal.fence()
        for number in range(100):
            write_file(victim, 1, b"behind", b"%d" % number)
        victim.abandon()
        found = Store.open(media, StoreOptions(read_only=True))
        assert f"record {lsn} contradicts" in str(found.read_only_reason)
        assert read_file(found, found.lookup(1, b"before").ino) == b"99"
        found.close()
        media.close()

"""Contents that programs have verified: who maps one next need not, who maps it now takes part."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.errors import CorruptionError, InvalidArgumentError
from cxlfs.native.direct import HeldContent
from cxlfs.store import Store, verified
from cxlfs.store.mapped import MapPart
from cxlfs.store.verified import PATIENCE_SECONDS, VerifiedContents
from cxlfs.units import MIB
from tests.support.direct_format import ROW, rows_of
from tests.support.stores import clean_round, write_file

SIZE, PIECE = 5000, 1024
PIECES = [(start, min(PIECE, SIZE - start)) for start in range(0, SIZE, PIECE)]


class Bench:
    """A store with one file, a clock that stands, and readers of the file."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store, self.rng, self.now = store, rng, 100.0
        self.verified = store.direct.verified
        self.verified.for_seconds, self.verified.piece_bytes_min = 60, PIECE
        self.verified._clock = lambda: self.now
        self.ino = self.write()
        self.reader, self.other = self.open(), self.open()

    def write(self, name: bytes = b"file") -> int:
        return write_file(self.store, 1, name, self.rng.randbytes(SIZE))

    def open(self) -> int:
        return self.store.open_file(self.ino, os.O_RDONLY)

    def map(self, reader: int | None = None, *, shared: bool = True) -> MapPart:
        chosen = self.reader if reader is None else reader
        return self.store.direct.mapped.map(chosen, 0, 16_000, shared=shared)

    def ask(self, reader: int, done: tuple[int, int] = (0, 0)) -> tuple[int, int, bool]:
        return tuple(self.store.direct.mapped.verify(reader, done))

    def verify(self, reader: int | None = None) -> list[tuple[int, int]]:
        """As a program does that is alone: the pieces that it was given."""
        chosen = self.reader if reader is None else reader
        given: list[tuple[int, int]] = []
        offset, length, done = self.ask(chosen)
        while length:
            given.append((offset, length))
            offset, length, done = self.ask(chosen, given[-1])
        assert done
        return given


@pytest.fixture
def bench(store: Store, rng: random.Random) -> Bench:
    return Bench(store, rng)


def test_what_one_has_verified_nobody_needs_to(bench: Bench) -> None:
    part = bench.map()
    assert part.is_shared
    assert not part.is_verified
    assert bench.verify() == PIECES
    assert bench.store.direct.describe().verified_contents == 1
    again = bench.map(bench.other)
    assert again.is_verified
    assert again.crc_count == 0
    assert len(again.payload) == again.row_count * ROW.size
    rows = [row._replace(crc_count=0) for row in rows_of(part.payload, part.row_count)]
    assert rows_of(again.payload, again.row_count) == rows
    assert bench.verified.compared_bytes == SIZE
    alone = bench.map(bench.other, shared=False)
    assert (alone.is_verified, alone.is_shared, alone.crc_count) == (False, False, part.crc_count)


def test_those_who_map_it_at_once_share_the_work(bench: Bench) -> None:
    bench.map()
    bench.map(bench.other)
    given = [bench.ask(reader)[:2] for reader in (bench.reader, bench.other, bench.reader)]
    given += [bench.ask(bench.other, given[1])[:2], bench.ask(bench.reader, given[0])[:2]]
    assert given == PIECES
    assert bench.ask(bench.other) == (0, 0, False), "the others are at work"
    assert bench.ask(bench.reader, given[2]) == (0, 0, False)
    assert bench.ask(bench.other, given[3]) == (0, 0, False)
    assert bench.ask(bench.reader, given[4]) == (0, 0, True)
    assert bench.ask(bench.other) == (0, 0, True)
    assert bench.map().is_verified


def test_a_piece_of_one_who_is_gone_is_given_again(bench: Bench) -> None:
    bench.map()
    bench.map(bench.other)
    lost = bench.ask(bench.other)[:2]
    assert bench.ask(bench.other)[:2] == PIECES[1]
    bench.store.release(bench.other)
    assert sorted(bench.verify()) == PIECES
    assert lost == PIECES[0]


def test_a_piece_of_one_who_was_stopped_is_waited_for_a_while(bench: Bench) -> None:
    bench.map()
    bench.map(bench.other)
    slow = bench.ask(bench.other)[:2]
    given = bench.ask(bench.reader)
    for piece in PIECES[1:]:
        assert given[:2] == piece
        given = bench.ask(bench.reader, piece)
    assert given == (0, 0, False)
    bench.now += PATIENCE_SECONDS
    assert bench.ask(bench.reader)[:2] == slow
    assert bench.ask(bench.reader) == (0, 0, False), "it is one's own now"
    assert bench.ask(bench.other, slow) == (0, 0, True), "he was quicker in the end"
    assert bench.ask(bench.reader, slow) == (0, 0, True)
    assert bench.verified.compared_bytes == SIZE


@pytest.mark.parametrize("done", [(1, PIECE), (0, PIECE - 1), (PIECE, PIECE), (1 << 63, PIECE)])
def test_only_pieces_that_were_given_count(bench: Bench, done: tuple[int, int]) -> None:
    bench.map()
    bench.map(bench.other)
    assert bench.ask(bench.reader)[:2] == PIECES[0]
    bench.ask(bench.other, PIECES[0])
    bench.ask(bench.reader, done)
    assert bench.verified.compared_bytes == 0


def test_it_counts_for_so_long_and_no_longer(bench: Bench) -> None:
    bench.map()
    bench.now += 59
    bench.verify()
    assert bench.map().is_verified
    bench.now += 1
    assert bench.store.direct.describe().verified_contents == 0
    assert not bench.map().is_verified
    bench.ask(bench.reader)
    bench.now += 60
    with pytest.raises(InvalidArgumentError, match="forgotten"):
        bench.ask(bench.reader, PIECES[0])


def test_nothing_is_remembered_where_the_mount_says_so(bench: Bench) -> None:
    bench.verified.for_seconds = 0
    part = bench.map()
    assert (part.is_shared, part.is_verified) == (False, False)
    with pytest.raises(InvalidArgumentError, match="together"):
        bench.ask(bench.reader)


def change(bench: Bench) -> None:
    writer = bench.store.open_file(bench.ino, os.O_RDWR)
    bench.store.write(writer, 10, b"other")
    bench.store.flush(writer, writer_killed=False)
    bench.store.release(writer)


def move(bench: Bench) -> None:
    bench.store.direct.mapped.unmap(bench.reader)
    for number in range(30):
        bench.write(b"%d" % number)
    for number in range(30):
        bench.store.unlink(1, b"%d" % number)
    while clean_round(bench.store, 0.9):
        pass


@pytest.mark.parametrize("how", [change, move])
def test_a_content_is_its_extents(bench: Bench, how: object) -> None:
    part = bench.map()
    bench.verify()
    assert bench.map().is_verified
    assert callable(how)
    how(bench)
    after = bench.map()
    assert not after.is_verified
    places = [
        [row.extent_media_offset + row.extent_offset for row in rows_of(p.payload, p.row_count)]
        for p in (part, after)
    ]
    assert places[0] != places[1]


@pytest.mark.parametrize("who", ["a reader", "a program"])
def test_damage_ends_all_that_is_remembered(bench: Bench, who: str) -> None:
    other = bench.write(b"other")
    bench.map()
    bench.verify()
    damaged = bench.store.open_file(other, os.O_RDONLY)
    [row] = rows_of((part := bench.map(damaged)).payload, part.row_count)
    at = row.extent_media_offset + row.extent_offset
    byte = bench.store.media.read(at, 1)
    bench.store.media.store(at, bytes([byte[0] ^ 1]))
    assert bench.map().is_verified
    if who == "a reader":
        with pytest.raises(CorruptionError, match="fails its check"):
            bench.store.read(damaged, 0, 100)
    else:
        with pytest.raises(InvalidArgumentError, match="together"):
            bench.store.direct.mapped.verify(damaged, (0, 100), wrong=True)
    assert bench.store.health.damaged_count == 1
    assert not bench.map().is_verified
    with pytest.raises(InvalidArgumentError, match="forgotten"):
        bench.ask(damaged)
    bench.store.media.store(at, byte)


def test_a_program_that_cries_wolf_is_looked_after(bench: Bench) -> None:
    bench.map()
    bench.verify()
    bench.map(bench.other)
    with pytest.raises(InvalidArgumentError, match="together"):
        bench.store.direct.mapped.verify(bench.other, (0, 1 << 63), wrong=True)
    assert bench.store.health.damaged_count == 0
    assert not bench.map().is_verified


def test_memory_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "CONTENTS_MAX", 3)
    bench.map()
    bench.verify()
    readers = [
        bench.store.open_file(bench.write(b"%d" % number), os.O_RDONLY) for number in range(3)
    ]
    for reader in readers[:2]:
        bench.map(reader)
    assert bench.map().is_verified
    for reader in readers:
        bench.map(reader)
    assert len(bench.verified._contents) == 3
    assert not bench.map().is_verified


def test_pieces_are_of_a_size_that_pays() -> None:
    for size, expected in ((1, 8), (600 * MIB, 9), (2048 * MIB, 32), (1 << 40, 64)):
        assert verified._Content(size, 8 * MIB, 0.0).piece_bytes == expected * MIB


def test_the_identity_has_all_that_is_told(bench: Bench) -> None:
    """Of a file in pieces, with a hole: each of them, and nothing twice."""
    writer = bench.store.open_file(bench.ino, os.O_RDWR)
    bench.store.write(writer, 9000, b"behind a hole")
    bench.store.write(writer, 100, b"inside")
    bench.store.flush(writer, writer_killed=False)
    bench.store.release(writer)
    content = bench.store.namespace.inodes[bench.ino].content
    first, second = content.hold(), content.hold()
    assert isinstance(first, HeldContent)
    assert first.identity() == second.identity()
    assert len(first.identity()) == 8 + 7 * 8 * content.ref_count
    for held in (first, second):
        held.close()
    assert isinstance(bench.verified, VerifiedContents)

"""Bits flipped in committed file data: EIO for what they hit, nothing else, and a named finding."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.errors import CorruptionError
from cxlfs.media import MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import run_passes
from tests.support.corrupt import Damage
from tests.support.stores import CHUNK_BYTES, format_small, write_file
from tests.support.verdict import findings_of


class Shelf:
    """A closed store with one file to damage and neighbours, open read-only."""

    def __init__(self, size_bytes: int, rng: random.Random) -> None:
        self.media = MemoryMedia(4 << 20)
        format_small(self.media)
        self.content = rng.randbytes(size_bytes)
        self.before, self.behind = rng.randbytes(6_000), rng.randbytes(6_000)
        store = Store.open(self.media)
        self.inos = [
            write_file(store, 1, name, data)
            for name, data in (
                (b"before", self.before),
                (b"victim", self.content),
                (b"behind", self.behind),
            )
        ]
        store.close()
        self.store = Store.open(self.media, StoreOptions(read_only=True))
        self.handles = [self.store.open_file(ino, os.O_RDONLY) for ino in self.inos]
        self.pieces = self._pieces()

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(file offset, media offset, length) of the victim's pieces."""
        found = []
        for row in self.store.namespace.get(self.inos[1]).content.export(0, len(self.content)):
            infos, _ = self.store.volume.engine.describe(int(row["extent_id"]))
            assert int(row["extent_offset"]) == 0
            place = int(infos[0]["media_offset"])
            found.append((int(row["file_offset"]), place, int(row["length"])))
        return found

    def media_bit(self, file_bit: int) -> int:
        """Where a bit of the victim lies."""
        offset, bit = divmod(file_bit, 8)
        for start, place, length in self.pieces:
            if start <= offset < start + length:
                return (place + offset - start) * 8 + bit
        raise AssertionError(f"byte {offset} lies nowhere")

    def chunk_of(self, file_offset: int) -> tuple[int, int]:
        """The part of the file, [start, end), that shares its checksum."""
        for start, _, length in self.pieces:
            if start <= file_offset < start + length:
                first = start + (file_offset - start) // CHUNK_BYTES * CHUNK_BYTES
                return first, min(first + CHUNK_BYTES, start + length)
        raise AssertionError(f"byte {file_offset} lies nowhere")

    def read(self, which: int, offset: int, length: int) -> bytes:
        return bytes(self.store.read(self.handles[which], offset, length))


def _assert_hit(shelf: Shelf, file_bit: int) -> None:
    """One read of the byte itself, one of the whole chunk, one of a large range: EIO each."""
    offset = file_bit // 8
    start, end = shelf.chunk_of(offset)
    for position, length in ((offset, 1), (start, end - start), (0, len(shelf.content))):
        with pytest.raises(CorruptionError) as caught:
            shelf.read(1, position, length)
        fault = caught.value.fault
        assert fault is not None
        assert fault.file_offset == start
        assert fault.expected != fault.actual


def test_every_bit_of_a_small_file(rng: random.Random) -> None:
    """Two chunks, the second in part."""
    shelf = Shelf(CHUNK_BYTES + 700, rng)
    for bit in range(len(shelf.content) * 8):
        with Damage(shelf.media) as damage:
            damage.flip(shelf.media_bit(bit))
            with pytest.raises(CorruptionError):
                shelf.read(1, bit // 8, 1)
    assert shelf.read(1, 0, len(shelf.content)) == shelf.content


def test_sampled_bits_of_a_large_file(rng: random.Random, sample_count: int | None) -> None:
    shelf = Shelf(50 * CHUNK_BYTES + 33, rng)
    size = len(shelf.content)
    for bit in rng.sample(range(size * 8), 20 * (sample_count or 1000)):
        with Damage(shelf.media) as damage:
            damage.flip(shelf.media_bit(bit))
            _assert_hit(shelf, bit)
            start, end = shelf.chunk_of(bit // 8)
            if start > 0:
                assert shelf.read(1, 0, start) == shelf.content[:start]
            assert shelf.read(1, end, size - end) == shelf.content[end:]
            assert shelf.read(0, 0, 6_000) == shelf.before
            assert shelf.read(2, 0, 6_000) == shelf.behind


def test_verify_names_the_file_for_sampled_bits(
    rng: random.Random, sample_count: int | None
) -> None:
    shelf = Shelf(10 * CHUNK_BYTES + 33, rng)
    for bit in rng.sample(range(len(shelf.content) * 8), sample_count or 2000):
        place = shelf.media_bit(bit)
        start, end = shelf.chunk_of(bit // 8)
        with Damage(shelf.media) as damage:
            damage.flip(place)
            (finding,) = findings_of(shelf.media)
        assert (finding.id, finding.structure) == ("data-checksum", "file data")
        assert (finding.ino, finding.path) == (shelf.inos[1], b"/victim")
        assert finding.media_offset is not None
        assert 0 <= place // 8 - finding.media_offset < CHUNK_BYTES
        (use,) = finding.uses
        assert (use.file_offset, use.file_offset + use.length) == (start, end)
        assert finding.expected != finding.actual


def test_the_padding_behind_a_file_is_covered_too(rng: random.Random) -> None:
    """Published bytes end at a multiple of 64: what lies between is nobody's, and harmless."""
    shelf = Shelf(1000, rng)
    ((_, place, length),) = shelf.pieces
    assert length == 1000
    for offset in range(length, 1024):
        with Damage(shelf.media) as damage:
            damage.flip((place + offset) * 8)
            try:
                assert shelf.read(1, 0, 1000) == shelf.content
            except CorruptionError:
                assert [f.id for f in findings_of(shelf.media)] == ["data-checksum"]


def test_reads_are_not_verified_when_asked_not_to(rng: random.Random) -> None:
    shelf = Shelf(1000, rng)
    store = Store.open(shelf.media, StoreOptions(read_only=True, verify_reads=False))
    handle = store.open_file(shelf.inos[1], os.O_RDONLY)
    with Damage(shelf.media) as damage:
        damage.flip(shelf.media_bit(80))
        got = bytes(store.read(handle, 0, 1000))
        assert got[10] == shelf.content[10] ^ 1
        found = list(run_passes(shelf.media, structure_only=False))
    assert [finding.id for finding in found] == ["data-checksum"]

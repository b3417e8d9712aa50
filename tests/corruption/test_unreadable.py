"""Media that cannot be read in places: poisoned lines, and a file that was cut when mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cxlfs.errors import CorruptionError, MediaError
from cxlfs.media import MemoryMedia, open_media
from cxlfs.native import Target
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import ERROR, run_passes
from cxlfs.verify.repair import apply, plan
from tests.corruption.conftest import OneIn
from tests.support.corrupt import Anatomy
from tests.support.stores import read_file, write_file
from tests.support.verdict import Picture, findings_of, picture_of

LINE_BYTES = 64
FOUND = 0.6
"""The least part of the lines that verify names; a crash may tear the others."""


class PoisonedMedia(MemoryMedia):
    """One line cannot be read, until it is written as a whole: as uncorrectable errors behave."""

    def __init__(self, content: bytes) -> None:
        super().__init__(len(content))
        self.unguarded_memory()[:] = content
        self.poisoned: int | None = None
        """Media offset of the line (of the first one)."""
        self.poisoned_bytes = LINE_BYTES

    def _refuse(self, offset: int, length: int) -> None:
        line = self.poisoned
        if line is not None and offset < line + self.poisoned_bytes and line < offset + length:
            at = max(line, offset)
            raise MediaError(f"planted: poison at {at}", offset=at, length=self.poisoned_bytes)

    def read(self, offset: int, length: int) -> bytes:
        self._refuse(offset, length)
        return super().read(offset, length)

    def read_into(self, offset: int, target: Target) -> None:
        self._refuse(offset, memoryview(target).nbytes)
        super().read_into(offset, target)

    def crc32c(self, offset: int, length: int, seed: int = 0) -> int:
        self._refuse(offset, length)
        return super().crc32c(offset, length, seed)

    def store(self, offset: int, data: bytes) -> None:
        super().store(offset, data)
        self._heal(offset, data)

    def copy(self, offset: int, data: bytes) -> None:
        super().copy(offset, data)
        self._heal(offset, data)

    def _heal(self, offset: int, data: bytes) -> None:
        line = self.poisoned
        if line is not None and offset <= line and line + LINE_BYTES <= offset + len(data):
            self.poisoned = None


def test_every_metadata_line_poisoned(
    anatomy: Anatomy, good: Picture, tmp_path: Path, one_in: OneIn[int]
) -> None:
    """Read around it, found, and repaired by writing it."""
    content = bytes(anatomy.media.unguarded_memory())
    media = PoisonedMedia(content)
    places = {
        offset // LINE_BYTES * LINE_BYTES
        for region in anatomy.metadata()
        for offset in range(region.offset, region.offset + region.length, LINE_BYTES)
    }
    found_count = 0
    drawn = [*one_in(20, sorted(places))]
    for number, place in enumerate(drawn):
        media.poisoned = place
        found = findings_of(media)
        assert picture_of(media) == good, place
        assert not any(finding.severity == ERROR for finding in found), found
        if found:
            found_count += 1
            apply(media, plan(media, found), tmp_path / f"saved-{number}")
            assert findings_of(media) == [], place
            assert picture_of(media) == good, place
            media.unguarded_memory()[:] = content
    assert found_count > len(drawn) * FOUND


def test_every_unit_and_segment_unreadable(anatomy: Anatomy, good: Picture) -> None:
    """The largest page that one error takes away: superblocks and rings are read elsewhere; of
    segments the state is read from other copies or opening fails, and nothing else is shown. (File
    data is read in C, past this media: for that the file is cut in the test below.)
    """
    media = PoisonedMedia(bytes(anatomy.media.unguarded_memory()))
    block = anatomy.block
    unit = block.unit_bytes
    ends = {0, unit, block.size_bytes - 2 * unit, block.size_bytes - unit}
    segments = {block.segment_offset(i): i for i in range(block.segment_count)}
    read_around = 0
    for place in sorted({*ends, *segments}):
        media.poisoned = place
        media.poisoned_bytes = unit if place in ends else block.segment_size_bytes
        seen = picture_of(media)
        if place in ends:
            assert seen == good, place
        if seen == good:
            read_around += 1
        else:
            assert isinstance(seen, MediaError | CorruptionError), (place, seen)
            assert findings_of(media), place
    assert read_around > len(segments) / 2
    media.close()


def test_a_file_that_was_cut_under_the_mapping(tmp_path: Path) -> None:
    """What is gone gives an error, what is there can be read, and nothing dies of SIGBUS."""
    path = tmp_path / "store"
    media = open_media(path, create_size_bytes=48 << 20)
    Store.format(media)
    store = Store.open(media)
    first = write_file(store, 1, b"first", os.urandom(600_000))
    for _ in range(3):
        write_file(store, 1, b"filler", os.urandom(4_000_000))
    last = write_file(store, 1, b"last", os.urandom(600_000))
    store.close()
    store = Store.open(media, StoreOptions(read_only=True))
    content = read_file(store, first)
    row = store.namespace.get(last).content.export(0, 600_000)[0]
    infos, _ = store.volume.engine.describe(int(row["extent_id"]))
    os.truncate(path, int(infos[0]["media_offset"]))
    found = list(run_passes(media, structure_only=False, store=store))
    unreadable = [finding for finding in found if finding.id == "data-unreadable"]
    assert {finding.path for finding in unreadable} >= {b"/last"}
    assert b"/first" not in {finding.path for finding in unreadable}
    assert [f.media_offset for f in found if f.id == "superblock-copy-damaged"] == [
        store.superblock.copy_offsets[2],
        store.superblock.copy_offsets[3],
    ]
    assert read_file(store, first) == content
    with pytest.raises(MediaError):
        read_file(store, last)
    store.close()
    media.close()

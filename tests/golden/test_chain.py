"""A store whose journal goes on in another one, read by cxlfs and by the reader of docs/."""

from __future__ import annotations

import io
import json
import lzma
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from cxlfs.format import layout
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.native import crc32c
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import run_passes
from tests.golden import make, make_chain
from tests.support import reader

CONTINUATION = 2
structures = reader.load("reader_structures")


@pytest.fixture
def image() -> bytearray:
    return bytearray(lzma.decompress(make_chain.IMAGE.read_bytes()))


@pytest.fixture
def media(image: bytearray) -> Iterator[MemoryMedia]:
    made = MemoryMedia(len(image), Granularity.LINE)
    made.unguarded_memory()[:] = image
    yield made
    made.close()


def operations_of(store: Any) -> Iterator[int]:
    """The type of each operation in the journals."""
    for known in store._journals:
        first = known.header.first_lsn
        journal = reader.load().Journal(store.medium, store.block, known.header, first)
        for record in journal.records():
            position = 0
            for _ in range(record.operation_count):
                head = structures.unpack(structures.OPERATION, record.payload, position)
                yield head.type
                position += head.length


def test_read_only(media: MemoryMedia) -> None:
    store = Store.open(media, StoreOptions(read_only=True))
    expected = json.loads(make_chain.EXPECTED.read_text(encoding="utf-8"))
    assert make.describe(store, make_chain.DIRECTORIES) == expected
    assert store.recovery.problems == []
    store.close()
    assert list(run_passes(media, structure_only=False)) == []


def test_it_has_what_it_is_for(image: bytearray) -> None:
    found = reader.read(image)
    first, successor = found._journals
    root = structures.read_roots(found.medium, found.block)[0][0]
    assert first.header.epoch == root.journal_epoch
    assert successor.header.predecessor == first.header.index
    assert layout.OP_MOVE in set(operations_of(found))
    assert list(found.open_units) == [dict(found.state.walk())[b"/checkpoint-5"].ino]
    held = dict(found.state.walk())[b"/file-1"]
    assert reader.load().remarks(found, held) == ["the version before is held: 15001 bytes"]


@pytest.mark.parametrize("golden", [make.IMAGE, make_chain.IMAGE], ids=lambda path: path.stem)
def test_the_reader_agrees(golden: Any) -> None:
    data = lzma.decompress(golden.read_bytes())
    made = MemoryMedia(len(data), Granularity.LINE)
    made.unguarded_memory()[:] = data
    assert reader.contradiction(made, data) is None
    made.close()


def damage_headers(image: bytearray, store: Any) -> None:
    """Both headers of the successor."""
    header = store._journals[1].header
    for index in (header.index, header.partner):
        image[store.block.segment_offset(index) + 40] ^= 1


def test_one_good_header_is_enough(image: bytearray) -> None:
    good = reader.read(image)
    image[good.block.segment_offset(good._journals[1].header.index) + 40] ^= 1
    found = reader.read(image)
    assert found.problems == []
    assert reader.state_of(found) == reader.state_of(good)


def test_a_continuation_leads_on_without_headers(image: bytearray) -> None:
    """As format.md says: at the end of a journal, the header of the one in which it goes on."""
    good = reader.read(image)
    first, successor = good._journals
    start = good.block.segment_offset(successor.header.index)
    payload = bytes(image[start : start + 128])
    damage_headers(image, good)
    assert reader.read(image).state.last_lsn == first.last_lsn
    lsn = successor.header.first_lsn
    numbers = (192, 128, lsn, first.header.epoch, lsn - 1, 0, crc32c(payload, first._seed), 0, 0)
    head = struct.pack("<IHHIIQQQqIII", layout.RECORD_MAGIC, CONTINUATION, 0, *numbers)
    head += struct.pack("<I", crc32c(head, first._seed))
    for index in (first.header.index, first.header.partner):
        position = good.block.segment_offset(index) + first._end
        image[position : position + 192] = head + payload
    found = reader.load().Store(io.BytesIO(image))
    assert found.problems == []
    assert reader.state_of(found) == reader.state_of(good)

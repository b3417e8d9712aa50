"""A store of format version 1 opens, shows what it always showed, and verifies clean."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator

import pytest

from cxlfs.format import layout
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.verify import run_passes
from tests.golden.make import EXPECTED, IMAGE, SIZE_BYTES, UUID, describe
from tests.support.stores import read_file, write_file

SMALL_BYTES = 32 << 10


@pytest.fixture(params=[Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
def media(request: pytest.FixtureRequest) -> Iterator[MemoryMedia]:
    image = lzma.decompress(IMAGE.read_bytes())
    made = MemoryMedia(len(image), request.param)
    made.unguarded_memory()[:] = image
    yield made
    made.close()


def expected() -> dict[str, object]:
    found = json.loads(EXPECTED.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_the_image_is_what_it_claims() -> None:
    image = lzma.decompress(IMAGE.read_bytes())
    assert IMAGE.stat().st_size < SMALL_BYTES
    assert len(image) == SIZE_BYTES
    assert image[:8] == layout.SUPERBLOCK_MAGIC
    assert image[8:12] == (1).to_bytes(4, "little")
    assert image[40:56] == UUID


def test_read_only(media: MemoryMedia) -> None:
    before = bytes(media.unguarded_memory())
    store = Store.open(media, StoreOptions(read_only=True))
    assert describe(store) == expected()
    assert not store.recovery.clean
    assert store.recovery.records == 10
    assert store.recovery.problems == []
    store.close()
    assert bytes(media.unguarded_memory()) == before


def test_verifies_clean(media: MemoryMedia) -> None:
    assert list(run_passes(media, structure_only=False)) == []


def test_recovered_and_used(media: MemoryMedia) -> None:
    store = Store.open(media)
    assert not store.read_only
    assert describe(store) == expected()
    store.close()
    store = Store.open(media)
    assert describe(store) == expected()
    write_file(store, 1, b"new", b"written by this version")
    handle = store.open_file(store.lookup(1, b"sparse").ino, os.O_RDWR)
    store.write(handle, 0, b"begin")
    store.flush(handle, writer_killed=False)
    store.release(handle)
    store.abandon()
    store = Store.open(media)
    assert read_file(store, store.lookup(1, b"new").ino) == b"written by this version"
    sparse = read_file(store, store.lookup(1, b"sparse").ino)
    assert (sparse[:5], sparse[70_000:70_013], sparse[300_000:]) == (
        b"begin",
        b"in the middle",
        b"far away",
    )
    store.close()
    assert list(run_passes(media, structure_only=False)) == []

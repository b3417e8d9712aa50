"""Bytes that a store writes for each byte that programs write, when it is nearly full: data, what
the cleaner moves, and images. Counted on small stores with as many segments as large ones have.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from cxlfs.format import layout
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from tests.support.stores import make_media, read_file, write_file

STORE_BYTES = 32 << 20
SEGMENT_BYTES = 64 << 10
BLOCK_BYTES = 4096


class Meter:
    """What went to the media since :meth:`begin`."""

    def __init__(self) -> None:
        self._moved_before = self._image_bytes_before = 0
        self.store = self._open(make_media(STORE_BYTES))

    def _open(self, media: MemoryMedia) -> Store:
        Store.format(
            media,
            segment_size_bytes=SEGMENT_BYTES,
            unit_bytes=layout.UNIT_BYTES_TEST,
            chunk_bytes=BLOCK_BYTES,
            label="test",
        )
        return Store.open(media)

    def begin(self) -> None:
        counters = self.store.volume.counters
        self._moved_before = counters.moved_bytes
        self._image_bytes_before = counters.image_bytes_written

    def per_byte(self, data_bytes: int) -> float:
        counters = self.store.volume.counters
        moved = counters.moved_bytes - self._moved_before
        images = counters.image_bytes_written - self._image_bytes_before
        print(f"moved {moved / data_bytes:.2f}, images {images / data_bytes:.2f}")
        return (data_bytes + moved + images) / data_bytes

    def used_part(self) -> float:
        space = self.store.statfs()
        used = space.total_bytes - space.free_bytes
        return used / (used + space.available_bytes)


@pytest.fixture
def meter() -> Iterator[Meter]:
    made = Meter()
    yield made
    made.store.abandon()


def fill(store: Store, part: float, files: int) -> int:
    """Equal files that take so much of the room there is; the size of one."""
    size = int(store.statfs().free_bytes * part) // files // BLOCK_BYTES * BLOCK_BYTES
    for number in range(files):
        write_file(store, 1, b"f%d" % number, bytes([number]) * size)
    return size


@pytest.mark.parametrize("writers", [1, 4])
def test_overwriting_whole_files(meter: Meter, rng: random.Random, writers: int) -> None:
    """Checkpoints: the version before is dead when the new one is complete."""
    store, files = meter.store, 40
    size = fill(store, 0.95 - writers / files, files)
    for turn in range(2):
        meter.begin()
        written = 0
        for _ in range(files):
            names = rng.sample(range(files), writers)
            handles = [
                store.open_file(store.lookup(1, b"f%d" % n).ino, os.O_WRONLY | os.O_TRUNC)
                for n in names
            ]
            for offset in range(0, size, 32 << 10):
                for handle in handles:
                    data = bytes([turn]) * min(32 << 10, size - offset)
                    written += store.write(handle, offset, data)
                store.maintain(0.0)
            if turn and not written % 7:
                assert meter.used_part() > 0.8
            for handle in handles:
                store.flush(handle, writer_killed=False)
                store.release(handle)
        assert meter.per_byte(written) <= 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("filled", "used", "most"), [(0.85, 0.94, 5.0), (0.893, 0.97, 8.0)])
def test_overwriting_scattered_blocks(
    meter: Meter, rng: random.Random, filled: float, used: float, most: float
) -> None:
    """The worst there is: every block is as likely as any other to be the next one, so nothing
    dies together (at 0.85 of what an empty store offers, `df` says 94 % in the end, at 0.893 98 %).
    """
    store, files = meter.store, 8
    size = fill(store, filled, files)
    inos = [store.lookup(1, b"f%d" % number).ino for number in range(files)]
    handles = [store.open_file(ino, os.O_RDWR) for ino in inos]
    expected = {ino: bytearray(read_file(store, ino)) for ino in inos}
    for turn in range(2):
        meter.begin()
        written = 0
        while written < size * files // 2:
            for _ in range(16):
                number, block = rng.randrange(files), rng.randrange(size // BLOCK_BYTES)
                data = rng.randbytes(64) * (BLOCK_BYTES // 64)
                offset = block * BLOCK_BYTES
                written += store.write(handles[number], offset, data)
                expected[inos[number]][offset : offset + BLOCK_BYTES] = data
            for handle in handles:
                store.fsync(handle)
            for _ in range(4):
                store.maintain(0.0)
        found = meter.per_byte(written)
        print(f"turn {turn}: {found:.2f} at {meter.used_part():.3f}")
    assert found <= most
    assert meter.used_part() >= used
    assert {ino: read_file(store, ino) for ino in inos} == expected

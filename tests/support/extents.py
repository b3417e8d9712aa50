"""A small region with an engine on it, and room for leases, for tests of the extent map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from cxlfs.native import Granularity, MappedRegion
from cxlfs.native.extents import (
    LIVE_RANGE_DTYPE,
    MOVE_DTYPE,
    SPAN_DTYPE,
    Engine,
    FileMap,
    LiveRanges,
    Rows,
)

FIRST = 8192
"""Where segment 0 begins."""
SEGMENT_BYTES = 1 << 18
HEADER_BYTES = 4096
CHUNK_BYTES = 65536


def seeds(count: int) -> list[int]:
    """CXLFS_SEED alone when it is set, else the same ``count`` numbers each time."""
    chosen = os.environ.get("CXLFS_SEED")
    return [int(chosen)] if chosen else [1000 + i for i in range(count)]


class Room:
    """A region, an engine, and a row of segments from which leases are cut."""

    def __init__(
        self,
        region: MappedRegion,
        *,
        segments: int = 16,
        segment_bytes: int = SEGMENT_BYTES,
        chunk: int = CHUNK_BYTES,
    ) -> None:
        self.region = region
        self.segments = segments
        self.segment_bytes = segment_bytes
        self.chunk = chunk
        self.engine = self.another_engine()
        self.next_id = 1
        self.free = list(range(segments))
        self.segment = -1
        self.position = 0

    def another_engine(self) -> Engine:
        """A second engine over the same segments, as after a restart."""
        return Engine(
            self.region.handle,
            first=FIRST,
            segment_size=self.segment_bytes,
            segment_count=self.segments,
            chunk=self.chunk,
        )

    def cut(self, capacity: int) -> tuple[int, int]:
        """Media offset and size of a free place of about ``capacity`` bytes."""
        capacity = -(-capacity // 64) * 64
        if self.segment < 0 or self.position + capacity > self.segment_bytes:
            self.segment = self.free.pop(0)
            self.position = HEADER_BYTES
        offset = FIRST + self.segment * self.segment_bytes + self.position
        self.position += capacity
        return offset, capacity

    def open_extent(self, capacity: int) -> int:
        """The id of a new extent with a lease."""
        offset, capacity = self.cut(capacity)
        extent_id, self.next_id = self.next_id, self.next_id + 1
        self.engine.lease(extent_id, offset, capacity)
        return extent_id

    def new_map(self, owner: int = 1, *, capacity: int = 0) -> FileMap:
        content = FileMap(self.engine, owner=owner)
        if capacity:
            content.attach_lease(self.open_extent(capacity))
        return content

    def write(self, content: FileMap, offset: int, data: bytes, *, capacity: int = 1 << 16) -> None:
        """All of ``data``, with as many leases as it takes."""
        done = 0
        while done < len(data):
            taken, needed = content.write(offset + done, data, done)
            done += taken
            if taken == 0:
                content.close_lease()
                wanted = max(capacity, min(needed, self.segment_bytes - HEADER_BYTES))
                content.attach_lease(self.open_extent(wanted))

    def flip(self, media_offset: int, bit: int) -> None:
        """Change one bit of the media."""
        byte = self.region.read(media_offset, 1)[0] ^ (1 << bit)
        self.region.store(media_offset, bytes([byte]))


def copy_extent(engine: Engine, source: int, offset: int, length: int, target: int) -> int:
    """Append a range of one extent to another: bytes copied."""
    ranges = np.zeros(1, dtype=LIVE_RANGE_DTYPE)
    ranges["extent_id"], ranges["extent_offset"], ranges["length"] = source, offset, length
    return int(engine.copy_ranges(ranges, target)["length"].sum())


def re_aim(content: FileMap, *moves: tuple[int, int, int, int, int]) -> None:
    """Moves (source, its offset, length, target, its offset) of one content."""
    content.engine.move([content], np.array(list(moves), dtype=MOVE_DTYPE))


def put(content: FileMap, refs: Rows) -> None:
    """A change of a record that puts references and cuts nothing: the content ends where it did, or
    where they do.
    """
    ends = refs["file_offset"] + refs["length"]
    size = max([content.size, *ends[refs["extent_id"] != 0].tolist()])
    content.replay(content.size, refs.tobytes(), size)


def import_maps(
    engine: Engine,
    owners: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    first: npt.NDArray[np.uint64],
    refs: Rows,
) -> list[FileMap]:
    """``Engine.import_contents``, each taken over at once."""
    found = engine.import_contents(owners, sizes, first, refs)
    places = zip(owners.tolist(), found.tolist(), strict=True)
    return [FileMap.at(engine, owner, address) for owner, address in places]


def alive(engine: Engine, *segments: int, preferred: int = 0) -> LiveRanges:
    """What is alive in whole segments."""
    spans = np.zeros(len(segments), dtype=SPAN_DTYPE)
    spans["media_offset"] = engine.first + np.array(segments, dtype=np.int64) * engine.segment_size
    spans["length"] = engine.segment_size
    return engine.live_ranges(spans, preferred=preferred)


@contextmanager
def room(
    granularity: Granularity = Granularity.LINE,
    *,
    segments: int = 16,
    segment_bytes: int = SEGMENT_BYTES,
    chunk: int = CHUNK_BYTES,
) -> Iterator[Room]:
    """Anonymous memory with an engine on it."""
    size = FIRST + segments * segment_bytes
    region = MappedRegion(MappedRegion.anonymous_handle(size, granularity=granularity))
    place = Room(region, segments=segments, segment_bytes=segment_bytes, chunk=chunk)
    try:
        yield place
    finally:
        place.engine.close()
        region.close()


def pattern(length: int, seed: int) -> bytes:
    """Bytes that look the same nowhere."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


def nothing_held(engine: Engine) -> bool:
    """Nothing but the engine itself takes DRAM."""
    now = engine.statistics()
    empty = 64 * 8
    return (now.extents, now.refs, now.crcs, now.maps, now.memory) == (0, 0, 0, 0, empty)

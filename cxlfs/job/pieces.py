"""All bytes of a rank's shards as a row of pieces of one size, as they travel.

Never: reads, stores or sends a byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cxlfs.job.files import Shard

PIECE_BYTES = 4 << 20
PIECES_IN_FLIGHT = 4
"""So much memory each link takes, at each end."""
BITE_BYTES = 1 << 20
"""Of what comes in a stream: it is still in the cache of the processor that has received it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of one file, at ``begin`` of their piece."""

    shard: int
    offset: int
    begin: int
    size_bytes: int


def pieces(shards: tuple[Shard, ...], piece_bytes: int) -> Iterator[list[Part]]:
    """All bytes of all files in their order, cut without regard to where one ends."""
    parts: list[Part] = []
    filled = 0
    for index, shard in enumerate(shards):
        offset = 0
        while offset < shard.size_bytes:
            size = min(shard.size_bytes - offset, piece_bytes - filled)
            parts.append(Part(index, offset, filled, size))
            offset += size
            filled += size
            if filled == piece_bytes:
                yield parts
                parts, filled = [], 0
    if parts:
        yield parts


def size_of(parts: list[Part]) -> int:
    """Of their piece, in bytes."""
    return parts[-1].begin + parts[-1].size_bytes

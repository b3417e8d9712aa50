"""Shards of which some are large enough for direct access, and which travel in many pieces all the
same: so a copy between two nodes' pages has moments inside of it, too.

Never here: what is copied, and how (``cxlfs.job.copying``).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxlfs import client
from cxlfs.job import incoming, pieces

PIECE_EVENT = "cxlfs.tests.piece"
"""Of ``sys.audit``: a piece came in, or a file of them is complete."""
PIECE_BYTES, STRETCH_BYTES = 256 << 10, 512 << 10
_SMALL_BYTES, _LARGE_BYTES = 40_000, 1_500_000
_SHARE_OF_LARGE, _SHARE_OF_DIRECT = 0.35, 0.5


def cut_small(tell: Callable[[], None]) -> None:
    """In this process from now on. ``tell`` is called for each file that came in directly."""
    pieces.PIECE_BYTES = PIECE_BYTES
    incoming.STRETCH_BYTES = STRETCH_BYTES
    take, end = incoming.Incoming.take, incoming._Stored.end

    def take_watched(self: incoming.Incoming, *piece: Any) -> None:
        take(self, *piece)
        sys.audit(PIECE_EVENT)

    def end_watched(self: Any) -> None:
        sys.audit(PIECE_EVENT)
        end(self)
        tell()

    incoming.Incoming.take = take_watched  # type: ignore[method-assign]
    incoming._Stored.end = end_watched  # type: ignore[method-assign]


def a_shard(numbers: random.Random) -> bytes:
    if numbers.random() < _SHARE_OF_LARGE:
        return numbers.randbytes(numbers.randint(incoming.DIRECT_FROM_BYTES, _LARGE_BYTES))
    return numbers.randbytes(numbers.randint(1, _SMALL_BYTES))


def write(path: Path, data: bytes, numbers: random.Random) -> bool:
    """True: the process stored it by itself."""
    if numbers.random() >= _SHARE_OF_DIRECT:
        path.write_bytes(data)
        return False
    with client.open(path, "wb") as file:
        file.write(data)
        return bool(file.direct)

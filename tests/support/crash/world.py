"""A world in which equal bytes on the media mean equal executions.

Time and random numbers are the only things besides the media that a recovery looks at. Here each
stage of an execution (recording, recovery, what comes after) has its own time and its own number.
Decoders that are pure functions remember their results: the same slot is decoded 100 000 times.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from cxlfs.format import roots, segments, superblock

STAGE_NS = 10**15
"""Between the times of two stages: far more than any execution takes."""
STEP_NS = 1000
FIRST_NS = 1_700_000_000 * 10**9
DECODED_MAX = 1 << 14


class World:
    """The clock and the source of random numbers of everything below ``with fixed_world()``."""

    def __init__(self) -> None:
        self._now = FIRST_NS
        self._draws = 0
        self._stage = 0

    def enter(self, stage: int) -> None:
        """From here on time and random numbers are those of ``stage``."""
        self._now = FIRST_NS + stage * STAGE_NS
        self._stage = stage
        self._draws = 0

    def time_ns(self) -> int:
        self._now += STEP_NS
        return self._now

    def urandom(self, size: int) -> bytes:
        self._draws += 1
        number = (self._stage << 32 | self._draws) * 0x9E3779B97F4A7C15
        return (number & (1 << 64) - 1).to_bytes(8, "little").ljust(size, b"\xa5")[:size]


WORLD = World()


@contextlib.contextmanager
def fixed_world() -> Iterator[World]:
    """Put :data:`WORLD` in the place of the real one, and remember what decoders say."""
    saved = time.time_ns, os.urandom
    decoders = segments.decode, roots.decode, superblock.decode
    time.time_ns, os.urandom = WORLD.time_ns, WORLD.urandom
    segments.decode, roots.decode = _remember(segments.decode), _remember(roots.decode)
    superblock.decode = _remember(superblock.decode)
    try:
        yield WORLD
    finally:
        time.time_ns, os.urandom = saved
        segments.decode, roots.decode, superblock.decode = decoders


F = TypeVar("F", bound=Callable[..., object])


def _remember(decode: F) -> F:
    return functools.lru_cache(maxsize=DECODED_MAX)(decode)  # type: ignore[return-value]

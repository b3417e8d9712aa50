"""Two views of a media for repairing: one that only pretends to write, one that writes nothing but
what was announced.

Never here: deciding what is written.

Invariants
- A view asks its media for everything, shares its mapping, and never closes it.
- Through an overlay nothing reaches the media. Its memory is what was stored into it.
- Through a guard a store outside the announced ranges raises before it touches the media.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import InvariantError, MediaError
from cxlfs.media import Media
from cxlfs.media.base import DirtyShutdown
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.native.primitives import Source, Target

Range = tuple[int, int]
"""(media offset, length)."""


class _View(Media):
    def __init__(self, media: Media) -> None:
        vars(self).update(vars(media))
        self._viewed = media

    def close(self) -> None:
        """The mapping belongs to the media below."""

    def read(self, offset: int, length: int) -> bytes:
        return self._viewed.read(offset, length)

    def read_into(self, offset: int, target: Target) -> None:
        self._viewed.read_into(offset, target)

    def crc32c(self, offset: int, length: int, seed: int = 0) -> int:
        return self._viewed.crc32c(offset, length, seed)

    def store(self, offset: int, data: Source) -> None:
        self._viewed.store(offset, data)

    def copy(self, offset: int, data: Source) -> None:
        self._viewed.copy(offset, data)

    def copy_crc32c(self, offset: int, data: Source, seed: int = 0) -> int:
        return self._viewed.copy_crc32c(offset, data, seed)

    def store_u64(self, offset: int, value: int) -> None:
        self._viewed.store_u64(offset, value)

    def write_back(self, offset: int, length: int) -> None:
        self._viewed.write_back(offset, length)

    def fence(self) -> None:
        self._viewed.fence()

    def dirty_shutdown(self) -> DirtyShutdown:
        return self._viewed.dirty_shutdown()

    def describe_fault(self) -> str | None:
        return self._viewed.describe_fault()


class OverlayMedia(_View):
    """What is stored is remembered and read back. ``ranges``: where, in the order of the stores."""

    def __init__(self, media: Media) -> None:
        super().__init__(media)
        self.read_only = False
        self.ranges: list[Range] = []
        self._patches: list[tuple[int, bytes]] = []

    def read(self, offset: int, length: int) -> bytes:
        try:
            data = bytearray(super().read(offset, length))
        except MediaError:
            data = self._read_gaps(offset, length)
        for start, patch in self._patches:
            low, high = max(start, offset), min(start + len(patch), offset + length)
            if low < high:
                data[low - offset : high - offset] = patch[low - start : high - start]
        return bytes(data)

    def _read_gaps(self, offset: int, length: int) -> bytearray:
        """Read the bytes that no patch covers: a patch replaces bytes that cannot be read."""
        data, position, end = bytearray(length), offset, offset + length
        for start, patch in sorted(self._patches, key=lambda item: item[0]):
            if position < start < end:
                data[position - offset : start - offset] = super().read(position, start - position)
            if start < end:
                position = max(position, start + len(patch))
        if position < end:
            data[position - offset :] = super().read(position, end - position)
        return data

    def read_into(self, offset: int, target: Target) -> None:
        view = np.asarray(target, dtype=np.uint8)
        view[:] = np.frombuffer(self.read(offset, len(view)), dtype=np.uint8)

    def crc32c(self, offset: int, length: int, seed: int = 0) -> int:
        return crc32c(self.read(offset, length), seed)

    def store(self, offset: int, data: Source) -> None:
        content = bytes(data)
        self._check_range(offset, len(content))
        if content:
            self.ranges.append((offset, len(content)))
            self._patches.append((offset, content))

    copy = store

    def copy_crc32c(self, offset: int, data: Source, seed: int = 0) -> int:
        self.store(offset, data)
        return crc32c(data, seed)

    def store_u64(self, offset: int, value: int) -> None:
        self.store(offset, value.to_bytes(8, "little"))

    def write_back(self, offset: int, length: int) -> None:
        self._check_range(offset, length)

    def fence(self) -> None:
        """Nothing is on its way."""


class GuardedMedia(_View):
    """Stores into ``ranges`` (sorted, apart) pass; any other raises InvariantError."""

    def __init__(self, media: Media, ranges: list[Range]) -> None:
        super().__init__(media)
        self._ranges = ranges

    def _require(self, offset: int, length: int) -> None:
        if length and not any(
            start <= offset and offset + length <= start + size for start, size in self._ranges
        ):
            raise InvariantError(
                f"repairing would change {length} bytes at {offset}, which were not saved"
            )

    def store(self, offset: int, data: Source) -> None:
        content = bytes(data)
        self._require(offset, len(content))
        super().store(offset, content)

    def copy(self, offset: int, data: Source) -> None:
        content = bytes(data)
        self._require(offset, len(content))
        super().copy(offset, content)

    def copy_crc32c(self, offset: int, data: Source, seed: int = 0) -> int:
        content = bytes(data)
        self._require(offset, len(content))
        return super().copy_crc32c(offset, content, seed)

    def store_u64(self, offset: int, value: int) -> None:
        self._require(offset, 8)
        super().store_u64(offset, value)

"""Files that programs have mapped: their extents are held, so that the bytes stay what and where
they are, whatever becomes of the file.

Never here: room that programs store into (``direct``), who may ask, locking.

Invariants
- What is held is held until the program has unmapped it, or closed the file, and nothing of it is
  locked any more: the kernel keeps a lock as long as the mapping lives (``media/locks``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import BadHandleError, InvalidArgumentError, LimitError
from cxlfs.units import format_size

if TYPE_CHECKING:
    from cxlfs.media import Media
    from cxlfs.native.direct import HeldContent
    from cxlfs.store.files import Files


PIECES_MAX = 4096
"""Of a file that can be mapped: each is a lock, and the kernel looks at all of a file's locks for
each question. 20 ms for so many; 32 GiB that were written front to back have no more."""


class MapPart(NamedTuple):
    """Rows and checksums of a part of a file, as the program gets them."""

    payload: bytes
    row_count: int
    crc_count: int
    next_offset: int
    size_bytes: int


def require_locked(media: Media, offset: int, length: int) -> None:
    """Raises InvalidArgumentError where not all of the range is locked."""
    if media.locked_ranges(offset, offset + length) != [(offset, offset + length)]:
        raise InvalidArgumentError(f"{format_size(length)} at media offset {offset} are not locked")


class MappedFiles:
    """One for each store; by the handles through which they were mapped."""

    def __init__(self, media: Media, files: Files) -> None:
        self._media = media
        self._files = files
        self._held: dict[int, HeldContent] = {}
        self._apart: list[HeldContent] = []
        """Those without a handle that are locked."""

    @property
    def count(self) -> int:
        """Open files that are mapped."""
        return len(self._held)

    def map(self, handle_id: int, offset: int, room_bytes: int) -> MapPart:
        """Where a part of the file lies, of which nothing moves until :meth:`unmap`; ``offset`` 0
        begins anew with the live content of this moment. Raises BadHandleError,
        InvalidArgumentError, LimitError (it lies in too many pieces), OutOfMemoryError.
        """
        handle = self._files.get(handle_id)
        if not handle.readable:
            raise BadHandleError("not open for reading")
        if offset == 0:
            self.unmap(handle_id)
            if handle.inode.content.ref_count > PIECES_MAX:
                raise LimitError(f"the file lies in more than {PIECES_MAX} pieces")
            self._held[handle_id] = handle.inode.content.hold()
        held = self._held.get(handle_id)
        if held is None:
            raise InvalidArgumentError("a mapping begins with the first byte of the file")
        if not 0 <= offset <= held.size_bytes:
            raise InvalidArgumentError(f"the file that was mapped ends before byte {offset}")
        payload, row_count, crc_count, next_offset = held.part(offset, room_bytes)
        return MapPart(payload, row_count, crc_count, next_offset, held.size_bytes)

    def confirm(self, handle_id: int) -> None:
        """All of it is locked. Raises InvalidArgumentError."""
        held = self._held.get(handle_id)
        if held is None:
            raise InvalidArgumentError("the file is not mapped")
        for offset, length in held.ranges():
            require_locked(self._media, offset, length)

    def unmap(self, handle_id: int) -> None:
        """The program looks at nothing any more that it has not locked."""
        held = self._held.pop(handle_id, None)
        if held is not None and not self._try_let_go(held):
            self._apart.append(held)

    def _try_let_go(self, held: HeldContent) -> bool:
        if any(self._media.locked_ranges(start, start + size) for start, size in held.ranges()):
            return False
        held.close()
        return True

    def maintain(self) -> bool:
        """Look again at what is locked; True: some of it is not any more."""
        waiting = len(self._apart)
        self._apart = [held for held in self._apart if not self._try_let_go(held)]
        return len(self._apart) < waiting

    def abandon(self) -> None:
        """Before the engine is closed."""
        for held in (*self._held.values(), *self._apart):
            held.close()
        self._held.clear()
        self._apart.clear()

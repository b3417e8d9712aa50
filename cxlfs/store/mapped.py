"""Files that programs have mapped: their extents are held, so that the bytes stay what and where
they are, whatever becomes of the file.

A *watched* file is read from the medium as if by read(2): a lock of this process says that it is
held, and that its content is still what it was (``media/locks``). The program looks for the lock
before it copies, and again when it has copied.

Never here: room that programs store into (``direct``), who may ask, locking parts of the medium.

Invariants
- What is held is held until the program has unmapped it, or closed the file, and nothing of it is
  locked any more: the kernel keeps a lock as long as the mapping lives (``media/locks``).
- A file is watched only while nobody has it open for writing. The watch has ended before anybody is
  told that he has, before the content changes any other way, and before anything of it is let go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import (
    BadHandleError,
    BusyError,
    CorruptionError,
    InvalidArgumentError,
    LimitError,
    MediaError,
)
from cxlfs.native.direct import LOCK_GAP_BYTES
from cxlfs.units import format_size

if TYPE_CHECKING:
    from cxlfs.media import Media
    from cxlfs.native.direct import HeldContent
    from cxlfs.store.files import Files
    from cxlfs.store.handle import Handle
    from cxlfs.store.verified import Piece, VerifiedContents

PIECES_MAX = 4096
"""Of a file that can be mapped: each is a lock, and the kernel looks at all of a file's locks for
each question. 20 ms for so many; 32 GiB that were written front to back have no more."""


LOOKED_AT_BYTES_MAX = 1 << 20
"""Of what a program says is damaged."""
WATCHES_MAX = 1024
"""Each is a lock as well."""


class MapPart(NamedTuple):
    """Rows and checksums of a part of a file, as the program gets them."""

    payload: bytes
    row_count: int
    crc_count: int
    next_offset: int
    size_bytes: int
    watch: int
    """Beyond the medium: locked as long as the file is what it was; 0: it is not watched."""
    is_verified: bool = False
    """All of it was, lately: there are no checksums."""
    is_shared: bool = False
    """Else :meth:`MappedFiles.verify` says what is left."""


class _Mapped(NamedTuple):
    """``watch``: 0 where there is none. ``known_by``: what it is called where what was verified is
    remembered; None: this program compares it alone.
    """

    content: HeldContent
    ino: int
    watch: int
    known_by: bytes | None = None
    is_verified: bool = False


def require_locked(media: Media, places: Iterable[tuple[int, int]]) -> None:
    """Of media offsets and lengths. Raises InvalidArgumentError where not all of it is locked.

    What touches is asked for as one: so the kernel joins locks.
    """
    joined: list[list[int]] = []
    for offset, length in sorted(places):
        if joined and joined[-1][1] >= offset:
            joined[-1][1] = max(joined[-1][1], offset + length)
        else:
            joined.append([offset, offset + length])
    for start, end in joined:
        if media.locked_ranges(start, end) != [(start, end)]:
            size = format_size(end - start)
            raise InvalidArgumentError(f"{size} at media offset {start} are not locked")


class MappedFiles:
    """One for each store; by the handles through which they were mapped."""

    def __init__(self, media: Media, files: Files, verified: VerifiedContents) -> None:
        self._media = media
        self._files = files
        self._verified = verified
        self._held: dict[int, _Mapped] = {}
        self._watches: dict[int, set[int]] = {}
        """Of each inode that has any, those that go on."""
        self._apart: list[HeldContent] = []
        """Those without a handle that are locked."""

    @property
    def count(self) -> int:
        """Open files that are mapped."""
        return len(self._held)

    def map(
        self,
        handle_id: int,
        offset: int,
        room_bytes: int,
        *,
        watched: bool = False,
        shared: bool = False,
    ) -> MapPart:
        """Where a part of the file lies, of which nothing moves until :meth:`unmap`; ``offset`` 0
        begins anew with the live content of this moment, ``watched`` from then on or not.
        ``shared``: what others verify counts, and what this program does for others. Raises
        BadHandleError, InvalidArgumentError, LimitError (it lies in too many pieces),
        OutOfMemoryError; BusyError: somebody may write to it, or it cannot be watched.
        """
        handle = self._files.get(handle_id)
        if not handle.readable:
            raise BadHandleError("not open for reading")
        if offset == 0:
            self.unmap(handle_id)
            if handle.inode.content.ref_count > PIECES_MAX:
                raise LimitError(f"the file lies in more than {PIECES_MAX} pieces")
            held_now = self._hold(handle, watched=watched)
            self._held[handle_id] = held_now
            if shared and self._verified.for_seconds:
                known_by, is_verified = self._verified.begin(held_now.content)
                self._held[handle_id] = held_now._replace(
                    known_by=known_by, is_verified=is_verified
                )
        mapped = self._held.get(handle_id)
        if mapped is None:
            raise InvalidArgumentError("a mapping begins with the first byte of the file")
        held = mapped.content
        if not 0 <= offset <= held.size_bytes:
            raise InvalidArgumentError(f"the file that was mapped ends before byte {offset}")
        payload, row_count, crc_count, next_offset = held.part(
            offset, room_bytes, with_sums=not mapped.is_verified
        )
        return MapPart(
            payload,
            row_count,
            crc_count,
            next_offset,
            held.size_bytes,
            mapped.watch,
            mapped.is_verified,
            mapped.known_by is not None,
        )

    def _hold(self, handle: Handle, *, watched: bool) -> _Mapped:
        inode = handle.inode
        if not watched:
            return _Mapped(inode.content.hold(), inode.ino, 0)
        if len(self._held) >= WATCHES_MAX:
            raise BusyError(f"{WATCHES_MAX} files are mapped")
        if inode.ino in self._files.writers:
            raise BusyError("somebody has the file open for writing")
        held = inode.content.hold()
        watch = self._media.begin_watch()
        if watch is None:
            held.close()
            raise BusyError("no other process would see that the file is watched")
        self._watches.setdefault(inode.ino, set()).add(watch)
        return _Mapped(held, inode.ino, watch)

    def verify(self, handle_id: int, done: tuple[int, int], *, wrong: bool = False) -> Piece:
        """``done``: offset and length of the piece of a shared mapping that its program has
        compared, and that is right; length 0: none; then what to compare next. ``wrong``: it is
        not right, and nobody is to believe anything that was compared. Raises
        InvalidArgumentError: this is to be compared alone.
        """
        mapped = self._held.get(handle_id)
        if mapped is None:
            raise InvalidArgumentError("the file is not mapped")
        if wrong:
            self._verified.forget()
            with contextlib.suppress(CorruptionError, MediaError):  # which notes what it meets
                self._files.read(handle_id, done[0], min(done[1], LOOKED_AT_BYTES_MAX))
        if wrong or mapped.known_by is None:
            raise InvalidArgumentError("it is not verified together with others")
        return self._verified.next(mapped.known_by, handle_id, done)

    def changing(self, ino: int) -> None:
        """The content is about to change, or somebody to get a handle that can change it: whoever
        reads it by himself asks from here on. Raises MediaError: he would not know.
        """
        watches = self._watches.get(ino)
        if watches is None:
            return
        for watch in list(watches):
            self._media.end_watch(watch)
            watches.remove(watch)
        del self._watches[ino]

    def _end_watch(self, mapped: _Mapped) -> None:
        """Where it still goes on."""
        watches = self._watches.get(mapped.ino)
        if watches is None or mapped.watch not in watches:
            return
        self._media.end_watch(mapped.watch)
        watches.remove(mapped.watch)
        if not watches:
            del self._watches[mapped.ino]

    def confirm(self, handle_id: int) -> None:
        """All of it is locked. Raises InvalidArgumentError."""
        mapped = self._held.get(handle_id)
        if mapped is None:
            raise InvalidArgumentError("the file is not mapped")
        require_locked(self._media, mapped.content.ranges(LOCK_GAP_BYTES))

    def unmap(self, handle_id: int) -> None:
        """The program looks at nothing any more that it has not locked. Raises MediaError: a watch
        cannot be ended, and all stays as it is.
        """
        mapped = self._held.get(handle_id)
        if mapped is None:
            return
        self._end_watch(mapped)
        del self._held[handle_id]
        if mapped.known_by is not None:
            self._verified.drop(mapped.known_by, handle_id)
        if mapped.watch:  # of which nothing is locked, by its program
            mapped.content.close()
        elif not self._try_let_go(mapped.content):
            self._apart.append(mapped.content)

    def _try_let_go(self, held: HeldContent) -> bool:
        ranges = held.ranges(LOCK_GAP_BYTES)
        if any(self._media.locked_ranges(start, start + size) for start, size in ranges):
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
        for ino in list(self._watches):
            with contextlib.suppress(MediaError):  # it ends with this process's descriptor
                self.changing(ino)
        for held in (*(mapped.content for mapped in self._held.values()), *self._apart):
            held.close()
        self._held.clear()
        self._apart.clear()

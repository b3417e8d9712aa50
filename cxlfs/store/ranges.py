"""Ranges of open files: fallocate, SEEK_DATA and SEEK_HOLE, copy_file_range.

Never here: reading or writing file data (``files``), publishing (``versions``).

Invariants
- A change is one of the live content, like a write: committed by close, fsync, rename and link,
  taken back with the version of a killed writer.
- Copying moves no data: the target refers to the source's extents. They are closed first, so that
  their length and checksums are final before a second file names them. Nothing is verified then:
  whoever reads the copy verifies it, and damage shows in both files.
- What cannot be done changes nothing, but for a hole that is made in parts; a copy that fails
  counts as a failed write of its range.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import (
    BadHandleError,
    BeyondDataError,
    CxlfsError,
    FileTooLargeError,
    InvalidArgumentError,
    NoSpaceError,
    UnsupportedOperationError,
)
from cxlfs.format import layout
from cxlfs.store.clones import REFS_AT_ONCE
from cxlfs.store.handle import Effort, UnfinishedError

if TYPE_CHECKING:
    from cxlfs.store.files import Files
    from cxlfs.store.handle import Handle
    from cxlfs.store.namespace import Inode
    from cxlfs.store.report import Reporter
    from cxlfs.store.room import Room
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

_SHARE_BYTES_MIN = 4096
"""A piece smaller than a file block is copied: references to shreds cost more than they save."""
_STALLED_ROUNDS_MAX = 2
_VICTIMS_MAX = 8
"""Segments that the cleaner empties together: who has moved as much as they hold and gained nothing
gains nothing by going on."""


class Ranges:
    """The verbs over ranges; ``reclaim`` makes room, and tells whether it could."""

    def __init__(
        self,
        volume: Volume,
        versions: Versions,
        files: Files,
        reporter: Reporter,
        room: Room,
        *,
        reclaim: Callable[[int], bool],
    ) -> None:
        self.volume = volume
        self.versions = versions
        self.files = files
        self.reporter = reporter
        self.room = room
        self._reclaim = reclaim

    # --- room -------------------------------------------------------------------------------

    def _make_room(
        self, enough: Callable[[], bool], needed_bytes: int = 0, *, steps_of: Handle | None = None
    ) -> bool:
        """Reclaim until there is enough, for so much file data or (0) for metadata; False when more
        cannot be had. ``steps_of``: whose request goes in steps: UnfinishedError behind each.
        """
        if enough():
            return True
        space, counters = self.volume.space, self.volume.counters
        move_bytes_max = _VICTIMS_MAX * self.volume.superblock.segment_payload_bytes
        effort = None if steps_of is None else steps_of.effort
        if effort is None:  # giving up what is kept aside may free nothing
            effort = Effort(space.available_bytes, counters.moved_bytes, -len(self.versions.asides))
        if steps_of is not None:
            steps_of.effort = None
        while not enough():
            before, removing = counters.moved_bytes, self.room.is_removing
            if effort.stalled > _STALLED_ROUNDS_MAX or not self._reclaim(needed_bytes):
                return enough()
            moving = before < counters.moved_bytes <= effort.moved_bytes + move_bytes_max
            if space.available_bytes > effort.best_bytes:
                effort.best_bytes, effort.moved_bytes = space.available_bytes, counters.moved_bytes
                effort.stalled = min(effort.stalled, 0)
            elif not removing and not moving:
                effort.stalled += 1
            if steps_of is not None and not enough():
                steps_of.effort = effort
                raise UnfinishedError
        return True

    def _require_references(self, count: int, *, steps_of: Handle | None = None) -> None:
        """There is room for metadata with so many more references; raises NoSpaceError.
        ``steps_of``: see :meth:`_make_room`.
        """
        growth_bytes = count * layout.REF_DTYPE.itemsize
        volume = self.volume
        if not self._make_room(
            lambda: volume.space.has_free(volume.refresh_reserve(growth_bytes)),
            steps_of=steps_of,
        ):
            raise NoSpaceError("the metadata of this store has no room to grow")

    # --- fallocate --------------------------------------------------------------------------

    def allocate(
        self,
        handle_id: int,
        offset: int,
        length: int,
        *,
        keep_size: bool = False,
        punch: bool = False,
        zero: bool = False,
        in_steps: bool = False,
    ) -> None:
        """fallocate(2): mode 0, KEEP_SIZE, PUNCH_HOLE with KEEP_SIZE, ZERO_RANGE; to the byte.
        ``in_steps``: a hole of more than REFS_AT_ONCE references is made in parts, and room by one
        step of the cleaner after the other; behind each UnfinishedError is raised. Nothing is
        promised before there is room.

        Raises BadHandleError, InvalidArgumentError, FileTooLargeError, UnsupportedOperationError
        (another combination), NoSpaceError (the holes of the range do not fit), ReadOnlyError.
        What is promised: see ``promises``.
        """
        handle = self.files.get(handle_id)
        if not handle.writable:
            raise BadHandleError("not open for writing")
        _require_range(offset, length)
        if punch and (zero or not keep_size):
            raise UnsupportedOperationError("not a way to allocate space")
        self.volume.require_writable()
        inode, end = handle.inode, offset + length
        part = inode.content.reach(offset, length, REFS_AT_ONCE) if punch and in_steps else length
        if part < length:
            self.allocate(handle_id, offset, part, keep_size=True, punch=True)
            raise UnfinishedError
        promised = self.versions.promises.of(inode)
        steps_of = handle if in_steps else None
        try:
            if not punch:
                self._promise(inode, offset, end, emptied=zero, steps_of=steps_of)
            if punch or zero:
                self._require_references(1, steps_of=steps_of)
                version = self.files.begin_change(handle)
                inode.content.punch(offset, length)
                version.repair(offset, end)
            else:
                self.files.begin_change(handle)
        except (CxlfsError, UnfinishedError) as error:
            self.versions.promises.put(inode, promised)
            if isinstance(error, NoSpaceError):
                self.volume.counters.no_space_errors += 1
                self.volume.event("no-space", error.message, ino=inode.ino)
            raise
        if punch:
            self.versions.promises.remove(inode, offset, end)
        elif not keep_size and end > inode.content.size:
            inode.content.truncate(end)
        inode.touch(self.volume.now())

    def _promise(
        self, inode: Inode, start: int, end: int, *, emptied: bool, steps_of: Handle | None
    ) -> None:
        """Keep room for what are holes in the range now, or (emptied) will be: all of it."""
        promises, space = self.versions.promises, self.volume.space
        mapped = inode.content.mapped(start, end - start)[0] if emptied else 0
        open_bytes, promised = promises.bytes_open(), promises.of(inode)
        while True:
            free_bytes = self.reporter.space().free_bytes
            promises.add(inode, start, end)
            wanted = promises.bytes_open() + mapped
            if wanted - open_bytes <= free_bytes:
                break
            promises.put(inode, promised)
            if not self._free_more(wanted - open_bytes, steps_of):
                raise space.shortfall(wanted - open_bytes, open_bytes)
        self.volume.refresh_reserve()
        if not self._make_room(lambda: space.available_bytes >= wanted, wanted, steps_of=steps_of):
            raise space.shortfall(wanted - open_bytes, open_bytes)

    def _free_more(self, wanted_bytes: int, steps_of: Handle | None) -> bool:
        """Nobody is refused for what only counts as kept: until it is dropped in steps (``room``),
        replaced (``clones``), or because what nobody wants, or was set aside, has names. One step
        of giving that up, for a request that the whole store could take; False: there is none.
        """
        if self.room.is_discarding:
            self.room.drop_discarded()
            while steps_of is None and self.room.drop_discarded():
                pass
        elif self.versions.count_replaced():
            pass
        elif wanted_bytes > self.reporter.space().total_bytes or not self.room.give_up_some():
            return False
        if steps_of is not None:
            raise UnfinishedError
        return True

    # --- seek -------------------------------------------------------------------------------

    def seek(self, handle_id: int, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE. Raises BeyondDataError, InvalidArgumentError."""
        content = self.files.get(handle_id).inode.content
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise InvalidArgumentError("not a way to look for data")
        if not 0 <= offset <= layout.FILE_SIZE_MAX:
            raise BeyondDataError("beyond the end of file")
        return content.seek(offset, hole=whence == os.SEEK_HOLE)

    # --- copy_file_range --------------------------------------------------------------------

    def copy(
        self,
        handle_in: int,
        offset_in: int,
        handle_out: int,
        offset_out: int,
        length: int,
        *,
        in_steps: bool = False,
    ) -> int:
        """copy_file_range(2): bytes copied, short at the source's end of file, and where more than
        REFS_AT_ONCE references would come or go. ``in_steps``: room for metadata is made by one
        step of the cleaner after the other; behind each UnfinishedError is raised.

        Raises BadHandleError, InvalidArgumentError (ranges of one file overlap), FileTooLargeError,
        NoSpaceError (no room for metadata), ReadOnlyError; and of a piece below 4 KiB, which is
        copied, what reading and writing raise.
        """
        source, target = self.files.get(handle_in), self.files.get(handle_out)
        if not source.readable or not target.writable:
            raise BadHandleError("not open for reading, or not for writing")
        self.volume.require_writable()
        if min(offset_in, offset_out, length) < 0:
            raise InvalidArgumentError("a range begins and ends behind the beginning of the file")
        content = source.inode.content
        length = max(0, min(length, content.size - offset_in))
        if offset_out + length > layout.FILE_SIZE_MAX:
            raise FileTooLargeError("beyond the largest file")
        if source.inode is target.inode and abs(offset_in - offset_out) < length:
            raise InvalidArgumentError("the ranges overlap")
        if 0 < length < _SHARE_BYTES_MIN and content.mapped(offset_in, length)[0]:
            data = self.files.read(handle_in, offset_in, length)
            return self.files.write(handle_out, offset_out, data)
        for inode, start in ((source.inode, offset_in), (target.inode, offset_out)):
            length = inode.content.reach(start, length, REFS_AT_ONCE)
        if length:
            self._share(source.inode, offset_in, target, offset_out, length, in_steps=in_steps)
        return length

    def _share(
        self,
        source: Inode,
        offset_in: int,
        target: Handle,
        offset_out: int,
        length: int,
        *,
        in_steps: bool,
    ) -> None:
        inode, content = target.inode, source.content
        end = offset_out + length
        self.files.begin_change(target)
        try:
            self._require_references(
                content.mapped(offset_in, length)[1] + 1, steps_of=target if in_steps else None
            )
            version = self.files.begin_change(target)  # making room may have committed the last one
            part = offset_in, offset_out, length
            self.versions.sharing.range(content, inode.content, part, of=source)
        except CxlfsError as error:
            self.files.change_failed(target, offset_out, end, error)
            raise
        version.repair(offset_out, end)
        inode.touch(self.volume.now())


def _require_range(offset: int, length: int) -> None:
    if offset < 0 or length <= 0:
        raise InvalidArgumentError("a range has a beginning and at least one byte")
    if offset + length > layout.FILE_SIZE_MAX:
        raise FileTooLargeError("beyond the largest file")

"""Open files: handles, reads, writes, and what close, fsync and a killed writer mean.

Never here: names and directories, how a version is made durable (``versions``).

Invariants
- close (FLUSH of a living writer) and fsync publish durably, or raise the error of a write that
  failed and was not repaired; nothing is published then.
- A handle that truncated the file makes an atomic overwrite, until its last descriptor in the
  process was closed without a write, or somebody who did not truncate writes too: then it is
  ordinary. Shell redirection closes a copy first; what it overwrites is atomic until the periodic
  commit finds so little written that it must be a log (``commits``).
- A change in place is atomic where the file's format says that half of one is worth nothing
  (``Overwrites.is_one_change``). Each commit point ends one such change.
- A killed writer of an atomic overwrite that nobody else goes on with brings the old content back
  when the last handle is released; a new file that it leaves is committed, marked incomplete. To go
  on is to write: who only opened the file too, or truncated it before, publishes nothing of it.
- No byte of file data is looked at by Python: buffers go to and from the engine as they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import (
    BadHandleError,
    CorruptionError,
    CxlfsError,
    FileTooLargeError,
    InvalidArgumentError,
    IsDirectoryError,
    MediaError,
    NoSpaceError,
)
from cxlfs.format import layout
from cxlfs.store.handle import Handle, UnfinishedError, is_atomic, is_changing, left_by_killed
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.open_writers import Writers
from cxlfs.store.version import Version

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume
    from cxlfs.store.writers import Port

_STEPS_PAID = 2
"""For each lease while room is nearly used up: as much as it takes of segments 97 % alive."""
_PEEK_BYTES_MIN = 16384
"""Below this a copy into a fresh buffer is cheaper than verifying in place and copying later."""


class Files:
    """The verbs over open files; ``reclaim`` makes room, ``pay`` makes some for others."""

    def __init__(
        self,
        volume: Volume,
        versions: Versions,
        *,
        verify_reads: bool,
        reclaim: Callable[[int], bool],
        pay: Callable[[], bool],
    ) -> None:
        self.volume = volume
        self.versions = versions
        self.verify_reads = verify_reads
        self.allow_incomplete_overwrite = False
        self._reclaim, self._pay = reclaim, pay
        self._handles: dict[int, Handle] = {}
        self.writers = Writers()
        self._next_id = 1
        self.on_release: Callable[[Handle], None] = lambda _: None
        self.before_change: Callable[[int], None] = lambda _: None
        """Of an inode, before anybody gets a writable handle, or it is truncated without one."""

    # --- open and release -------------------------------------------------------------------

    def get(self, handle_id: int) -> Handle:
        handle = self._handles.get(handle_id)
        if handle is None:
            raise BadHandleError(f"no open file {handle_id}")
        if handle.inode.direct is not None:
            handle.inode.direct.absorb()
        return handle

    def open(self, inode: Inode, flags: int) -> Handle:
        """O_TRUNC without write access is a truncate(2), committed on return.

        Raises IsDirectoryError, InvalidArgumentError (not a file), ReadOnlyError, and with O_TRUNC
        what emptying raises; nothing is open then.
        """
        if inode.entries is not None:
            raise IsDirectoryError("a directory")
        if inode.kind is not FileKind.FILE:
            raise InvalidArgumentError("not a regular file")
        access = flags & os.O_ACCMODE
        if writable := access in {os.O_WRONLY, os.O_RDWR}:
            self.volume.require_writable()
        if inode.direct is not None:
            inode.direct.close()  # a program writes by itself only while nobody else is there
        if writable:
            self.before_change(inode.ino)
            if inode.ino not in self.writers:
                self.versions.shared_maps.forget(inode)
        handle = Handle(self._next_id, inode, access != os.O_WRONLY, writable)
        self._next_id += 1
        self._add(handle)
        try:
            if flags & os.O_TRUNC:
                self._empty(inode, handle)
        except BaseException:
            self._remove(handle)
            raise
        return handle

    def _add(self, handle: Handle) -> None:
        self._handles[handle.id] = handle
        handle.inode.handles += 1
        if handle.writable:
            self.writers.add(handle)

    def _remove(self, handle: Handle) -> None:
        del self._handles[handle.id]
        handle.inode.handles -= 1
        if handle.writable:
            self.writers.remove(handle)

    def _empty(self, inode: Inode, handle: Handle) -> None:
        """What O_TRUNC asks for."""
        if handle.writable:
            self.truncate_to_nothing(inode, handle)
        else:
            self.truncate(inode, 0, None)

    def release(self, handle_id: int) -> None:
        """The last descriptor is gone: settle what the handle left open."""
        handle = self.get(handle_id)
        self.on_release(handle)
        self._remove(handle)
        inode = handle.inode
        if handle.writable and inode.ino not in self.writers:
            inode.note_writes()
            try:
                if not self._is_settled(inode):
                    self._settle(inode, handle)
            except CxlfsError as error:
                self.volume.event("not-published", error.message, ino=inode.ino)
            self.versions.finish(inode)
        self.volume.namespace.reap(inode.ino)

    def is_left_by_killed(self, ino: int) -> bool:
        """All who could write to the file were killed since they last did: RELEASE settles it."""
        return ino in self.writers and all(h.killed for h in self.writers.of(ino))

    def _is_settled(self, inode: Inode) -> bool:
        """The last writer is gone, and left nothing to publish, or what has lost pages."""
        if inode.links == 0 or self.volume.read_only:
            return True
        if self.settle_lost(inode):
            return True
        return not isinstance(inode.version, Version) and not inode.uncommitted

    def settle_lost(self, inode: Inode) -> bool:
        """Decide about a content that has lost a mapped page, as its last writer is gone: the
        committed content comes back, a new file ends before the page.

        Returns:
            False if it has lost none, and the caller decides.

        Raises:
            CxlfsError: as ``Versions.publish``.
        """
        maps = self.versions.shared_maps
        lost = maps.lost_of(inode.ino)
        if lost is None:
            return False
        why = f"a mapped page could not be stored ({lost.error.message})"
        version = inode.version
        if not isinstance(version, Version):
            maps.forget(inode)  # not even the first change was stored
        elif maps.grows(inode.ino):
            self.versions.revert(inode, why)
        elif version.atomic or not self.versions.is_incomplete(inode):
            maps.forget(inode)
            self.versions.revert(inode, why)
        else:
            inode.stop_writes()
            self._cut(inode, version, min(inode.content.size, lost.start))
            self.versions.publish_left(inode, spoiled=True)
            self.volume.event("cut", f"it ends before what is missing: {why}", ino=inode.ino)
        return True

    def _cut(self, inode: Inode, version: Version, size: int) -> None:
        inode.content.truncate(size)
        version.cut(size)
        self.versions.promises.remove(inode, size, layout.FILE_SIZE_MAX)

    def _settle(self, inode: Inode, handle: Handle) -> None:
        """The last writer is gone."""
        failed = self.versions.error_of(inode)
        killed = handle.killed or left_by_killed(inode, handle)
        if is_atomic(inode) and not inode.uncommitted:
            if killed:
                self.versions.revert(inode, "the writer was killed")
                return
            if failed is not None:
                self.versions.revert(inode, f"a write failed ({failed.message})")
                return
            if self.versions.units.is_unwritten_marker(inode):
                self.versions.revert(inode, "nothing was written to it")
                return
        self.versions.publish_left(inode, spoiled=killed or failed is not None)

    def truncate_to_nothing(self, inode: Inode, handle: Handle | None) -> None:
        """O_TRUNC, ftruncate(0), truncate(0): the beginning of an overwrite."""
        others = any(
            h is not handle and is_changing(h) and not h.truncated
            for h in self.writers.of(inode.ino)
        )
        atomic = handle is not None and not others and not self.allow_incomplete_overwrite
        if handle is not None:
            handle.truncated = True
            # What it has written itself and not closed yet is no earlier version worth keeping.
            handle.ordinary = handle.wrote and bool(inode.flags & layout.INODE_INCOMPLETE)
            atomic = atomic and not handle.ordinary
        self.versions.begin_empty(inode, atomic=atomic, now=time.monotonic())
        inode.touch(self.volume.now())

    # --- data -------------------------------------------------------------------------------

    def read(self, handle_id: int, offset: int, length: int) -> bytes | memoryview:
        """Verified bytes, short at the end of file; a memoryview lasts until the next verb.

        Raises BadHandleError, CorruptionError, MediaError (EIO for the reader).
        """
        handle = self.get(handle_id)
        if not handle.readable:
            raise BadHandleError("not open for reading")
        content = handle.inode.content
        try:
            if length >= _PEEK_BYTES_MIN:
                view = content.peek(offset, length, verify=self.verify_reads)
                if view is not None:
                    return view
            return content.read(offset, length, verify=self.verify_reads)
        except (CorruptionError, MediaError) as error:
            self.damaged(handle.inode, error)
            raise

    def damaged(self, inode: Inode, error: CorruptionError | MediaError) -> None:
        """A reader of the file met damage."""
        if isinstance(error, CorruptionError):
            kind, place = "checksum-error", error.media_offset
            self.volume.counters.checksum_errors += 1
        else:
            kind, place = "media-error", error.offset
            self.volume.counters.media_errors += 1
        self.volume.health.seen(inode)
        self.volume.event(kind, error.message, ino=inode.ino, media_offset=place)

    def write(
        self,
        handle_id: int,
        offset: int,
        data: bytes | memoryview,
        *,
        done: int = 0,
        in_steps: bool = False,
    ) -> int:
        """All of ``data``, or an error; on line and byte granularity durable (not published) then.

        ``done`` bytes of it are in the live content already (a data plane wrote them). With
        ``in_steps`` UnfinishedError is raised between two steps of making room.

        Raises BadHandleError, NoSpaceError (the range counts as failed), FileTooLargeError, ...
        """
        handle = self.get(handle_id)
        if not handle.writable:
            raise BadHandleError("not open for writing")
        self.volume.require_writable()
        inode = handle.inode
        length = len(data)
        if offset + length > layout.FILE_SIZE_MAX:
            raise FileTooLargeError("beyond the largest file")
        if length == 0:
            return 0
        version = self.begin_change(handle)
        try:
            version = self._copy_in(handle, version, offset, data, done, in_steps=in_steps)
        except CxlfsError as error:
            self.change_failed(handle, offset, offset + length, error)
            raise
        if version.failed:
            version.repair(offset, offset + length)
        inode.touch(self.volume.now())
        return length

    def begin_change(self, handle: Handle) -> Version:
        """The live content is about to be changed through a writable handle."""
        if handle.inode.first_writer is not None:
            handle.inode.stop_writes()  # who wrote what can be told while it is one alone
        version = self._writing_version(handle.inode, handle)
        handle.wrote = True
        handle.killed = False
        return version

    def change_failed(self, handle: Handle, start: int, end: int, error: CxlfsError) -> None:
        """[start, end) has not got the content that it should have: close will tell."""
        inode = handle.inode
        inode.stop_writes()  # they would not know what they repair
        self._writing_version(inode, handle).fail(start, end, error)
        known = inode.committed.size if inode.committed is not None else 0
        self._failed(inode, error, needed_bytes=max(inode.content.size, end, known))

    def pages_come(self, handle_id: int) -> None:
        """The kernel is about to store mapped pages of the file; more may follow."""
        self.versions.shared_maps.come(self.get(handle_id).inode)

    def pages_lost(self, handle_id: int, start: int, error: CxlfsError) -> None:
        """The kernel could not store mapped pages from ``start`` on, and drops them."""
        inode = self.get(handle_id).inode
        self.versions.shared_maps.lose(inode, start, error)

    def _writing_version(self, inode: Inode, handle: Handle) -> Version:
        atomic = handle.truncated and not handle.ordinary
        if is_atomic(inode) and self.versions.shared_maps.is_unfinished(inode.ino):
            atomic = True  # whichever handle the kernel chooses for the pages
        version = inode.version
        if not isinstance(version, Version) or (version.atomic and not atomic):
            in_place = not atomic and self._is_one_change(handle)
            if not (in_place and isinstance(version, Version)):
                begins = atomic or in_place
                version = self.versions.begin(inode, atomic=begins, now=time.monotonic())
                version.in_place = in_place and version.atomic
        handle.version = version
        return version

    def _is_one_change(self, handle: Handle) -> bool:
        """What the handle changes in place is all there at its close, or not at all."""
        inode = handle.inode
        if handle.truncated or inode.flags & layout.INODE_INCOMPLETE:
            return False
        if self.versions.shared_maps.is_filled(inode):
            return False  # a mapping has no close
        if handle.one_change is None:
            handle.one_change = self.versions.overwrites.is_one_change(inode)
        return handle.one_change

    def _copy_in(
        self,
        handle: Handle,
        version: Version,
        offset: int,
        data: bytes | memoryview,
        done: int,
        *,
        in_steps: bool,
    ) -> Version:
        """Copy the rest of ``data``; returns the version that has it: another one where making room
        has committed what was written before.
        """
        content = handle.inode.content
        while True:
            taken, needed = content.write(offset + done, data, done)
            done += taken
            if done == len(data):
                return version
            if taken == 0:
                where, left = offset + done, len(data) - done
                leased = self._lease(handle, version, needed, where, left, in_steps=in_steps)
                if leased is None:
                    raise UnfinishedError(done)
                version = leased

    def _lease(
        self,
        handle: Handle,
        version: Version,
        needed: int,
        offset: int,
        wanted: int,
        *,
        in_steps: bool,
    ) -> Version | None:
        """Room for a write; None, only with ``in_steps``: more was made, and it is not enough."""
        inode = handle.inode
        steps = 0
        while handle.paid < _STEPS_PAID and self._pay():
            handle.paid += 1
            if in_steps:
                return None
        while True:
            kept = self.versions.promises.bytes_open(inode, offset, offset + wanted)
            try:
                self.versions.leases.give(
                    inode, version, needed_bytes=needed, wanted_bytes=wanted, kept_bytes=kept
                )
            except NoSpaceError:
                if in_steps and steps:
                    return None
                steps += 1
                if not self._reclaim(wanted):
                    raise self.volume.space.shortfall(wanted, kept) from None
                version = self._writing_version(inode, handle)
            else:
                handle.paid = 0
                return version

    def _failed(self, inode: Inode, error: CxlfsError, *, needed_bytes: int) -> None:
        """``needed_bytes``: what the whole file takes as far as it is known."""
        if isinstance(error, NoSpaceError):
            self.volume.counters.no_space_errors += 1
            self.volume.health.refuse(needed_bytes)
            self.volume.event("no-space", error.message, ino=inode.ino)
        elif isinstance(error, CorruptionError):
            self.damaged(inode, error)  # the old bytes around what was written
        elif isinstance(error, MediaError):
            self.volume.counters.media_errors += 1
            self.volume.event(
                "media-error", error.message, ino=inode.ino, media_offset=error.offset
            )
        self.volume.watch(error)

    # --- a data plane that writes by itself ---------------------------------------------------

    def content_of(self, handle_id: int) -> FileMap:
        """The live content behind a handle, for the port of a data plane."""
        return self.get(handle_id).inode.content

    def set_port(self, handle_id: int, port: Port | None) -> None:
        """Where a data plane reads and writes the file of this handle by itself, or None again."""
        inode = self.get(handle_id).inode
        inode.stop_writes()
        inode.port = port

    def may_write_alone(self, handle_id: int) -> bool:
        """Further writes through the handle change nothing but content, size and times."""
        handle = self.get(handle_id)
        version = handle.inode.version
        return (
            handle.wrote
            and not handle.killed
            and isinstance(version, Version)
            and not version.failed
            and not self.volume.read_only
        )

    def expect_write(self, handle_id: int) -> bool:
        """Give a file room that was just made or emptied, and is about to be written by one handle.
        True: the data plane may write there although the store has not seen the handle write.
        """
        handle = self.get(handle_id)
        inode = handle.inode
        version = inode.version
        begins = inode.uncommitted or (handle.truncated and not handle.ordinary)
        if not handle.writable or not begins or inode.handles != 1:
            return False
        if not isinstance(version, Version) or version.failed or version.killed:
            return False
        self.versions.leases.give_spare(inode, version)
        inode.first_writer, handle.version = handle, version
        return True

    def lease_ahead(self, ino: int) -> tuple[int, int] | None:
        """Give a file that is being written the room it will want next, where room is plenty:
        media offset and length, to be populated by whoever has time (``Media.populate``).
        """
        inode = self.versions.open_versions.get(ino)
        if inode is None or not isinstance(inode.version, Version):
            return None
        return self.versions.leases.give_ahead(inode, inode.version)

    # --- truncation -------------------------------------------------------------------------

    def truncate(self, inode: Inode, size: int, handle: Handle | None) -> None:
        """Ftruncate (with a handle: committed at its close) or truncate (committed on return)."""
        self.volume.require_writable()
        if size > layout.FILE_SIZE_MAX:
            raise FileTooLargeError("beyond the largest file")
        if handle is not None and not handle.writable:
            raise InvalidArgumentError("not open for writing")
        if handle is None:
            self.before_change(inode.ino)
        was_open = inode.version is not None
        if size == 0:
            self.truncate_to_nothing(inode, handle)
        else:
            if handle is not None:
                version = self._writing_version(inode, handle)
                handle.wrote = True
            else:
                version = self.versions.begin(inode, atomic=is_atomic(inode), now=time.monotonic())
            self._cut(inode, version, size)
            self.versions.shared_maps.cut(inode, size)
            inode.touch(self.volume.now())
        if handle is None and not was_open and not inode.uncommitted and inode.links:
            self.versions.publish(inode, incomplete=bool(inode.flags & layout.INODE_INCOMPLETE))
            if inode.ino not in self.writers:
                self.versions.finish(inode)

    # --- commit points ----------------------------------------------------------------------

    def flush(
        self,
        handle_id: int,
        *,
        writer_killed: bool,
        still_held: Callable[[], bool] | None = None,
        is_mapped: Callable[[], bool] | None = None,
    ) -> None:
        """A descriptor of the handle was closed: publish durably, unless its writer was killed, or
        still fills the file through a mapping.

        ``still_held``: whether whoever closed it has another descriptor of the file; asked only
        before the first write. ``is_mapped``: see ``SharedMaps.defers``. Raises the error of a
        failed write that was not repaired, or of lost pages; nothing is published then.
        """
        handle = self.get(handle_id)
        if not handle.writable:
            return
        if writer_killed:
            handle.inode.stop_writes()  # whoever writes after this counts as alive
            handle.killed = True
            if isinstance(handle.inode.version, Version) and (handle.wrote or handle.truncated):
                handle.inode.version.killed = True
            return
        handle.inode.note_writes()
        handle.killed = False
        if not handle.wrote and (handle.truncated or handle.inode.uncommitted):
            if still_held is not None and still_held():
                self._redirected(handle)
                return
            handle.ordinary = handle.truncated
        shared_maps = self.versions.shared_maps
        self._publish_checked(handle, defers=lambda: shared_maps.defers(handle.inode, is_mapped))
        if handle.redirected:  # one of several programs has ended, and what was before is gone
            handle.ordinary = True

    def _redirected(self, handle: Handle) -> None:
        """A copy of a descriptor was closed before the first write, and another is left: so a shell
        begins ``program > file``. Nothing is over; the old content stays until something is.
        """
        version = handle.inode.version
        handle.redirected = True
        if isinstance(version, Version) and version.atomic:
            version.redirection = handle
            version.redirected_monotonic = version.began_monotonic

    def fsync(self, handle_id: int) -> None:
        """Publish durably; raises as flush."""
        handle = self.get(handle_id)
        if not handle.writable:
            self.volume.fence() if not self.volume.read_only else None
            return
        handle.inode.note_writes()
        self._publish_checked(handle)

    def _publish_checked(
        self, handle: Handle, *, defers: Callable[[], bool] = lambda: False
    ) -> None:
        inode = handle.inode
        error = self.versions.error_of(inode)
        if error is not None:
            raise error
        if not inode.links or left_by_killed(inode, handle) or defers():
            return
        if not is_atomic(inode) or not self.versions.units.is_unwritten_marker(inode):
            self.versions.publish(inode, incomplete=False)

    @property
    def open_count(self) -> int:
        return len(self._handles)

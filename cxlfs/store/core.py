"""The store: the one object all above talk to. POSIX-like verbs, each one transaction.

Never here: logic; every verb belongs to ``names``, ``files``, ``versions``, ``cleaner``.

Invariants
- Synchronous: a verb runs to completion; callers come from one thread.
- Raises errors of ``cxlfs.errors`` only.
- Nothing is changed on a store that is read-only, whatever made it so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cxlfs.errors import (
    CxlfsError,
    InvalidArgumentError,
    NotFoundError,
)
from cxlfs.store.attributes import InodeAttributes
from cxlfs.store.cleaner import Cleaner
from cxlfs.store.commits import COMMITS_PER_STEP, Commits
from cxlfs.store.deduplicator import Deduplicator
from cxlfs.store.defragmenter import Defragmenter
from cxlfs.store.direct import Direct
from cxlfs.store.directories import Directories, DirectoryEntry
from cxlfs.store.events import StoreEvent
from cxlfs.store.files import Files
from cxlfs.store.health import Health
from cxlfs.store.hidden import require_shown
from cxlfs.store.making import format_store
from cxlfs.store.names import Names
from cxlfs.store.namespace import Attributes, FileKind
from cxlfs.store.options import StoreOptions
from cxlfs.store.overwrites import Overwrites
from cxlfs.store.past_restore import PastVerbs
from cxlfs.store.past_space import PastSpace
from cxlfs.store.past_state import Moments, PastState
from cxlfs.store.past_trees import PastTrees
from cxlfs.store.paths import path_of
from cxlfs.store.pins import Pins
from cxlfs.store.ranges import Ranges
from cxlfs.store.recovery import RecoveryReport, open_volume
from cxlfs.store.report import CheckpointEntry, Reporter, SpaceReport, StoreStatistics
from cxlfs.store.room import Room
from cxlfs.store.unit_aside import Aside
from cxlfs.store.units import Units
from cxlfs.store.version import Version
from cxlfs.store.versions import Versions
from cxlfs.store.volume import Volume
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.errors import MediaError
    from cxlfs.media import Media

log = logging.getLogger(__name__)


class Store:
    """An open store; make it with :meth:`open`, end it with :meth:`close`."""

    format = staticmethod(format_store)

    def __init__(
        self, media: Media, volume: Volume, recovery: RecoveryReport, options: StoreOptions
    ) -> None:
        self.media = media
        self.volume = volume
        self.recovery = recovery
        self.options = options
        self.superblock = volume.superblock
        self.namespace = volume.namespace
        self.versions = Versions(volume, history=options.history)
        self.past = self.versions.past
        self.overwrites = Overwrites(volume, self.versions, options.torn)
        self.versions.overwrites = self.overwrites
        self.commits = Commits(self.versions, self.options.commit_interval_s)
        self.room = room = Room(volume, self.versions, self.commits)
        self.cleaner = Cleaner(volume, self.versions, room, PastSpace(volume, self.past))
        self.defragmenter = Defragmenter(volume, self.cleaner.mover, room)
        self.deduplicator = Deduplicator(volume, self.cleaner.mover, is_on=options.dedup)
        self.files = Files(
            volume,
            self.versions,
            verify_reads=options.verify_reads,
            reclaim=self.cleaner.reclaim,
            pay=self.cleaner.pay,
        )
        self.files.allow_incomplete_overwrite = options.allow_incomplete_overwrite
        self.aside = aside = Aside(volume)
        self.names = Names(volume, self.versions, aside, reclaim=self.cleaner.reclaim)
        require_room = self.names.require_metadata_room
        self.units = Units(
            volume, self.versions, aside, mode=options.units, require_room=require_room
        )
        self.units.open_for_writing = self.files.writers
        self.history = PastVerbs(volume, self.versions, self.names)
        self.versions.units = self.units
        self.overwrites.take_away = self.names.take_away
        self.overwrites.is_open = self.files.writers.__contains__
        self.overwrites.unit_of = self.units.unit_of
        self.overwrites.settle_units = self.units.settle
        self.units.torn = self.overwrites.torn
        room.units, room.drop_removed = self.units.garbage, self.units.drop_removed
        self.pins = pins = Pins(volume, self.versions, self.names)
        self.trees = PastTrees(self.history, pins, self.units)
        self.past.home_of = lambda ino: 0 if pins.holds(ino) else aside.home_of(ino)
        self.moments = Moments(volume, self.past)
        self.attributes = InodeAttributes(
            volume,
            self.files.damaged,
            require_room=require_room,
            restore=self.overwrites.restore,
        )
        self.reporter = Reporter(volume, self.versions, recovery, self.units)
        self.ranges = Ranges(
            volume, self.versions, self.files, self.reporter, room, reclaim=self.cleaner.reclaim
        )
        self.direct = Direct(volume, self.versions, self.files)
        room.close_slips = self.versions.sharing.close_slips = self.direct.close_all
        self.directories = Directories(volume.namespace)
        self._closed = False
        self._fenced_monotonic = 0.0

    @classmethod
    def open(cls, media: Media, options: StoreOptions | None = None) -> Store:
        """Open and recover. See recovery.open_volume for what it raises."""
        options = options if options is not None else StoreOptions()
        volume, report, history = open_volume(
            media, read_only=options.read_only, history=options.history
        )
        try:
            store = cls(media, volume, report, options)
            store.past.adopt(history.rows, history.segments)
            volume.require_counts()
            report.note_open_units(store.units.recover())
            store.pins.recover()
        except BaseException:
            volume.engine.close()
            raise
        return store

    # --- state ------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return self.volume.read_only

    @property
    def read_only_reason(self) -> str | None:
        return self.volume.read_only_reason

    @property
    def health(self) -> Health:
        """What is remembered of damage, of the last verify and of refused writes."""
        return self.volume.health

    @property
    def on_event(self) -> Callable[[StoreEvent], None] | None:
        return self.volume.events.listener

    @on_event.setter
    def on_event(self, listener: Callable[[StoreEvent], None] | None) -> None:
        self.volume.events.listener = listener

    def stop_writing(self, reason: str) -> None:
        """Refuse every change from now on; reads go on."""
        self.volume.stop_writing(reason)

    def media_failed(self, error: MediaError) -> None:
        """A data plane that writes by itself met ``error``: no write is sure to be durable now."""
        self.volume.media_failed(error)

    def close(self) -> None:
        """Settle what is open, roll over, mark the store as not in use. Idempotent.

        The media stays open. Raises MediaError, NoSpaceError; the store can be recovered then.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.direct.close_all()
            if not self.read_only:
                self.units.finish()
                self.settle_all()
                self.overwrites.finish()
                self.past.closing()
                self.past.archive.finish()
            self.past.forget_all()
            if not self.read_only:
                self.room.drop_all_discarded()  # else the image would name what nobody has
                self.volume.close_cleanly()
        finally:
            self.volume.events.end_all()
            self.direct.abandon()
            self.volume.engine.close()

    def settle_all(self) -> None:
        """Publish what is open and changed, or keep it aside, as closing does."""
        for inode in list(self.versions.open_versions.values()):
            version = inode.version
            if inode.links == 0 or not isinstance(version, Version):
                continue
            try:
                if self.files.settle_lost(inode):
                    continue
                if version.atomic and not inode.uncommitted:
                    if inode.held is None:  # else its place is taken by the version before
                        self.versions.stage(inode)
                else:
                    incomplete = self.versions.is_incomplete(inode)
                    self.versions.publish(inode, incomplete=incomplete)
            except CxlfsError as error:
                self.volume.event("not-published", error.message, ino=inode.ino)

    def abandon(self) -> None:
        """Let go without writing anything, as a kill would; for tests and hopeless media."""
        if not self._closed:
            self._closed = True
            self.direct.abandon()
            self.volume.engine.close()

    # --- namespace --------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> Attributes:
        """Raises NotFoundError, NotDirectoryError, NameTooLongError."""
        return self.names.find(parent, name).attributes()

    def get_attributes(self, ino: int) -> Attributes:
        return self.namespace.get(ino).attributes()

    def set_attributes(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        ctime_ns: int | None = None,
        handle: int | None = None,
    ) -> Attributes:
        """Change attributes: committed on return, but for ``size`` with a handle (at its close)."""
        inode = self.namespace.get(ino)
        inode.note_writes()  # before times are set: they came first
        if size is not None:
            if inode.live is None:
                raise InvalidArgumentError("only files have a size")
            opened = self.files.get(handle) if handle is not None else None
            self.files.truncate(inode, size, opened)
        if any(v is not None for v in (mode, uid, gid, atime_ns, mtime_ns, ctime_ns)):
            self.attributes.set_attributes(
                inode,
                mode=mode,
                uid=uid,
                gid=gid,
                atime_ns=atime_ns,
                mtime_ns=mtime_ns,
                ctime_ns=ctime_ns,
            )
        return inode.attributes()

    def make_directory(self, parent: int, name: bytes, mode: int, uid: int, gid: int) -> Attributes:
        mode = 0o040000 | (mode & 0o7777)
        return self.names.make(parent, name, mode, uid, gid, rdev=0, target=b"").attributes()

    def make_node(
        self, parent: int, name: bytes, mode: int, rdev: int, uid: int, gid: int
    ) -> Attributes:
        """A special file, or an empty regular one; ``mode`` with its type bits."""
        if mode & 0o170000 == 0o040000 or mode & 0o170000 == 0o120000:
            raise InvalidArgumentError("not a node")
        if mode & 0o170000 == 0:
            mode |= 0o100000
        return self.names.make(parent, name, mode, uid, gid, rdev=rdev, target=b"").attributes()

    def make_symlink(
        self, parent: int, name: bytes, target: bytes, uid: int, gid: int
    ) -> Attributes:
        return self.names.make(parent, name, 0o120777, uid, gid, rdev=0, target=target).attributes()

    def read_symlink(self, ino: int) -> bytes:
        inode = self.namespace.get(ino)
        if inode.kind is not FileKind.SYMLINK:
            raise InvalidArgumentError("not a symbolic link")
        return inode.target

    def remove_directory(self, parent: int, name: bytes) -> None:
        self.names.remove_directory(parent, name)

    def unlink(self, parent: int, name: bytes) -> None:
        self.names.unlink(parent, name)

    def link(self, ino: int, new_parent: int, new_name: bytes) -> Attributes:
        inode = self.names.link(ino, new_parent, new_name)
        self.units.settle_pending()
        return inode.attributes()

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        *,
        exchange: bool = False,
        no_replace: bool = False,
    ) -> None:
        self.names.rename(
            parent, name, new_parent, new_name, exchange=exchange, no_replace=no_replace
        )
        self.units.settle_pending()

    def get_xattr(self, ino: int, name: bytes, *, in_steps: bool = False) -> bytes:
        return self.attributes.get_xattr(self.namespace.get(ino), name, in_steps=in_steps)

    def set_xattr(
        self, ino: int, name: bytes, value: bytes, *, create: bool = False, replace: bool = False
    ) -> None:
        self.attributes.set_xattr(
            self.namespace.get(ino), name, bytes(value), create=create, replace=replace
        )

    def list_xattrs(self, ino: int) -> list[bytes]:
        return self.attributes.list_xattrs(self.namespace.get(ino))

    def remove_xattr(self, ino: int, name: bytes) -> None:
        self.attributes.remove_xattr(self.namespace.get(ino), name)

    # --- directories ------------------------------------------------------------------------

    def open_directory(self, ino: int) -> int:
        """A listing of the directory; raises NotFoundError, NotDirectoryError."""
        return self.directories.open(ino)

    def read_directory(self, handle: int, cookie: int) -> Iterator[DirectoryEntry]:
        """See :meth:`Directories.read`."""
        return self.directories.read(handle, cookie)

    def release_directory(self, handle: int) -> None:
        self.directories.release(handle)

    # --- files ------------------------------------------------------------------------------

    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, flags: int
    ) -> tuple[Attributes, int]:
        appends = _appends(flags)
        inode = self.names.create(parent, name, mode, uid, gid, appends=appends)
        self.units.opening(inode, appends=appends)
        if not (appends or flags & os.O_EXCL):  # a log, or a name that is claimed
            self.overwrites.creating(inode)
        handle = self.files.open(inode, flags & ~os.O_TRUNC)
        return inode.attributes(), handle.id

    def open_file(self, ino: int, flags: int) -> int:
        inode = self.namespace.get(ino)
        if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC:
            self.overwrites.wanted_as_it_is(inode)
        self.units.opening(inode, appends=_appends(flags))
        return self.files.open(inode, flags).id

    def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        return self.files.read(handle, offset, length)

    def write(
        self,
        handle: int,
        offset: int,
        data: bytes | memoryview,
        *,
        done: int = 0,
        in_steps: bool = False,
    ) -> int:
        return self.files.write(handle, offset, data, done=done, in_steps=in_steps)

    def flush(
        self,
        handle: int,
        *,
        writer_killed: bool,
        still_held: Callable[[], bool] | None = None,
        is_mapped: Callable[[], bool] | None = None,
    ) -> None:
        self.files.flush(
            handle, writer_killed=writer_killed, still_held=still_held, is_mapped=is_mapped
        )
        closed = self.files.get(handle)
        deferred = self.versions.shared_maps.is_unfinished(closed.inode.ino)
        if closed.writable and not writer_killed and not deferred and self.units.active:
            self.units.closed(closed.inode)
        self.units.settle_pending()

    def fsync(self, handle: int, *, data_only: bool = False) -> None:
        """Durable publication; ``data_only`` saves nothing here: size and data are one record."""
        del data_only
        self.overwrites.wanted_as_it_is(self.files.get(handle).inode)
        self.files.fsync(handle)
        self.units.settle_pending()

    def fsync_directory(self, ino: int) -> None:
        self.namespace.directory(ino)
        if not self.read_only:
            self.volume.fence()

    def release(self, handle: int) -> None:
        """The last descriptor and the last mapping are gone."""
        opened = self.files.get(handle)
        deferred = self.versions.shared_maps.is_unfinished(opened.inode.ino)
        self.files.release(handle)
        if deferred and not opened.killed and self.units.active and opened.inode.version is None:
            self.units.closed(opened.inode)
            self.units.settle_pending()

    def allocate(
        self,
        handle: int,
        offset: int,
        length: int,
        *,
        keep_size: bool = False,
        punch: bool = False,
        zero: bool = False,
    ) -> None:
        """fallocate(2); a change of the content like a write. See :meth:`Ranges.allocate`."""
        self.ranges.allocate(handle, offset, length, keep_size=keep_size, punch=punch, zero=zero)

    def seek(self, handle: int, offset: int, whence: int) -> int:
        return self.ranges.seek(handle, offset, whence)

    # --- lifetime ---------------------------------------------------------------------------

    def pin(self, ino: int) -> None:
        """The kernel knows the inode: it outlives its last name."""
        self.namespace.get(ino).pins += 1

    def unpin(self, ino: int) -> None:
        inode = self.namespace.get(ino)
        if inode.pins < 1:
            raise InvalidArgumentError("the inode is not pinned")
        inode.pins -= 1
        self.namespace.reap(ino)

    # --- whole store ------------------------------------------------------------------------

    def sync(self) -> None:
        """syncfs(2): everything that is open and changed is made durable as the periodic commit
        would do it, and everything committed so far is. Raises the first error, after trying all.
        """
        try:
            self.commits.commit_all()
        finally:
            self.volume.fence()

    def statfs(self) -> SpaceReport:
        return self.reporter.space()

    def statistics(self) -> StoreStatistics:
        return self.reporter.statistics(self.files.open_count)

    def maintain(self, now_monotonic: float, *, apart: bool = False) -> bool:
        """One short piece of background work; True when there is more to do soon. ``apart``: some
        of it is left to :meth:`maintain_apart`, which the caller calls next.
        """
        self.volume.events.maintain()
        if self.read_only:
            return self.room.drop_discarded()
        interval = self.options.commit_interval_s
        self.health.maintain(now_monotonic, lambda: self.statfs().free_bytes)
        worked = self.commits.commit_old(
            older_than=now_monotonic - interval, count=COMMITS_PER_STEP
        )
        if now_monotonic - self._fenced_monotonic >= interval:
            self._fenced_monotonic = now_monotonic
            self.volume.fence()
        worked = self.overwrites.settle() or self.past.archive.step(now_monotonic) or worked
        worked = self.units.maintain() or self.direct.maintain() or worked
        worked = self.pins.step() or worked
        rolling = self.volume.rollovers.step(apart=apart)
        worked = self.cleaner.step() or self.defragmenter.step(now_monotonic) or worked
        worked = self.deduplicator.step(now_monotonic) or worked
        return rolling or worked

    def maintain_apart(self) -> bool:
        """Background work that needs no lock of other verbs; True when there was some."""
        return self.volume.rollovers.step_apart()

    def state_at(self, commit: int) -> PastState:
        """The store as it was when that commit was the last one."""
        return PastState(self.volume, self.past, commit)

    def path_of(self, ino: int) -> bytes | None:
        return path_of(self.namespace, ino)

    def list_checkpoints(self, path: bytes = b"/") -> Iterator[CheckpointEntry]:
        """One entry for each name in a directory, or for a file; raises NotFoundError."""
        inode = self.namespace.get(ROOT_INO)
        for part in path.split(b"/"):
            if part:
                require_shown(inode.ino, part)
                found = self.namespace.find(inode.ino, part)
                if found is None:
                    raise NotFoundError(f"no such path: {os.fsdecode(path)}")
                inode = found
        return self.reporter.checkpoints(inode, b"/" + path.strip(b"/"), self.files.writers.inos())


def _appends(flags: int) -> bool:
    """The file is opened to write on at its end, as a log is."""
    return bool(flags & os.O_APPEND) and not flags & os.O_TRUNC

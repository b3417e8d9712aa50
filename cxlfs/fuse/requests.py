"""What the kernel's requests mean in terms of the store, whoever carries them.

Never here: pyfuse3, the kernel's byte layout (``operations`` and ``direct`` have those), errno
values (``boundary``), anything that awaits.

Invariants
- ``lock`` is held by the caller of every method, and by whoever else uses the store meanwhile.
- One request is one verb of the store, plus bookkeeping of what the kernel knows.
- A lookup count is raised before the reply that tells the kernel of the inode.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Hashable, Iterable

from cxlfs.errors import (
    BusyError,
    CxlfsError,
    ExistsError,
    InvalidArgumentError,
    NameTooLongError,
    NoAttributeError,
    NotFoundError,
    UnsupportedOperationError,
)
from cxlfs.fuse import kernel
from cxlfs.fuse.absences import Absences
from cxlfs.fuse.attributes import CACHE_SECONDS
from cxlfs.fuse.boundary import Failures
from cxlfs.fuse.data_plane import DataPlane, HandlersOnly
from cxlfs.fuse.direct_access import DirectAccess
from cxlfs.fuse.endings import Endings
from cxlfs.fuse.handles import Caller, LookupCounts, Opened, OpenFile, OpenFiles
from cxlfs.fuse.mappings import Mappings
from cxlfs.fuse.page_cache import PageCache
from cxlfs.fuse.past_view import PastView
from cxlfs.fuse.privileges import Privileges
from cxlfs.fuse.processes import Process, ProcessTable
from cxlfs.fuse.readers import Readers
from cxlfs.fuse.releases import Releases
from cxlfs.fuse.returned import Returned
from cxlfs.fuse.undo import Undo
from cxlfs.store import Store, StoreEvent, UnfinishedError
from cxlfs.store.namespace import Attributes
from cxlfs.store.unit_rules import Ending

NAME_BYTES_MAX = 255
_CONTINUING = frozenset(
    {b"curl", b"wget", b"aria2c", b"rsync", b"axel", b"git-lfs", b"hf", b"huggingface-cli"}
)
"""Programs that leave a torn file on purpose, to continue it at their next start."""
_COPYING = _CONTINUING | {
    *(b"cp", b"mv", b"install", b"ln", b"mkdir", b"dd", b"cat", b"tee", b"scp", b"sftp-server"),
    *(b"tar", b"bsdtar", b"cpio", b"unzip", b"7z", b"sh", b"bash", b"dash", b"zsh", b"fish"),
    *(b"aws", b"gsutil", b"gcloud", b"azcopy", b"rclone", b"s3cmd", b"s5cmd", b"mc", b"git"),
    *(b"smbd", b"nfsd", b"cxlfs", b"split", b"csplit", b"head", b"tail", b"truncate"),
}
"""Programs that make files of what others have written, and perhaps not of all of it."""
_KILLED = frozenset({Ending.KILLED, Ending.INTERRUPTED})


class Requests:
    """State and meaning; see the module."""

    def __init__(
        self,
        store: Store,
        *,
        processes: ProcessTable | None = None,
        data_plane: DataPlane | None = None,
    ) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.data_plane = data_plane if data_plane is not None else HandlersOnly()
        self.failures = Failures(store)
        self.lookups = LookupCounts(store)
        self.files = OpenFiles()
        self.page_cache = PageCache(self.files, self.data_plane)
        self.past = PastView(store)
        self._processes = processes if processes is not None else ProcessTable()
        self.privileges = Privileges(store, self.files, self._processes, self.page_cache)
        self.caller = 0
        """The thread whose request is being served; 0: not known."""
        self.user: int | None = None
        """Whose request it is; None: not known."""
        self.visitor: int | None = None
        """While set, this process alone uses names."""
        self.pause: Callable[[], Awaitable[None]] = _no_pause
        """Between two steps of a request; who runs the event loop sets it."""
        self._writing: Process | None = None
        """Of the file that is being written, while it is: whom a request without a caller is by."""
        self.endings = Endings(self._processes)
        self.readers = Readers(store, self._processes)
        self.releases = Releases(store)
        self._mappings = Mappings(self._processes)
        self.returned = Returned()
        self.absences = Absences(store, self.data_plane, self.returned)
        self.direct_access = DirectAccess(
            store, self.files, self._processes, self.page_cache, self._concerned_by_writes
        )
        store.units.writer = store.overwrites.writer = self._writer
        store.units.user = lambda: self.user
        store.units.ending_of = store.overwrites.ending_of = self._ending_of
        store.units.copies_files = lambda writer: self._command(writer) in _COPYING
        store.overwrites.copies_files = store.units.copies_files
        store.units.savers.program = self._command_line
        store.overwrites.name_ended = self._name_ended
        store.overwrites.is_exempt = lambda writer: self._command(writer) in _CONTINUING
        store.units.returns.name_changed = self.page_cache.name_changed
        store.units.returns.content_changed = self.page_cache.content_replaced
        store.units.returns.gone = self.returned.gone
        store.history.changed = self.page_cache.name_changed
        store.history.is_telling = self.page_cache.is_invalidating
        self._directories: dict[int, int] = {}

    def on_store_event(self, event: StoreEvent) -> None:
        """The store says that it did something by itself; the kernel is told of new contents."""
        if event.kind in {"reverted", "restored", "cut"} and event.ino is not None:
            self.page_cache.content_replaced(event.ino)

    def admit(self) -> None:
        """Nobody but the first visitor uses names while it is there. What is open is served: the
        visitor opened it. Raises BusyError: to let others wait would stop the visitor, too, as the
        kernel holds the directory's lock while it asks for a name in it.
        """
        if self.visitor is not None and self.caller:
            process = self._processes.identify(self.caller)
            if process is None or process.tgid != self.visitor:
                raise BusyError("unfinished checkpoints are being set aside")

    # --- checkpoint units -------------------------------------------------------------------

    def _writer(self) -> Process | None:
        """Who is making the present request, from now on watched."""
        process = self._processes.identify(self.caller) or self._writing
        if process is not None:
            self._watch(process)
        return process

    def _watch(self, process: Process) -> None:
        if not self.endings.is_watched(process):
            if self.endings.are_many:
                wanted = self.store.units.opened.writers() | self.store.overwrites.writers()
                self.endings.keep_only(wanted)
            self.endings.watch(process)

    def _ending_of(self, writer: Hashable) -> Ending:
        return self.endings.of(writer) if isinstance(writer, Process) else Ending.UNKNOWN

    def _command(self, writer: Hashable) -> bytes:
        return self._processes.command(writer) if isinstance(writer, Process) else b""

    def _command_line(self, writer: Hashable) -> bytes:
        return self._processes.command_line(writer) if isinstance(writer, Process) else b""

    def name_seconds(self, ino: int) -> int:
        """How long the kernel may remember a name of an inode: not where it may go by itself."""
        return 0 if self.store.overwrites.is_new(ino) else CACHE_SECONDS

    def _name_ended(self, parent: int, name: bytes, ino: int) -> None:
        self.page_cache.name_changed(parent, name)
        self.returned.gone({ino})

    def _wait_for_judge(self, ino: int, *, reads: bool = False) -> None:
        """A process that comes after the writer of a torn file meets the version before. Raises
        UnfinishedError while it is not known whether the file is torn, and while the kernel has
        pages of what the store has replaced, and StaleError where a new file has lost its name.
        """
        if self.store.overwrites.has_any:
            if self.store.overwrites.wait_for(ino, opens=reads):
                raise UnfinishedError
            self.returned.check(ino, self.caller)
        if self.page_cache.is_replacing(ino):
            raise UnfinishedError

    def before_finding(self, ino: int) -> None:
        """Whoever opens by name must not find what a program that is gone has left unfinished.
        Raises as :meth:`before_listing`. Writers of what is open need not ask: they live.
        """
        if not (opened := self.store.units.opened):
            self.returned.check(ino, self.caller)
        elif not opened.has_writer(self._processes.identify(self.caller)):
            self.before_listing(ino)

    def before_listing(self, ino: int) -> None:
        """The same for whoever lists a directory. The kernel came to the inode by names that it
        remembers: where it has just gone back they lead elsewhere. Raises StaleError then.
        """
        units = self.store.units
        if units.has_open and not self.store.read_only:
            units.settle()
        if self.store.overwrites.has_any and self.store.overwrites.wait_below(ino):
            raise UnfinishedError
        self.returned.check(ino, self.caller)

    # --- names ------------------------------------------------------------------------------

    def find(self, parent: int, name: bytes) -> Attributes | None:
        """What the kernel will know from now on; it may remember an absence, too."""
        self.admit()
        check_name(name)
        self.before_finding(parent)
        if self.store.aside.is_place(parent, name):
            raise NotFoundError("the store keeps it for itself")
        inode = self.store.namespace.find(parent, name)
        if inode is None:
            if self.store.units.opened.removed_at(parent, name) is not None:
                raise NotFoundError("it may come back at any time")
            return None
        self.releases.wait_for(inode.ino)
        self._wait_for_judge(inode.ino)
        self.lookups.remember(inode.ino)
        return inode.attributes()

    def forget_all(self, inode_list: Iterable[tuple[int, int]]) -> None:
        """The kernel gives back so many references to each inode."""
        for ino, lookups in inode_list:
            if self.lookups.forget(ino, lookups):
                self.page_cache.forgotten(ino)
                self.direct_access.forgotten(ino)
                self.privileges.forgotten(ino)

    def remove(self, parent: int, name: bytes) -> None:
        self.admit()
        check_name(name)
        self.store.unlink(parent, name)

    def move(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        self.admit()
        check_name(name)
        check_name(new_name)
        if flags not in (0, kernel.RENAME_EXCHANGE, kernel.RENAME_NOREPLACE):
            raise InvalidArgumentError(f"rename flags not supported: {flags:#x}")
        self.releases.wait_for_name(parent, name)
        self.store.rename(
            parent,
            name,
            new_parent,
            new_name,
            exchange=bool(flags & kernel.RENAME_EXCHANGE),
            no_replace=bool(flags & kernel.RENAME_NOREPLACE),
        )
        if self.visitor is None:
            self.absences.renamed(parent, name)

    def xattr(self, ino: int, name: bytes) -> bytes:
        """The value. Raises NoAttributeError, UnfinishedError (see ``InodeAttributes``)."""
        if name.startswith(b"system."):
            raise NoAttributeError("no attributes of the system namespace")
        if name.startswith(b"user."):  # others are asked for by the kernel, for a write
            self.releases.wait_for(ino)
        return self.store.get_xattr(ino, name, in_steps=True)

    # --- files ------------------------------------------------------------------------------

    def create_file(
        self, parent: int, name: bytes, mode: int, flags: int, caller: Caller
    ) -> tuple[Attributes, Opened]:
        """Make and open a file, or open the one there is; the kernel knows it from now on.

        Whatever is raised, here and by :meth:`open_file`: no handle, no lookup count and no new
        file is left behind, and what O_TRUNC emptied is as it was.
        """
        self.admit()
        check_name(name)
        self.before_finding(parent)
        with Undo() as undo:
            try:
                attributes, handle = self.store.create(
                    parent, name, mode, caller.uid, caller.gid, flags
                )
            except ExistsError:
                if flags & os.O_EXCL:
                    raise
                attributes = self.store.lookup(parent, name)
                self.releases.wait_for(attributes.ino)
                self._wait_for_judge(attributes.ino, reads=flags & os.O_ACCMODE == os.O_RDONLY)
                handle = self._open(attributes.ino, flags)
                undo.note(self._give_up, handle)
            else:
                undo.note(self._give_up, handle)
                undo.note(self._unmake, parent, name)
            self.lookups.remember(attributes.ino)
            undo.note(self.forget_all, [(attributes.ino, 1)])
            opened = self._opened(attributes, handle, flags, caller, undo)
        return attributes, opened

    def open_file(self, ino: int, flags: int, caller: Caller) -> Opened:
        self.admit()
        self.before_finding(ino)
        self.releases.wait_for(ino)
        self._wait_for_judge(ino, reads=flags & os.O_ACCMODE == os.O_RDONLY)
        with Undo() as undo:
            attributes = self.store.get_attributes(ino)
            handle = self._open(ino, flags)
            undo.note(self._give_up, handle)
            return self._opened(attributes, handle, flags, caller, undo)

    def _give_up(self, handle: int) -> None:
        """Release a handle that nobody was told of, as if its opener had been killed."""
        self.store.flush(handle, writer_killed=True)
        self.store.release(handle)

    def _unmake(self, parent: int, name: bytes) -> None:
        # A store that stopped writing keeps the name until it is closed; it is committed nowhere.
        with contextlib.suppress(CxlfsError, UnfinishedError):
            self.store.unlink(parent, name)

    def _opened(
        self,
        attributes: Attributes,
        handle: int,
        flags: int,
        caller: Caller,
        undo: Undo,
    ) -> Opened:
        """Book an open file, and decide how the kernel uses its page cache for it; what it did is
        put on ``undo``.
        """
        ino = attributes.ino
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        direct = self.page_cache.is_direct(flags)
        opener = self._processes.identify(caller.tid) if writable else None
        self.files.add(
            handle,
            OpenFile(
                ino=ino,
                writable=writable,
                direct=direct,
                appends=bool(flags & os.O_APPEND),
                opener=opener,
                may_keep_set_id=caller.uid == 0,
                uid=caller.uid,
                gid=caller.gid,
            ),
        )
        undo.note(self.files.remove, handle)
        self.data_plane.opened(handle, ino, readable=flags & os.O_ACCMODE != os.O_WRONLY)
        undo.note(self.data_plane.released, handle, ino)
        if not direct:
            self.store.namespace.get(ino).stop_writes()  # from here on they concern cached pages
        if not writable:
            self.readers.opened(caller.tid, ino, attributes.size, flags)
        if writable or flags & os.O_TRUNC:
            self.privileges.opened(attributes, caller, emptied=bool(flags & os.O_TRUNC))
        if self.data_plane.writes_past_store and self._may_begin_alone(handle):
            self.data_plane.allow_writes(handle, caller.tid)
        keep_cache = self.page_cache.keep_at_open(ino, direct=direct)
        return Opened(handle, direct, keep_cache, writable)

    def write_by(
        self,
        tid: int,
        handle: int,
        offset: int,
        data: bytes | memoryview,
        *,
        done: int = 0,
        in_steps: bool = False,
        is_write_back: bool = False,
    ) -> int:
        """A write of the thread ``tid`` (0: not known), of which ``done`` bytes are written.

        ``in_steps``: see ``Files.write``. ``is_write_back``: the kernel writes mapped pages back,
        and drops them if that fails. Raises UnfinishedError.
        """
        try:
            file = self._prepare(handle, done)
            self._writing = file.opener
            if is_write_back:
                self.store.files.pages_come(handle)
            written = self.store.write(handle, offset, data, done=done, in_steps=in_steps)
        except CxlfsError as error:
            if is_write_back and handle in self.files:
                self.store.files.pages_lost(handle, offset, error)
            raise
        finally:
            self._writing = None
        writer = self._processes.identify(tid)
        if writer is not None:
            file.note_writer(writer, self._processes.is_alive)
        self._content_changed(file)
        if self.data_plane.writes_past_store and self._may_write_alone(handle, file):
            self.data_plane.allow_writes(handle, tid)
            self.store.files.lease_ahead(file.ino)
        return written

    def prepare_change(self, ino: int, done: int = 0, *, emptied: bool = False) -> None:
        """Raises UnfinishedError where more than a short step comes first."""
        if self.store.versions.prepare_change(ino, emptied=emptied):
            raise UnfinishedError(done)

    def _open(self, ino: int, flags: int) -> int:
        self.direct_access.before_opening(ino, self.caller)
        if flags & os.O_TRUNC:
            self.prepare_change(ino, emptied=True)
        return self.store.open_file(ino, flags)

    def _prepare(self, handle: int, done: int = 0) -> OpenFile:
        """The same for a file that may be written through ``handle``."""
        if (file := self.files.get(handle)).writable:
            self.user = file.uid
            self.prepare_change(file.ino, done)
        return file

    def _may_write_alone(self, handle: int, file: OpenFile) -> bool:
        """Nobody here needs to know of further writes by the thread that wrote last."""
        return not self._concerned_by_writes(file) and self.store.files.may_write_alone(handle)

    def _may_begin_alone(self, handle: int) -> bool:
        """Nor of the first ones by the thread that has just opened this file, to write it anew."""
        file = self.files.get(handle)
        if self._concerned_by_writes(file) or not self.store.files.expect_write(handle):
            return False
        if file.direct:
            self.page_cache.written_directly(file.ino)
        return True

    def _concerned_by_writes(self, file: OpenFile) -> bool:
        concerns_cache = file.direct and self.files.has_cached(file.ino)
        concerns_end = file.appends and self.direct_access.has_grown(file.ino)
        return concerns_cache or concerns_end or self.privileges.are_lost_by(file)

    def allocate(self, handle: int, offset: int, length: int, mode: int) -> None:
        """fallocate(2), with its mode bits."""
        if mode & ~(kernel.FALLOC_KEEP_SIZE | kernel.FALLOC_PUNCH_HOLE | kernel.FALLOC_ZERO_RANGE):
            raise UnsupportedOperationError(f"fallocate mode not supported: {mode:#x}")
        self._prepare(handle)
        self.store.ranges.allocate(
            handle,
            offset,
            length,
            keep_size=bool(mode & kernel.FALLOC_KEEP_SIZE),
            punch=bool(mode & kernel.FALLOC_PUNCH_HOLE),
            zero=bool(mode & kernel.FALLOC_ZERO_RANGE),
            in_steps=True,
        )
        self._content_changed(self.files.get(handle))

    def copy_range(
        self, handle_in: int, offset_in: int, handle_out: int, offset_out: int, length: int
    ) -> int:
        """copy_file_range(2)."""
        self._prepare(handle_out)
        copied = self.store.ranges.copy(
            handle_in, offset_in, handle_out, offset_out, length, in_steps=True
        )
        self._content_changed(self.files.get(handle_out))
        return copied

    def _content_changed(self, file: OpenFile) -> None:
        if file.direct:
            self.page_cache.written_directly(file.ino)
        self.privileges.written(file)

    def flush_by(self, tid: int, handle: int) -> None:
        """A descriptor was closed by the thread ``tid``. A process that neither opened the file nor
        wrote to it decides nothing; where it is not known (0), it counts as the opener.
        """
        file = self.files.get(handle)
        if not file.writable:
            return
        caller = self._processes.identify(tid)
        if caller is None:
            caller = file.opener
        elif caller != file.opener and caller not in file.writers:
            return
        writer_killed = self._processes.is_being_killed(caller)
        if writer_killed and caller is not None:
            self.store.units.killed(caller)
        self.store.flush(
            handle,
            writer_killed=writer_killed,
            still_held=lambda: self._processes.holds(caller, file.ino),
            is_mapped=lambda: self._is_mapped(caller, file),
        )
        if writer_killed:
            others = {file.opener, *file.writers} - {caller, None}
            if not any(p and self._processes.is_alive(p) for p in others):
                self.releases.expect(file.ino)

    def release_file(self, handle: int) -> None:
        file = self.files.remove(handle)
        if self.store.versions.shared_maps.is_unfinished(file.ino) and self._was_killed(file):
            self.store.flush(handle, writer_killed=True)
        self.data_plane.released(handle, file.ino)
        self.store.release(handle)

    def release_left(self) -> None:
        """The mount is gone, and the kernel may have dropped the RELEASE of a file whose mapping
        ended with its program.
        """
        for handle in list(self.files):
            file = self.files.get(handle)
            if self.store.versions.shared_maps.is_unfinished(file.ino) and self._has_ended(file):
                self.release_file(handle)

    def _has_ended(self, file: OpenFile) -> bool:
        """True if the opener has, or is about to."""
        opener = file.opener
        if opener is None:
            return False
        return self._processes.is_being_killed(opener) or not self._processes.is_alive(opener)

    def _is_mapped(self, caller: Process | None, file: OpenFile) -> bool:
        """The process that closes the file maps it; how its opener ends will be known then."""
        is_mapped = self._mappings.has(caller, file.ino)
        if is_mapped and file.opener is not None:
            self._watch(file.opener)
        return is_mapped

    def _was_killed(self, file: OpenFile) -> bool:
        """True if the opener was. With a mapping alone no FLUSH tells of its end."""
        opener = file.opener
        if opener is None or not file.writable:
            return False
        return self._processes.is_being_killed(opener) or self._ending_of(opener) in _KILLED


async def _no_pause() -> None:
    """Nobody else is served by this loop."""


def check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLongError(f"a name has at most {NAME_BYTES_MAX} bytes, this has {len(name)}")

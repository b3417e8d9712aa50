"""pyfuse3's requests in terms of the store: inode numbers, handles and attributes in and out.

Never here: errno values (``boundary``), permission checks (the kernel makes them, with
``default_permissions``), anything that awaits.

Invariants
- One request is one verb of the store, plus bookkeeping of what the kernel knows.
- A lookup count is raised in the handler whose reply tells the kernel of the inode.
- O_TRUNC arrives in the flags of OPEN, without a SETATTR, and starts a new version.
- Access times are not kept: reading changes nothing.
- The connection negotiates FUSE_HANDLE_KILLPRIV (libfuse asks for it), so set-user-ID and
  set-group-ID bits and file capabilities are taken away here: by writes and truncation of anyone
  but root, and by every change of owner. Who writes is known from the opening of the file only.
"""

# ruff: noqa: ARG002  pyfuse3 decides what a handler is given
from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import pyfuse3

from cxlfs.errors import (
    BadHandleError,
    ExistsError,
    InvalidArgumentError,
    NameTooLongError,
    NoAttributeError,
    NotFoundError,
    UnsupportedOperationError,
)
from cxlfs.fuse import attributes as attributes_module
from cxlfs.fuse.attributes import absent_entry, entry_of
from cxlfs.fuse.boundary import Failures, notice, request
from cxlfs.fuse.handles import LookupCounts, OpenFile, OpenFiles
from cxlfs.fuse.page_cache import PageCache
from cxlfs.fuse.processes import ProcessTable
from cxlfs.namespace import Attributes
from cxlfs.store import Store, StoreEvent

NAME_BYTES_MAX = 255
CAPABILITY_XATTR = b"security.capability"
_DOT_ENTRIES = 2
"""Cookies 0 and 1 stand before ``.`` and ``..``; those of the store follow, moved by 2."""


class Operations(pyfuse3.Operations):
    """All handlers of one mount. Called by pyfuse3, from one thread, one at a time."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, store: Store, *, processes: ProcessTable | None = None) -> None:
        self.store = store
        self.failures = Failures(store)
        self.lookups = LookupCounts(store)
        self.files = OpenFiles()
        self.page_cache = PageCache(self.files)
        self._processes = processes if processes is not None else ProcessTable()
        self._set_id: set[int] = set()
        """Files that lose set-ID bits or capabilities when written; known since they were opened
        for writing or changed while open.
        """
        self._directories: dict[int, int] = {}

    def on_store_event(self, event: StoreEvent) -> None:
        """The store says that it did something by itself; only reverts concern the kernel."""
        if event.kind == "reverted" and event.ino is not None:
            self.page_cache.content_replaced(event.ino)

    # --- names ------------------------------------------------------------------------------

    @request
    def lookup(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        _check_name(name)
        try:
            attributes = self.store.lookup(parent_inode, name)
        except NotFoundError:
            # The kernel may remember that there is none, but only of a directory that exists.
            self.store.get_attributes(parent_inode)
            return absent_entry()
        return self._remembered(attributes)

    def _remembered(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        self.lookups.remember(attributes.ino)
        return entry_of(attributes)

    @notice
    def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        for ino, lookups in inode_list:
            if self.lookups.forget(ino, lookups):
                self.page_cache.forgotten(ino)
                self._set_id.discard(ino)

    @request
    def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: bytes,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        _check_name(name)
        return self._remembered(
            self.store.make_directory(parent_inode, name, mode, ctx.uid, ctx.gid)
        )

    @request
    def mknod(
        self,
        parent_inode: pyfuse3.InodeT,
        name: bytes,
        mode: pyfuse3.ModeT,
        rdev: int,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        _check_name(name)
        device = rdev if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0
        return self._remembered(
            self.store.make_node(parent_inode, name, mode, device, ctx.uid, ctx.gid)
        )

    @request
    def symlink(
        self,
        parent_inode: pyfuse3.InodeT,
        name: bytes,
        target: bytes,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        _check_name(name)
        return self._remembered(
            self.store.make_symlink(parent_inode, name, target, ctx.uid, ctx.gid)
        )

    @request
    def readlink(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> bytes:
        return self.store.read_symlink(inode)

    @request
    def link(
        self,
        inode: pyfuse3.InodeT,
        new_parent_inode: pyfuse3.InodeT,
        new_name: bytes,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        _check_name(new_name)
        return self._remembered(self.store.link(inode, new_parent_inode, new_name))

    @request
    def unlink(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        _check_name(name)
        self.store.unlink(parent_inode, name)

    @request
    def rmdir(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        _check_name(name)
        self.store.remove_directory(parent_inode, name)

    @request
    def rename(
        self,
        parent_inode_old: pyfuse3.InodeT,
        name_old: bytes,
        parent_inode_new: pyfuse3.InodeT,
        name_new: bytes,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        _check_name(name_old)
        _check_name(name_new)
        if flags not in (0, pyfuse3.RENAME_EXCHANGE, pyfuse3.RENAME_NOREPLACE):
            raise InvalidArgumentError(f"rename flags not supported: {flags:#x}")
        self.store.rename(
            parent_inode_old,
            name_old,
            parent_inode_new,
            name_new,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
            no_replace=bool(flags & pyfuse3.RENAME_NOREPLACE),
        )

    # --- attributes -------------------------------------------------------------------------

    @request
    def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        return entry_of(self.store.get_attributes(inode))

    @request
    def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        mode = attr.st_mode & 0o7777 if fields.update_mode else None
        changes_owner = fields.update_uid or fields.update_gid
        if changes_owner or (fields.update_size and ctx.uid != 0):
            mode = self._mode_without_privileges(inode, mode)
        attributes = self.store.set_attributes(
            inode,
            mode=mode,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            ctime_ns=attr.st_ctime_ns if fields.update_ctime else None,
            handle=fh,
        )
        if fields.update_mode and self.files.has_writable(inode):
            self._watch_set_id(attributes)
        return entry_of(attributes)

    def _mode_without_privileges(self, ino: int, mode: int | None) -> int | None:
        """The permission bits to set along with a truncation or a change of owner; also takes the
        capabilities away. None: leave the mode alone.
        """
        current = self.store.get_attributes(ino).mode
        if not stat.S_ISREG(current):
            return mode
        self._remove_capabilities(ino)
        if mode is None and attributes_module.has_set_id(current):
            return attributes_module.without_set_id(current) & 0o7777
        return mode

    def _remove_capabilities(self, ino: int) -> None:
        if CAPABILITY_XATTR in self.store.list_xattrs(ino):
            self.store.remove_xattr(ino, CAPABILITY_XATTR)

    def _watch_set_id(self, attributes: Attributes) -> None:
        """Remember whether writes to the file must take privileges away."""
        if attributes_module.has_set_id(attributes.mode) or (
            CAPABILITY_XATTR in self.store.list_xattrs(attributes.ino)
        ):
            self._set_id.add(attributes.ino)
        else:
            self._set_id.discard(attributes.ino)

    def _drop_privileges(self, ino: int) -> None:
        """Someone other than root wrote to, or emptied, a file that has set-ID bits."""
        mode = self._mode_without_privileges(ino, None)
        if mode is not None:
            self.store.set_attributes(ino, mode=mode)
        self._set_id.discard(ino)
        self.page_cache.attributes_changed(ino)

    # --- files ------------------------------------------------------------------------------

    @request
    def create(
        self,
        parent_inode: pyfuse3.InodeT,
        name: bytes,
        mode: pyfuse3.ModeT,
        flags: pyfuse3.FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        _check_name(name)
        try:
            attributes, handle = self.store.create(
                parent_inode, name, mode, ctx.uid, ctx.gid, flags
            )
        except ExistsError:
            if flags & os.O_EXCL:
                raise
            attributes = self.store.lookup(parent_inode, name)
            return self._open(attributes, flags, ctx), self._remembered(attributes)
        return self._opened(attributes, handle, flags, ctx), self._remembered(attributes)

    @request
    def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return self._open(self.store.get_attributes(inode), flags, ctx)

    def _open(
        self, attributes: Attributes, flags: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        handle = self.store.open_file(attributes.ino, flags)
        info = self._opened(attributes, handle, flags, ctx)
        truncates = flags & os.O_TRUNC
        if truncates and ctx.uid != 0 and attributes.ino in self._set_id:
            self._drop_privileges(attributes.ino)
        return info

    def _opened(
        self, attributes: Attributes, handle: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        """Book an open file, and tell the kernel how to use its page cache for it."""
        ino = attributes.ino
        writable = flags & os.O_ACCMODE != os.O_RDONLY
        direct = self.page_cache.is_direct(flags)
        opener = self._processes.identify(ctx.pid) if writable else None
        self.files.add(
            handle,
            OpenFile(
                ino=ino,
                writable=writable,
                direct=direct,
                opener=opener,
                may_keep_set_id=ctx.uid == 0,
            ),
        )
        if writable:
            self._watch_set_id(attributes)
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(handle),
            direct_io=direct,
            keep_cache=self.page_cache.keep_at_open(ino, direct=direct),
        )

    @request
    def read(  # type: ignore[override]  # pyfuse3 takes any contiguous buffer
        self, fh: pyfuse3.FileHandleT, off: int, size: int
    ) -> bytes | memoryview:
        # A memoryview stays valid until the next call of the store; pyfuse3 sends the reply
        # before it lets anything else run.
        return self.store.read(fh, off, size)

    @request
    def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        file = self.files.get(fh)
        written = self.store.write(fh, off, buf)
        if file.direct:
            self.page_cache.written_directly(file.ino)
        if file.ino in self._set_id and not file.may_keep_set_id:
            self._drop_privileges(file.ino)
        return written

    @request
    def flush(self, fh: pyfuse3.FileHandleT) -> None:
        file = self.files.get(fh)
        if file.writable:
            killed = self._processes.is_being_killed(file.opener)
            self.store.flush(fh, writer_killed=killed)

    @request
    def release(self, fh: pyfuse3.FileHandleT) -> None:
        self.files.remove(fh)
        self.store.release(fh)

    @request
    def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:  # noqa: FBT001  pyfuse3's
        self.store.fsync(fh, data_only=datasync)

    # --- directories ------------------------------------------------------------------------

    @request
    def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        handle = self.store.open_directory(inode)
        self._directories[handle] = inode
        return pyfuse3.FileHandleT(handle)

    @request
    def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for cookie, name in ((0, b"."), (1, b"..")):
            if start_id <= cookie and not self._reply_dot(fh, name, cookie + 1, token):
                return
        for entry in self.store.read_directory(fh, max(0, start_id - _DOT_ENTRIES)):
            try:
                attributes = self.store.get_attributes(entry.ino)
            except NotFoundError:
                continue  # removed since the directory was read
            cookie_next = entry.cookie_next + _DOT_ENTRIES
            if not pyfuse3.readdir_reply(token, entry.name, entry_of(attributes), cookie_next):
                return
            self.lookups.remember(entry.ino)

    def _reply_dot(
        self, handle: int, name: bytes, cookie_next: int, token: pyfuse3.ReaddirToken
    ) -> bool:
        """``.`` and ``..`` are listed but, unlike other entries, not counted as looked up."""
        try:
            attributes = self.store.lookup(self._directory(handle), name)
        except NotFoundError:
            return True  # the open directory was removed
        return pyfuse3.readdir_reply(token, name, entry_of(attributes), cookie_next)

    @request
    def releasedir(self, fh: pyfuse3.FileHandleT) -> None:
        self._directories.pop(fh, None)
        self.store.release_directory(fh)

    @request
    def fsyncdir(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:  # noqa: FBT001  pyfuse3's
        self.store.fsync_directory(self._directory(fh))

    def _directory(self, handle: int) -> int:
        ino = self._directories.get(handle)
        if ino is None:
            raise BadHandleError(f"no open directory {handle}")
        return ino

    # --- the whole file system --------------------------------------------------------------

    @request
    def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        report = self.store.statfs()
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = report.block_size
        data.f_blocks = report.total_bytes // report.block_size
        data.f_bfree = report.free_bytes // report.block_size
        data.f_bavail = report.available_bytes // report.block_size
        data.f_files = report.inode_count
        data.f_ffree = data.f_favail = report.inodes_free
        data.f_namemax = report.name_length_max
        return data

    @request
    def access(
        self, inode: pyfuse3.InodeT, mode: pyfuse3.ModeT, ctx: pyfuse3.RequestContext
    ) -> bool:
        """Never asked under ``default_permissions``; true for inodes that exist."""
        self.store.get_attributes(inode)
        return True

    # --- extended attributes ----------------------------------------------------------------

    @request
    def setxattr(
        self,
        inode: pyfuse3.InodeT,
        name: bytes,
        value: bytes,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        """XATTR_CREATE and XATTR_REPLACE are checked by pyfuse3, with getxattr, before this."""
        _check_xattr_namespace(name)
        self.store.set_xattr(inode, name, value)
        if name == CAPABILITY_XATTR and self.files.has_writable(inode):
            self._set_id.add(inode)

    @request
    def getxattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if name.startswith(b"system."):
            raise NoAttributeError("no attributes of the system namespace")
        return self.store.get_xattr(inode, name)

    @request
    def listxattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self.store.list_xattrs(inode)

    @request
    def removexattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        _check_xattr_namespace(name)
        self.store.remove_xattr(inode, name)


def _check_name(name: bytes) -> None:
    if len(name) > NAME_BYTES_MAX:
        raise NameTooLongError(f"a name has at most {NAME_BYTES_MAX} bytes, this has {len(name)}")


def _check_xattr_namespace(name: bytes) -> None:
    """Access control lists would be kept but not enforced, so they are refused."""
    if name.startswith(b"system."):
        raise UnsupportedOperationError("access control lists are not supported")

"""pyfuse3's handlers: its arguments and results in, those of ``requests`` and of the store out.

Never here: errno values (``boundary``), permission checks (the kernel makes them where others than
root may enter), anything that awaits.

Invariants
- O_TRUNC arrives in the flags of OPEN, without a SETATTR, and starts a new version.
- Access times are not kept: reading changes nothing.
"""

# ruff: noqa: ARG002  pyfuse3 decides what a handler is given
from __future__ import annotations

import os
import stat
from collections.abc import Sequence

import pyfuse3

from cxlfs.errors import (
    BadHandleError,
    NotFoundError,
    NotPermittedError,
    UnsupportedOperationError,
)
from cxlfs.fuse.attributes import CACHE_SECONDS, absent_entry, entry_of
from cxlfs.fuse.boundary import notice, request
from cxlfs.fuse.data_plane import DataPlane
from cxlfs.fuse.handles import Caller, Opened
from cxlfs.fuse.past_operations import PastOperations
from cxlfs.fuse.privileges import CAPABILITY_XATTR
from cxlfs.fuse.processes import ProcessTable
from cxlfs.fuse.requests import Requests, check_name
from cxlfs.store import Store
from cxlfs.store.attributes import RESTORE_XATTR
from cxlfs.store.namespace import Attributes

_EXECUTE_BITS = stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH

_DOT_ENTRIES = 2
"""Cookies 0 and 1 stand before ``.`` and ``..``; those of the store follow, moved by 2."""


class Operations(Requests, pyfuse3.Operations):
    """All handlers of one mount. Called by pyfuse3, from one thread, one at a time."""

    supports_dot_lookup = True
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        store: Store,
        *,
        processes: ProcessTable | None = None,
        data_plane: DataPlane | None = None,
    ) -> None:
        super().__init__(store, processes=processes, data_plane=data_plane)
        past = PastOperations(self.past, is_direct=self.page_cache.is_direct)
        self.other_handler = past.handler

    # --- names ------------------------------------------------------------------------------

    @request
    def lookup(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        attributes = self.find(parent_inode, name)
        return absent_entry() if attributes is None else self._entry(attributes)

    def _remembered(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        self.lookups.remember(attributes.ino)
        return self._entry(attributes)

    def _entry(self, attributes: Attributes) -> pyfuse3.EntryAttributes:
        """Only beside workers there are files whose sizes the kernel may not remember."""
        cache_seconds = CACHE_SECONDS
        if self.data_plane.writes_past_store:
            cache_seconds = self.direct_access.cache_seconds(attributes.ino)
        return entry_of(attributes, cache_seconds, self.name_seconds(attributes.ino))

    @notice
    def forget(self, inode_list: Sequence[tuple[pyfuse3.InodeT, int]]) -> None:
        self.forget_all(inode_list)

    @request
    def mkdir(
        self,
        parent_inode: pyfuse3.InodeT,
        name: bytes,
        mode: pyfuse3.ModeT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        self.admit()
        check_name(name)
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
        self.admit()
        check_name(name)
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
        self.admit()
        check_name(name)
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
        self.admit()
        check_name(new_name)
        self.releases.wait_for(inode)
        return self._remembered(self.store.link(inode, new_parent_inode, new_name))

    @request
    def unlink(
        self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext
    ) -> None:
        self.remove(parent_inode, name)

    @request
    def rmdir(self, parent_inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.admit()
        check_name(name)
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
        self.move(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # --- attributes -------------------------------------------------------------------------

    @request
    def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        self.releases.wait_for(inode)
        return self._entry(self.store.get_attributes(inode))

    @request
    def setattr(
        self,
        inode: pyfuse3.InodeT,
        attr: pyfuse3.EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: pyfuse3.FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        self.admit()
        if fields.update_size:
            self.prepare_change(inode, emptied=attr.st_size == 0)
        mode = attr.st_mode & 0o7777 if fields.update_mode else None
        if fields.update_uid or fields.update_gid:
            mode = self.privileges.without(inode, mode)
        elif fields.update_size:
            if ctx.uid != 0:  # a mode that comes along is the kernel's, without set-user-ID only
                mode = None
            mode = self.privileges.without(inode, mode, Caller(ctx.uid, ctx.gid, ctx.pid))
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
        if fields.update_mode:
            self.privileges.changed(inode)
        return self._entry(attributes)

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
        attributes, opened = self.create_file(
            parent_inode, name, mode, flags, Caller(ctx.uid, ctx.gid, ctx.pid)
        )
        return _file_info(opened), self._entry(attributes)

    @request
    def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return _file_info(self.open_file(inode, flags, Caller(ctx.uid, ctx.gid, ctx.pid)))

    @request
    def read(  # type: ignore[override]  # pyfuse3 takes any contiguous buffer
        self, fh: pyfuse3.FileHandleT, off: int, size: int
    ) -> bytes | memoryview:
        # A memoryview stays valid until the next call of the store; pyfuse3 sends the reply
        # before it lets anything else run.
        return self.store.read(fh, off, size)

    @request
    def write(self, fh: pyfuse3.FileHandleT, off: int, buf: bytes) -> int:
        return self.write_by(0, fh, off, buf)

    @request
    def flush(self, fh: pyfuse3.FileHandleT) -> None:
        self.flush_by(0, fh)

    @request
    def release(self, fh: pyfuse3.FileHandleT) -> None:
        self.release_file(fh)

    @request
    def fsync(self, fh: pyfuse3.FileHandleT, datasync: bool) -> None:  # noqa: FBT001  pyfuse3's
        self.store.fsync(fh, data_only=datasync)

    # --- directories ------------------------------------------------------------------------

    @request
    def opendir(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> pyfuse3.FileHandleT:
        self.admit()
        self.before_listing(inode)
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
            if not pyfuse3.readdir_reply(token, entry.name, self._entry(attributes), cookie_next):
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
        """Only asked where the kernel does not check permissions, so the caller is root: may do all
        but execute what nobody may execute.
        """
        permissions = self.store.get_attributes(inode).mode
        executable = stat.S_ISDIR(permissions) or permissions & _EXECUTE_BITS
        return bool(executable) or not mode & os.X_OK

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
        self.admit()
        _check_xattr_namespace(name)
        if name == RESTORE_XATTR and ctx.uid not in {0, self.store.get_attributes(inode).uid}:
            raise NotPermittedError("an earlier version is for the owner of a file, and root")
        self.store.set_xattr(inode, name, value)
        if name == CAPABILITY_XATTR:
            self.privileges.changed(inode)

    @request
    def getxattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        return self.xattr(inode, name)

    @request
    def listxattr(self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self.store.list_xattrs(inode)

    @request
    def removexattr(self, inode: pyfuse3.InodeT, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self.admit()
        _check_xattr_namespace(name)
        self.store.remove_xattr(inode, name)


def _file_info(opened: Opened) -> pyfuse3.FileInfo:
    return pyfuse3.FileInfo(
        fh=pyfuse3.FileHandleT(opened.handle),
        direct_io=opened.direct,
        keep_cache=opened.keep_cache,
    )


def _check_xattr_namespace(name: bytes) -> None:
    """Access control lists would be kept but not enforced, so they are refused."""
    if name.startswith(b"system."):
        raise UnsupportedOperationError("access control lists are not supported")

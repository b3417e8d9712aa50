"""Attributes and extended attributes of inodes.

Never here: sizes (``files``), names, permission checks.

Invariants
- A change is one record for a committed inode; an uncommitted one takes it along later.
- ``user.cxlfs.*`` is what the store says of a file. It is read by name and never listed, so that a
  copy does not take along what is true of the original alone. An archiver may bring such a name
  from elsewhere all the same, and would call its copy failed for one attribute that it cannot set:
  setting and removing are accepted, and change nothing. The exception is nothing that can be read:
  who sets ``user.cxlfs.revert`` gives up what is being written, who sets ``user.cxlfs.restore``
  gets what is kept aside.
- ``trusted.cxlfs.*`` is what the store remembers (``health``): users neither see nor set it.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import (
    AttributeTooLargeError,
    CorruptionError,
    ExistsError,
    MediaError,
    NameTooLongError,
    NoAttributeError,
    NoSpaceError,
    NotPermittedError,
    UnsupportedOperationError,
)
from cxlfs.format import layout
from cxlfs.format.operations import Operation, XattrRemoveOperation, XattrSetOperation, encode
from cxlfs.store.content_sums import ContentSums
from cxlfs.store.failed_resumes import failed_resumes
from cxlfs.store.handle import give_up
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.version import Version

if TYPE_CHECKING:
    from cxlfs.store.volume import Volume

STATE_XATTR = b"user.cxlfs.state"
COMMIT_XATTR = b"user.cxlfs.commit"
FAILED_XATTR = b"user.cxlfs.failed_resumes"
CRC32C_XATTR = b"user.cxlfs.crc32c"
REVERT_XATTR = b"user.cxlfs.revert"
RESTORE_XATTR = b"user.cxlfs.restore"
_VIRTUAL_PREFIX = b"user.cxlfs."
_XATTR_PREFIXES = (b"user.", b"trusted.", b"security.")


class InodeAttributes:
    """The verbs over attributes; ``require_room`` raises NoSpaceError when metadata cannot grow,
    ``damaged`` is called when a read for one meets damage, ``restore`` for a file whose user wants
    the content that is kept aside.
    """

    def __init__(
        self,
        volume: Volume,
        damaged: Callable[[Inode, CorruptionError | MediaError], None],
        *,
        require_room: Callable[[], None],
        restore: Callable[[Inode], None],
    ) -> None:
        self.volume = volume
        self._restore = restore
        self.sums = ContentSums(damaged)
        self.namespace = volume.namespace
        self._require_room = require_room

    # --- attributes -------------------------------------------------------------------------

    def set_attributes(
        self,
        inode: Inode,
        *,
        mode: int | None,
        uid: int | None,
        gid: int | None,
        atime_ns: int | None,
        mtime_ns: int | None,
        ctime_ns: int | None,
    ) -> None:
        """One record for a committed inode; an uncommitted one takes it along when published.

        A time that the format cannot hold becomes the nearest one, as Linux has it for other file
        systems (Documentation/filesystems/vfs: s_time_min, s_time_max). Raises
        InvalidArgumentError: another value does not fit its field; nothing has changed.
        """
        self.volume.require_writable()
        changes: dict[str, int] = {
            "ctime_ns": ctime_ns if ctime_ns is not None else self.volume.now()
        }
        if mode is not None:
            changes["mode"] = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        given = {"uid": uid, "gid": gid, "atime_ns": atime_ns, "mtime_ns": mtime_ns}
        changes |= {key: value for key, value in given.items() if value is not None}
        for key in ("atime_ns", "mtime_ns", "ctime_ns"):
            if key in changes:
                changes[key] = clamped_time(changes[key])
        op = inode.operation(**changes)
        if not inode.uncommitted and inode.links:
            self.volume.commit([op], durable=False)
            self.volume.note_committed([op])
        else:
            encode([op])  # what no record can say later is refused at once
        for key, value in changes.items():
            setattr(inode, key, value)

    # --- extended attributes ----------------------------------------------------------------

    def get_xattr(self, inode: Inode, name: bytes, *, in_steps: bool = False) -> bytes:
        """``in_steps``: the checksum of a file is, and UnfinishedError raised between two steps.

        Raises NoAttributeError, and of that checksum CorruptionError, MediaError.
        """
        if name.startswith(_VIRTUAL_PREFIX):
            if name == CRC32C_XATTR:
                return b"%08x" % self.sums.crc32c(inode, in_steps=in_steps)
            value = self._virtual_xattrs(inode).get(name)
        elif name.startswith(HIDDEN_PREFIX):
            value = None
        else:
            value = (inode.xattrs or {}).get(name)
        if value is None:
            raise NoAttributeError("no such attribute")
        return value

    def list_xattrs(self, inode: Inode) -> list[bytes]:
        """What was set: neither ``user.cxlfs.*`` nor ``trusted.cxlfs.*``."""
        return [name for name in inode.xattrs or () if not name.startswith(HIDDEN_PREFIX)]

    def _virtual_xattrs(self, inode: Inode) -> dict[bytes, bytes]:
        if inode.kind is not FileKind.FILE:
            return {}
        return {
            STATE_XATTR: content_state(inode).encode(),
            COMMIT_XATTR: b"%d" % inode.commit_lsn,
            FAILED_XATTR: b"%d" % failed_resumes(inode),
        }

    def set_xattr(
        self, inode: Inode, name: bytes, value: bytes, *, create: bool, replace: bool
    ) -> None:
        """Raises ExistsError, NoAttributeError, AttributeTooLargeError, NoSpaceError (also when
        listxattr could not return all the names), ...
        """
        self.volume.require_writable()
        self._check_xattr_name(name)
        if name.startswith(_VIRTUAL_PREFIX):
            if name == REVERT_XATTR and inode.kind is FileKind.FILE:
                give_up(inode)
            elif name == RESTORE_XATTR and inode.kind is FileKind.FILE:
                self._restore(inode)
            return
        old = (inode.xattrs or {}).get(name)
        if create and old is not None:
            raise ExistsError("the attribute exists")
        if replace and old is None:
            raise NoAttributeError("no such attribute")
        names = sum(len(n) + 1 for n in self.list_xattrs(inode) if n != name)
        if names + len(name) + 1 > layout.XATTR_LIST_BYTES_MAX:
            raise NoSpaceError("the names of the attributes are too long together")
        limit = min(layout.XATTR_VALUE_BYTES_MAX, self.volume.record_bytes_max - 1024)
        total = sum(
            len(n) + len(v) + 1
            for n, v in (inode.xattrs or {}).items()
            if n != name and not n.startswith(HIDDEN_PREFIX)
        )
        if len(value) > limit or total + len(name) + len(value) > layout.XATTRS_BYTES_MAX + limit:
            raise AttributeTooLargeError("the attribute is too large")
        self._require_room()
        self._commit_xattr(inode, XattrSetOperation(inode.ino, name, value))
        self.namespace.set_xattr(inode, name, value)

    def remove_xattr(self, inode: Inode, name: bytes) -> None:
        """Raises NoAttributeError, UnsupportedOperationError."""
        self.volume.require_writable()
        self._check_xattr_name(name)
        if name == CRC32C_XATTR or name in self._virtual_xattrs(inode):
            return
        if name not in (inode.xattrs or {}):
            raise NoAttributeError("no such attribute")
        self._commit_xattr(inode, XattrRemoveOperation(inode.ino, name))
        self.namespace.remove_xattr(inode, name)

    def _commit_xattr(self, inode: Inode, op: Operation) -> None:
        now = self.volume.now()
        if not inode.uncommitted and inode.links:
            ops = [op, inode.operation(ctime_ns=now)]
            self.volume.commit(ops, durable=False)
            self.volume.note_committed(ops)
        inode.ctime_ns = now

    def _check_xattr_name(self, name: bytes) -> None:
        if not 0 < len(name) <= layout.XATTR_NAME_BYTES_MAX:
            raise NameTooLongError("the attribute's name is empty or too long")
        if name.startswith(HIDDEN_PREFIX):
            raise NotPermittedError("this attribute is kept by the store")
        if not name.startswith(_XATTR_PREFIXES):
            raise UnsupportedOperationError("only user, trusted and security attributes")


def clamped_time(time_ns: int) -> int:
    """The nearest time that the format can hold."""
    return min(max(time_ns, layout.TIME_NS_MIN), layout.TIME_NS_MAX)


def content_state(inode: Inode) -> str:
    """``complete``, ``damaged`` or ``incomplete``: its writer has not closed it, or died, or lost
    a mapped page.
    """
    if inode.damaged:
        return "damaged"
    if inode.uncommitted or inode.flags & layout.INODE_INCOMPLETE:
        return "incomplete"
    if inode.held is not None and inode.held.reason:
        return "incomplete"
    if isinstance(inode.version, Version) and inode.version.has_lost_pages:
        return "incomplete"
    return "complete"

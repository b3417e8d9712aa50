"""Requests about the past that a worker hands over as they came from the kernel.

Other modules know what they mean (``past_view``), and carry the others (``past_operations``).

Invariants
- A request that is not here changes something, and is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from cxlfs.errors import AttributeLongerError, ReadOnlyError, UnsupportedOperationError
from cxlfs.fuse import kernel
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.past_view import FIRST
from cxlfs.store.hidden import is_past
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.fuse.past_view import PastView
    from cxlfs.native.transport import Upcall

_RENAMES: dict[int, struct.Struct] = {
    Opcode.RENAME: kernel.NUMBER,
    Opcode.RENAME2: kernel.NUMBER_AND_FLAGS,
}
"""What begins with the new directory."""


class PastDirect:
    """Serves calls of one transport. ``is_direct``: as ``PageCache.is_direct``."""

    def __init__(self, view: PastView, *, is_direct: Callable[[int], bool]) -> None:
        self._view = view
        self._is_direct = is_direct
        self._handlers: dict[int, Callable[[Upcall], bytes | memoryview]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: _nothing,
            Opcode.GETATTR: self._getattr,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.FLUSH: _nothing,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: _nothing,
            Opcode.GETXATTR: self._getxattr,
            Opcode.LSEEK: self._lseek,
            Opcode.COPY_FILE_RANGE: _unsupported,
            Opcode.IOCTL: _unsupported,
        }

    def handler(self, upcall: Upcall) -> Callable[[Upcall], bytes | memoryview] | None:
        """What serves a call; None: it is not about the past. Each call comes here first."""
        opcode, inode = upcall.opcode, upcall.inode
        if inode >= FIRST:
            return self._handlers.get(opcode, _refuse)
        if inode == ROOT_INO and opcode == Opcode.LOOKUP and is_past(inode, _name(upcall)):
            return self._lookup
        if opcode in _RENAMES and _RENAMES[opcode].unpack_from(upcall.arguments)[0] >= FIRST:
            return _refuse
        return None

    def _lookup(self, upcall: Upcall) -> bytes:
        attributes = self._view.lookup(upcall.inode, _name(upcall), upcall.uid)
        return kernel.entry_reply(attributes, 0, name_seconds=0)

    def _getattr(self, upcall: Upcall) -> bytes:
        return kernel.attributes_reply(self._view.get_attributes(upcall.inode, upcall.uid), 0)

    def _open(self, upcall: Upcall) -> bytes:
        flags, _ = kernel.OPEN.unpack_from(upcall.arguments)
        handle = self._view.open(upcall.inode, flags, upcall.uid)
        is_direct = self._is_direct(flags)
        return kernel.opened_reply(handle, direct=is_direct, keep_cache=True, writable=False)

    def _read(self, upcall: Upcall) -> bytes | memoryview:
        handle, offset, size = kernel.READ.unpack_from(upcall.arguments)
        return self._view.read(handle, offset, size)

    def _release(self, upcall: Upcall) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(upcall.arguments)
        self._view.release(handle)
        return b""

    def _getxattr(self, upcall: Upcall) -> bytes:
        (room,) = kernel.GETXATTR.unpack_from(upcall.arguments)
        (name,) = kernel.names(upcall.arguments, kernel.GETXATTR.size)
        value = self._view.xattr(upcall.inode, name, upcall.uid)
        if room == 0:
            return kernel.GETXATTR.pack(len(value))
        if len(value) > room:
            raise AttributeLongerError(f"{len(value)} bytes, and room for {room}")
        return value

    def _lseek(self, upcall: Upcall) -> bytes:
        handle, offset, whence = kernel.LSEEK.unpack_from(upcall.arguments)
        return kernel.NUMBER.pack(self._view.seek(handle, offset, whence))


def _name(upcall: Upcall) -> bytes:
    (name,) = kernel.names(upcall.arguments, 0)
    return name


def _nothing(_upcall: Upcall) -> bytes:
    return b""


def _unsupported(_upcall: Upcall) -> NoReturn:
    """The kernel copies by itself, and programs read through it."""
    raise UnsupportedOperationError("not of what is past")


def _refuse(_upcall: Upcall) -> NoReturn:
    raise ReadOnlyError("the past cannot be changed")

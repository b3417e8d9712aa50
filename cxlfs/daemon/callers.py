"""Who asks over the control socket, and what of the store is theirs.

Root and the user whose daemon it is may ask for everything. Whoever else may use the mount may ask
for what the mount would let them do: look at what they can reach, change what they can write to,
and have of history what they own.

Other modules take connections (``control_server``) and answer (``history_request``,
``policy_request``). Access control lists do not exist here: the mode decides, as in the kernel.

Invariants
- What is not asked for here by name is refused to everybody else: a new request is for root and the
  daemon's user until it says otherwise.
- Nothing is learned of a path that cannot be reached, not even that it is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Final, Protocol

from cxlfs.errors import CxlfsError, NotPermittedError
from cxlfs.store.hidden import require_shown
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable

    from cxlfs.store import Store
    from cxlfs.store.namespace import Inode

READ: Final = stat.S_IROTH
WRITE: Final = stat.S_IWOTH
SEARCH: Final = stat.S_IXOTH
_GROUP_SHIFT, _OWNER_SHIFT = 3, 6
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred
_GROUPS_OPTION = 59  # SO_PEERGROUPS, <asm-generic/socket.h>
_GID_BYTES = 4
_GROUPS_BYTES_MAX = 1024
"""What ``getsockopt`` of Python takes. Of a user with more groups the first one counts alone."""


class Owned(Protocol):
    """An inode, or what one was."""

    @property
    def uid(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """``manages``: root, or the user whose daemon it is."""

    uid: int
    groups: frozenset[int]
    manages: bool

    def owns(self, what: Owned) -> bool:
        return self.manages or what.uid == self.uid

    def may(self, inode: Inode, wanted: int) -> bool:
        """The mode of something lets the caller do what is ``wanted`` (bits as for others)."""
        if self.manages:
            return True
        if inode.uid == self.uid:
            return inode.mode >> _OWNER_SHIFT & wanted == wanted
        if inode.gid in self.groups:
            return inode.mode >> _GROUP_SHIFT & wanted == wanted
        return inode.mode & wanted == wanted

    def require_reach(self, store: Store, path: bytes, wanted: int = 0) -> None:
        """Each directory of a path can be searched, and what the path means, if that is a
        directory, lets the caller do what is ``wanted``. What is not there is a matter of history,
        and of :meth:`owns`.

        Raises:
            NotPermittedError: It does not.
        """
        inode = store.namespace.get(ROOT_INO)
        for part in filter(None, path.split(b"/")):
            if inode.entries is None:
                return
            if not self.may(inode, SEARCH):
                raise _refused(path)
            require_shown(inode.ino, part)
            found = store.namespace.find(inode.ino, part)
            if found is None:
                return
            inode = found
        if inode.entries is not None and not self.may(inode, wanted):
            raise _refused(path)

    def can_reach(self, store: Store, path: bytes) -> bool:
        try:
            self.require_reach(store, path)
        except CxlfsError:
            return False
        return True

    def require_owned(self, what: Owned, path: bytes) -> None:
        """Raises NotPermittedError."""
        if not self.owns(what):
            raise NotPermittedError(
                f"{os.fsdecode(path)}: it belongs to another user",
                next_step="ask its owner, or root",
            )

    def require_writable(self, directory: Inode, name: bytes, target: Inode | None) -> None:
        """A name in a directory may be given to something, and taken from ``target``, which is a
        file whose content is replaced, or a directory.

        Raises:
            NotPermittedError: The directory, or the file, cannot be written to.
        """
        if not self.may(directory, WRITE | SEARCH):
            raise _refused(name)
        if target is None:
            return
        if target.entries is None and not self.may(target, WRITE):
            raise _refused(name)
        if directory.mode & stat.S_ISVTX and not (self.owns(target) or self.owns(directory)):
            raise _refused(name)


MANAGER: Final = Caller(0, frozenset(), manages=True)


def caller_of(getsockopt: Callable[[int, int, int], bytes]) -> Caller:
    """Who is at the other end of a connection, of which that is the method: the kernel says so.
    Raises OSError.
    """
    raw = getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, gid = _CREDENTIALS.unpack(raw)
    if uid in (0, os.geteuid()):
        return Caller(uid, frozenset(), manages=True)
    groups = b""
    with contextlib.suppress(OSError):
        groups = getsockopt(socket.SOL_SOCKET, _GROUPS_OPTION, _GROUPS_BYTES_MAX)
    numbers = struct.unpack(f"={len(groups) // _GID_BYTES}I", groups)
    return Caller(uid, frozenset((gid, *numbers)), manages=False)


def _refused(path: bytes) -> NotPermittedError:
    return NotPermittedError(
        f"{os.fsdecode(path)}: permission denied",
        next_step="ask the owner of the directory, or root",
    )

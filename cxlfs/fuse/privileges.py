"""Set-ID bits and file capabilities, which whoever changes a file's content takes away.

Never here: who may set them (the kernel checks that), requests of the kernel (``requests``).

Invariants
- The connection negotiates FUSE_HANDLE_KILLPRIV (libfuse asks for it), so they are taken away here:
  set-user-ID and set-group-ID bits by writes and truncation of anyone but root, file capabilities
  by those of anyone, and both by every change of owner. Who writes is known from the opening of the
  file only.
- A set-group-ID bit without group execution stays where a member of the file's group writes
  (setattr_should_drop_sgid in Linux, fs/attr.c).
- Whoever writes a file that has any is seen: no worker writes it alone.
"""

from __future__ import annotations

import stat

from cxlfs.fuse import attributes as attributes_module
from cxlfs.fuse.handles import Caller, OpenFile, OpenFiles
from cxlfs.fuse.page_cache import PageCache
from cxlfs.fuse.processes import ProcessTable
from cxlfs.store import Store
from cxlfs.store.namespace import Attributes

_NOT_ROOT = 0xFFFF_FFFF
CAPABILITY_XATTR = b"security.capability"


class Privileges:
    """Of all files; see the module."""

    def __init__(
        self, store: Store, files: OpenFiles, processes: ProcessTable, page_cache: PageCache
    ) -> None:
        self._store = store
        self._files = files
        self._processes = processes
        self._page_cache = page_cache
        self._set_id: set[int] = set()
        self._capable: set[int] = set()
        """Open files that have set-ID bits, and capabilities."""

    def without(self, ino: int, mode: int | None, by: Caller | None = None) -> int | None:
        """The permission bits to set along with a truncation ``by`` somebody, or (None) with a
        change of owner; also takes the capabilities away. None: leave the mode alone.
        """
        attributes = self._store.get_attributes(ino)
        if not stat.S_ISREG(attributes.mode):
            return mode
        if self._has_capabilities(ino):
            self._store.remove_xattr(ino, CAPABILITY_XATTR)
        of_root = by is not None and by.uid == 0
        if mode is None and attributes_module.has_set_id(attributes.mode) and not of_root:
            keeps = by is None or self._is_member(by, attributes.gid)
            return (
                attributes_module.without_set_id(attributes.mode, keeps_group_mark=keeps) & 0o7777
            )
        return mode

    def changed(self, ino: int) -> None:
        """Mode or capabilities were set: whoever has the file open may be concerned."""
        if self._files.has_writable(ino):
            self._watch(self._store.get_attributes(ino))

    def opened(self, attributes: Attributes, caller: Caller, *, emptied: bool) -> None:
        """``caller`` has opened the file to write to it, or emptied it by that."""
        self._watch(attributes)
        if emptied and self._loses(attributes.ino, by_root=caller.uid == 0):
            self._drop(attributes.ino, caller)

    def are_lost_by(self, file: OpenFile) -> bool:
        """A write through it takes something away."""
        return self._loses(file.ino, by_root=file.may_keep_set_id)

    def written(self, file: OpenFile) -> None:
        """Its content has been changed through it."""
        if self.are_lost_by(file):
            self._drop(file.ino, self._opener(file))

    def forgotten(self, ino: int) -> None:
        """The kernel knows nothing of it any more."""
        self._set_id.discard(ino)
        self._capable.discard(ino)

    def _opener(self, file: OpenFile) -> Caller:
        """As far as it is still there."""
        opener = file.opener
        known = opener is not None and self._processes.is_alive(opener)
        uid = 0 if file.may_keep_set_id else _NOT_ROOT
        return Caller(uid, file.gid, opener.tgid if known and opener else 0)

    def _is_member(self, caller: Caller, gid: int) -> bool:
        return caller.gid == gid or gid in self._processes.groups(caller.tid)

    def _has_capabilities(self, ino: int) -> bool:
        return CAPABILITY_XATTR in (self._store.namespace.get(ino).xattrs or ())

    def _loses(self, ino: int, *, by_root: bool) -> bool:
        return ino in self._capable or (ino in self._set_id and not by_root)

    def _watch(self, attributes: Attributes) -> None:
        """Remember whether writes to the file must take privileges away; then each is seen."""
        ino = attributes.ino
        self.forgotten(ino)
        if attributes_module.has_set_id(attributes.mode):
            self._set_id.add(ino)
        if self._has_capabilities(ino):
            self._capable.add(ino)
        if ino in self._set_id or ino in self._capable:
            self._store.namespace.get(ino).stop_writes()

    def _drop(self, ino: int, by: Caller) -> None:
        """Somebody wrote to, or emptied, a file that has privileges. The kernel has forgotten them
        when this returns, so before whoever wrote goes on.
        """
        mode = self.without(ino, None, by)
        if mode is not None:
            self._store.set_attributes(ino, mode=mode)
        self._watch(self._store.get_attributes(ino))  # what is left others' writes take away
        self._page_cache.attributes_changed(ino)

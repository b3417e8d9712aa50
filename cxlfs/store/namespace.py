"""Inodes, directories, symbolic links and extended attributes: the DRAM form of the namespace.

Never here: file content (each file inode only holds its maps), media, permissions, handles.

Invariants
- Inode numbers are never used again; ``next_ino`` is larger than every one ever used.
- Link counts are derived: names that mean the inode; for a directory 2 plus its subdirectories.
- An inode without names lives while it is pinned (the kernel knows it) or open, then it is dropped.
- ``uncommitted`` inodes exist for the living only: no record and no image knows them.
- ``live`` is what readers see, ``committed`` what the journal says, None when it is the same map.
- Applying the operations of the same records in the same order gives the same namespace.
"""

from __future__ import annotations

import collections
import enum
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import (
    CorruptionError,
    InvariantError,
    NotDirectoryError,
    NotFoundError,
    invariant,
)
from cxlfs.format import layout
from cxlfs.format.operations import InodeOperation
from cxlfs.store.listing import Listing
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.held import Held
    from cxlfs.store.writers import Port, Slip, Writer

DIRECTORY_SIZE_BYTES = 4096
"""What stat says of a directory: directories take no space of their own outside the metadata."""
_INODE_BYTES, _STRING_BYTES = layout.IMAGE_INODE_DTYPE.itemsize, layout.IMAGE_NAME_DTYPE.itemsize
_IMAGE_BYTES = layout.IMAGE_DTYPE.itemsize + layout.SECTION_COUNT * layout.SECTION_ALIGN


class FileKind(enum.IntEnum):
    FILE = 1
    DIRECTORY = 2
    SYMLINK = 3
    FIFO = 4
    SOCKET = 5
    CHARACTER_DEVICE = 6
    BLOCK_DEVICE = 7


_KINDS = {
    stat.S_IFREG: FileKind.FILE,
    stat.S_IFDIR: FileKind.DIRECTORY,
    stat.S_IFLNK: FileKind.SYMLINK,
    stat.S_IFIFO: FileKind.FIFO,
    stat.S_IFSOCK: FileKind.SOCKET,
    stat.S_IFCHR: FileKind.CHARACTER_DEVICE,
    stat.S_IFBLK: FileKind.BLOCK_DEVICE,
}


def kind_of(mode: int) -> FileKind | None:
    """What st_mode says."""
    return _KINDS.get(mode & 0o170000)


def stored_named_lsn(lsn: int) -> int:
    """What an image says; 0: it does not fit."""
    return lsn if lsn < 1 << 32 else 0


_DIRECTORY = FileKind.DIRECTORY  # looked up in its class it takes as long as ten fields
_new = tuple.__new__  # a named tuple in a third of the time that calling its class takes


class Attributes(NamedTuple):
    """What stat tells; times in ns since the epoch, ``mode`` with the type bits."""

    ino: int
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    allocated_bytes: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    birth_ns: int


class Inode:
    """One inode; see the module's invariants. Only ``store`` and ``replay`` change its fields."""

    __slots__ = (
        "aside",  # FileMap kept aside (an overwrite that was not published), or None
        "atime_ns",
        "birth_ns",
        "commit_lsn",  # record that published the content; 0: none yet
        "commit_ns",
        "committed",  # FileMap of the committed content when it differs from live, else None
        "committed_ctime_ns",
        "committed_mtime_ns",
        "ctime_ns",
        "damaged",  # a checksum error was seen in the content
        "direct",  # Slip of a program that writes past the kernel, else None
        "entries",  # directories: name -> ino, else None
        "exported",  # number of the last export (Namespace.exports) that has taken it down
        "first_writer",  # Writer, as long as none has written and it may; else None
        "flags",  # layout.INODE_INCOMPLETE of the committed content
        "gid",
        "handles",  # open handles
        "held",  # Held while what is kept aside is the version before, else None
        "ino",
        "kept_links",  # of the links those that the store keeps for itself
        "kind",
        "links",  # names that mean this inode
        "listing",  # directories that were read: the order of their names, else None
        "live",  # files: FileMap, else None
        "mode",
        "mtime_ns",
        "name",  # the last one linked since the store was opened: where to look first
        "named_lsn",  # record that gave it the last name; 0: see Namespace.opened_lsn
        "parent",  # directories: ino of the directory above (root: itself); else the last one seen
        "pins",
        "port",  # files the data plane serves by itself: its Port, else None
        "rdev",
        "subdirectories",
        "target",  # symlinks
        "uid",
        "uncommitted",
        "version",  # store.versions.Version while live content is not committed, else None
        "xattrs",  # dict or None when there are none
    )

    def __init__(  # noqa: PLR0917 - by position, see below
        self,
        ino: int,
        mode: int,
        uid: int,
        gid: int,
        rdev: int = 0,
        flags: int = 0,
        atime_ns: int = 0,
        mtime_ns: int = 0,
        ctime_ns: int = 0,
        birth_ns: int = 0,
        commit_lsn: int = 0,
        commit_ns: int = 0,
        links: int = 0,
        parent: int = 0,
        name: bytes = b"",
        live: FileMap | None = None,
        subdirectories: int = 0,
    ) -> None:
        """In the order in which ``loading`` makes them, by position: 10 000 in 6 ms, by name in
        18. Raises CorruptionError when ``mode`` names no type.
        """
        kind = _KINDS.get(mode & 0o170000)
        if kind is None:
            raise CorruptionError(f"no such file type: mode {mode:#o}", structure="inode")
        self.ino = ino
        self.mode = mode
        self.kind = kind
        self.uid = uid
        self.gid = gid
        self.rdev = rdev
        self.flags = flags
        self.atime_ns = atime_ns
        self.mtime_ns = self.committed_mtime_ns = mtime_ns
        self.ctime_ns = self.committed_ctime_ns = ctime_ns
        self.birth_ns = birth_ns
        self.commit_lsn = commit_lsn
        self.commit_ns = commit_ns
        self.links = links
        self.subdirectories = subdirectories
        self.pins = self.handles = self.kept_links = self.named_lsn = 0
        self.parent = parent
        self.name = name
        self.entries: dict[bytes, int] | None = {} if kind is _DIRECTORY else None
        self.listing: Listing | None = None
        self.target = b""
        self.xattrs: dict[bytes, bytes] | None = None
        self.live = live
        self.committed: FileMap | None = None
        self.aside: FileMap | None = None
        self.held: Held | None = None
        self.version: object | None = None
        self.port: Port | None = None
        self.direct: Slip | None = None
        self.first_writer: Writer | None = None
        self.uncommitted = False
        self.damaged = False
        self.exported = 0

    @property
    def ordered_names(self) -> Listing:
        """The order of a directory's names, from now on kept."""
        if self.listing is None:
            self.listing = Listing(entries_of(self))
        return self.listing

    @property
    def nlink(self) -> int:
        links = self.links - self.kept_links
        if self.entries is None:
            return links
        return 2 + self.subdirectories if links else 0

    @property
    def is_removed(self) -> bool:
        """Its users have given it no name: it has none, or such that the store keeps for itself."""
        return self.links == self.kept_links

    @property
    def content(self) -> FileMap:
        """The live content of a file."""
        if self.live is None:
            raise InvariantError("only files have content")
        return self.live

    @property
    def committed_content(self) -> FileMap | None:
        """The committed content; None when there is none yet."""
        if self.committed is not None:
            return self.committed
        return None if self.uncommitted else self.live

    def replace_live(self, content: FileMap) -> None:
        """Another content is the live one, for the data plane too, which was stopped."""
        self.live = content
        if self.port is not None:
            self.port.set_content(content)

    def stop_writes(self) -> None:
        """Data plane and programs ask before they write again; what they wrote so far is noted."""
        if self.direct is not None:
            self.direct.close()
        if self.port is not None:
            self._note_written(self.port.stop())
            self.first_writer = None

    def note_writes(self) -> None:
        """Let content, times and first writer show what the data plane and programs wrote."""
        if self.direct is not None:
            self.direct.absorb()
        if self.port is not None:
            self._note_written(self.port.written())

    def touch(self, now_ns: int) -> None:
        """The content changed just now."""
        self.note_writes()  # they came first
        self.mtime_ns = self.ctime_ns = now_ns

    def _note_written(self, time_ns: int) -> None:
        if time_ns:
            self.mtime_ns = self.ctime_ns = time_ns
            if self.first_writer is not None:
                self.first_writer.wrote = True
                self.first_writer = None

    def operation(
        self,
        *,
        flags: int | None = None,
        mtime_ns: int | None = None,
        ctime_ns: int | None = None,
        **changes: int,
    ) -> InodeOperation:
        """The operation that commits the attributes as they are, but for what is given.

        While the content is not committed its mtime is not either: the committed one is written.
        """
        flags = self.flags if flags is None else flags
        if mtime_ns is None:
            mtime_ns = self.mtime_ns if self.version is None else self.committed_mtime_ns
        if ctime_ns is None:
            ctime_ns = self.ctime_ns if self.version is None else self.committed_ctime_ns
        same = (self.ino, self.mode, self.uid, self.gid, self.rdev, flags, self.atime_ns)
        now = _new(InodeOperation, (*same, mtime_ns, ctime_ns, self.birth_ns))
        return now._replace(**changes) if changes else now

    def attributes(self) -> Attributes:
        self.note_writes()
        if self.live is not None:
            size, allocated = self.live.size_and_occupied
        elif self.entries is not None:
            size, allocated = DIRECTORY_SIZE_BYTES, 0
        else:
            size, allocated = len(self.target), 0
        owned = (self.ino, self.mode, self.nlink, self.uid, self.gid, self.rdev, size, allocated)
        times = (self.atime_ns, self.mtime_ns, self.ctime_ns, self.birth_ns)
        return _new(Attributes, owned + times)


def entries_of(directory: Inode) -> dict[bytes, int]:
    """The names in a directory."""
    if directory.entries is None:
        raise InvariantError("only directories have entries")
    return directory.entries


class Namespace:
    """All inodes of a store. Synchronous; one owner."""

    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.next_ino = ROOT_INO + 1
        self.lsn = 0
        """Last record that was stored since the store was opened."""
        self.opened_lsn = 0
        """Last record before: every name without a ``named_lsn`` was linked by then."""
        self.name_bytes = 0
        """Bytes of all names, symlink targets and extended attributes: sizes the image."""
        self.string_items = 0
        self.kind_counts: collections.Counter[FileKind] = collections.Counter()
        self.uncommitted: set[int] = set()
        """Inodes that no record and no image knows."""
        self.exports = 0
        """Metadata images that were begun."""
        self.directory_moves = 0
        """Names of directories that came or went: without more, all lie where they lay."""
        self._unlinked: set[int] = set()
        self.kept_directories: set[int] = set()
        """In which the store keeps names for itself (``unit_aside``)."""
        self.on_drop: Callable[[Inode], None] | None = None
        """Called with an inode that is about to be dropped."""
        self.on_name: Callable[[int, bytes], None] | None = None
        """Called with a directory and a name in it that is about to mean something else."""

    # --- finding ----------------------------------------------------------------------------

    def get(self, ino: int) -> Inode:
        """Raises NotFoundError."""
        inode = self.inodes.get(ino)
        if inode is None:
            raise NotFoundError(f"no inode {ino}")
        return inode

    def directory(self, ino: int) -> Inode:
        """Raises NotFoundError, NotDirectoryError."""
        inode = self.get(ino)
        if inode.entries is None:
            raise NotDirectoryError("not a directory")
        return inode

    def find(self, parent: int, name: bytes) -> Inode | None:
        """The inode that ``name`` means; ``.`` and ``..`` too. Raises as :meth:`directory`."""
        directory = self.inodes.get(parent)
        if directory is None or directory.entries is None:
            directory = self.directory(parent)
        ino = entries_of(directory).get(name)
        if ino is not None:
            return self.inodes[ino]
        if name == b".":
            return directory
        return self.inodes.get(directory.parent, directory) if name == b".." else None

    def is_below(self, ino: int, ancestor: int) -> bool:
        """``ino`` is ``ancestor`` or lies somewhere below it."""
        for _ in range(len(self.inodes) + 1):
            if ino == ancestor:
                return True
            inode = self.inodes.get(ino)
            if inode is None or ino in (ROOT_INO, inode.parent):
                return False
            ino = inode.parent
        raise CorruptionError("the directories form a loop", structure="namespace")

    def walk(self, ino: int) -> Iterator[Inode]:
        """The inode and everything below it, directories before their entries."""
        pending = [ino]
        seen: set[int] = set()
        while pending:
            current = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            inode = self.inodes[current]
            yield inode
            if inode.entries is not None:
                pending.extend(reversed(list(inode.entries.values())))

    # --- changing ---------------------------------------------------------------------------

    def add(self, inode: Inode) -> None:
        invariant(inode.ino not in self.inodes, "an inode number was used twice")
        self.inodes[inode.ino] = inode
        self.kind_counts[inode.kind] += 1
        if inode.ino >= self.next_ino:
            self.next_ino = inode.ino + 1

    def add_nameless(self, inode: Inode) -> None:
        """Add an inode that :meth:`reap` drops, unless it is linked first."""
        self.add(inode)
        self._unlinked.add(inode.ino)

    def withdraw(self, inode: Inode) -> None:
        """It was added and never got a name."""
        if self.inodes.pop(inode.ino, None) is not None:
            self.kind_counts[inode.kind] -= 1

    def add_uncommitted(self, inode: Inode) -> None:
        """One that only the living know, until :meth:`set_committed`."""
        inode.uncommitted = True
        self.uncommitted.add(inode.ino)
        self.add(inode)

    def set_committed(self, inode: Inode) -> None:
        """A record knows it."""
        if inode.uncommitted:
            inode.named_lsn = self.lsn
        inode.uncommitted = False
        self.uncommitted.discard(inode.ino)

    def allocate_ino(self) -> int:
        ino = self.next_ino
        self.next_ino += 1
        return ino

    def link(self, parent: int, name: bytes, ino: int) -> Inode | None:
        """``name`` now means ``ino``; returns what it meant before, which loses a link (see
        :meth:`reap`).
        """
        directory = self.directory(parent)
        inode = self.get(ino)
        if self.on_name is not None:
            self.on_name(parent, name)
        entries = entries_of(directory)
        replaced = self.unlink(parent, name) if name in entries else None
        if directory.listing is not None:
            directory.listing.add(name)
        entries[name] = ino
        self.name_bytes += len(name)
        self.string_items += 1
        inode.links += 1
        inode.parent, inode.name = parent, name
        if parent in self.kept_directories:
            inode.kept_links += 1
        else:
            inode.named_lsn = self.lsn
        self._unlinked.discard(ino)
        if inode.entries is not None:
            directory.subdirectories += 1
            self.directory_moves += 1
        return replaced

    def opened(self, lsn: int) -> None:
        """Everything up to that record was read from the media."""
        self.lsn = self.opened_lsn = lsn

    def named_since(self, inode: Inode) -> int:
        """The record by which all names of an inode were linked, or a later one."""
        return inode.named_lsn or self.opened_lsn

    def unlink(self, parent: int, name: bytes) -> Inode:
        """Take the name away; raises NotFoundError."""
        directory = self.directory(parent)
        ino = entries_of(directory).pop(name, None)
        if ino is None:
            raise NotFoundError("no such name")
        if directory.listing is not None:
            directory.listing.remove(name)
        inode = self.inodes[ino]
        inode.links -= 1
        if parent in self.kept_directories:
            inode.kept_links -= 1
        self.name_bytes -= len(name)
        self.string_items -= 1
        if inode.entries is not None:
            directory.subdirectories -= 1
            self.directory_moves += 1
        if inode.links == 0:
            self._unlinked.add(ino)
        return inode

    def set_target(self, inode: Inode, target: bytes) -> None:
        self.name_bytes += len(target) - len(inode.target)
        self.string_items += not inode.target
        inode.target = target

    def set_xattr(self, inode: Inode, name: bytes, value: bytes) -> None:
        self.remove_xattr(inode, name)
        inode.xattrs = {} if inode.xattrs is None else inode.xattrs
        inode.xattrs[name] = value
        self.name_bytes += len(name) + len(value)
        self.string_items += 1

    def remove_xattr(self, inode: Inode, name: bytes) -> None:
        """Nothing happens when there is none of that name."""
        value = None if inode.xattrs is None else inode.xattrs.pop(name, None)
        if value is not None:
            self.name_bytes -= len(name) + len(value)
            self.string_items -= 1

    def reap(self, ino: int | None = None) -> None:
        """Drop ``ino``, or all that lost their last name, if it has no name, pin or handle."""
        for candidate in [ino] if ino is not None else list(self._unlinked):
            inode = self.inodes.get(candidate)
            if inode is None or inode.links or inode.ino == ROOT_INO:
                self._unlinked.discard(candidate)
            elif inode.entries:
                raise CorruptionError("a directory lost its name", structure="namespace")
            elif not inode.pins and not inode.handles:
                self._unlinked.discard(candidate)
                self.drop(inode)

    def orphan_count(self) -> int:
        """Inodes that live without a name."""
        return len(self._unlinked)

    def drop(self, inode: Inode) -> None:
        """Nothing names or knows it: it is gone, with all that it had."""
        self.withdraw(inode)
        self.uncommitted.discard(inode.ino)
        self.kept_directories.discard(inode.ino)
        self.directory_moves += inode.entries is not None
        if self.on_drop is not None:
            self.on_drop(inode)
        self.set_target(inode, b"") if inode.target else None
        for name in list(inode.xattrs or ()):
            self.remove_xattr(inode, name)
        for content in (inode.live, inode.committed, inode.aside):
            if content is not None:
                content.close()
        inode.live = inode.committed = inode.aside = inode.held = None
        inode.version = None

    def image_bytes_estimate(self) -> int:
        """Upper bound of the namespace's part of a metadata image, bytes."""
        items_bytes = len(self.inodes) * _INODE_BYTES + self.string_items * _STRING_BYTES
        return _IMAGE_BYTES + items_bytes + self.name_bytes

"""The place where the store keeps what open checkpoint units may want back: ``/.cxlfs-sets``.

It is a directory of the store's own. No listing shows it, and no path leads into it.

Other modules put something there (``unit_keeping``), bring it back (``unit_returns``) and remove it
(``unit_garbage``).

Each unit has a directory of its own there, named by its inode number. In it
- the directory ``7`` has what names in the directory of that inode number meant when the unit
  began, and have lost since;
- ``+7`` has the files that got a name there since, and had another one before;
- ``contents`` has the contents that files had, named by their inode numbers.
A directory has one name. Where it got another one, a special file with STAND_IN_XATTR stands for
it. Inode numbers below that one's own were there before the directory came from elsewhere.

Invariants
- The directory of that name is the store's: it has PLACE_XATTR, which users neither see nor set.
  One that somebody else made gets another name before a unit keeps something.
- A name there is none for users: a file that has no other one is removed for them, and used by who
  has it open; a directory takes no new names.
"""

from __future__ import annotations

import dataclasses
import stat
from typing import TYPE_CHECKING, Final

from cxlfs.errors import NotPermittedError
from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_record import PLACE_XATTR, STAND_IN_XATTR, OpenRecord, encode_unit, unit_xattr
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cxlfs.store.namespace import Namespace
    from cxlfs.store.volume import Volume

ASIDE_NAME: Final = b".cxlfs-sets"
CONTENTS: Final = b"contents"
GIVEN: Final = b"+"
MOVED_IN: Final = b"moved-in"
"""Behind the name of what cannot get its own one again."""
_PRIVATE = 0o700
_STEM_BYTES_MAX = 200


class Aside:
    """One for each volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._namespace: Namespace = volume.namespace
        self._find_kept()

    def _find_kept(self) -> None:
        """What a crash has left."""
        place = self.directory()
        for directory in () if place is None else (place, *self._below(place)):
            self._namespace.kept_directories.add(directory.ino)
            for ino in (directory.entries or {}).values():
                self._namespace.get(ino).kept_links += 1

    def _below(self, place: Inode) -> Iterator[Inode]:
        """The units' own directories, and those in them."""
        for ino in (place.entries or {}).values():
            own = self._namespace.get(ino)
            yield own
            homes = (self._namespace.get(home) for home in (own.entries or {}).values())
            yield from (home for home in homes if home.entries is not None)

    # --- the place ----------------------------------------------------------------------------

    def directory(self) -> Inode | None:
        """The place, if there is one."""
        found = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if found is None or found.entries is None or PLACE_XATTR not in (found.xattrs or {}):
            return None
        return found

    def is_place(self, parent: int, name: bytes) -> bool:
        """The name is the store's, whether it means something or not."""
        return name == ASIDE_NAME and parent == ROOT_INO

    def make(
        self,
        parent: int | None,
        name: bytes,
        more: Callable[[int], Sequence[Operation]] = lambda _ino: (),
    ) -> Inode:
        """A directory below the place (``parent`` None: in the place itself, named by its inode
        number). ``more``: from that number, what the same record says of the root directory's
        attributes. Raises as ``Volume.commit``.
        """
        place = self.directory()
        made: list[Inode] = []
        ops: list[Operation] = []
        if place is None:
            place = self._new()
            made.append(place)
            ops += self._make_way()
            ops += [place.operation(), XattrSetOperation(place.ino, PLACE_XATTR, b"1")]
            ops.append(LinkOperation(ROOT_INO, place.ino, ASIDE_NAME))
        inode = self._new()
        made.append(inode)
        name = name or b"%d" % inode.ino
        above = place.ino if parent is None else parent
        ops += [inode.operation(), LinkOperation(above, inode.ino, name)]
        ops += more(inode.ino)
        self._store(ops, made)
        if place in made:
            self._namespace.set_xattr(place, PLACE_XATTR, b"1")
        return inode

    def _store(self, ops: list[Operation], made: list[Inode]) -> None:
        for each in made:
            self._namespace.add(each)
        try:
            self._volume.commit(ops, durable=False)
        except BaseException:
            for each in made:
                self._namespace.withdraw(each)
            raise
        self._volume.note_committed(ops)
        directories = {each.ino for each in made if each.entries is not None}
        self._namespace.kept_directories |= directories
        apply_names(self._namespace, ops)

    def make_stand_in(self, home: Inode, name: bytes, directory: Inode) -> Inode:
        """Something that stands for a directory, which has its one name elsewhere; instead of what
        had the name. Returns it. Raises as ``Volume.commit``.
        """
        made = self._new(stat.S_IFIFO)
        value = b"%d" % directory.ino
        ops: list[Operation] = []
        if name in (home.entries or {}):
            ops.append(UnlinkOperation(home.ino, name))
        ops += [
            made.operation(),
            XattrSetOperation(made.ino, STAND_IN_XATTR, value),
            LinkOperation(home.ino, made.ino, name),
        ]
        self._store(ops, [made])
        self._namespace.set_xattr(made, STAND_IN_XATTR, value)
        return made

    def make_for(self, record: OpenRecord) -> Inode:
        """The directory of a unit's own, which its record names from now on. Raises as
        ``Volume.commit``.
        """
        told: list[XattrSetOperation] = []

        def tell(ino: int) -> list[XattrSetOperation]:
            value = encode_unit(dataclasses.replace(record, kept=ino))
            told.append(XattrSetOperation(ROOT_INO, unit_xattr(record.ino), value))
            return told

        made = self.make(None, b"", tell)
        self._namespace.set_xattr(self._namespace.get(ROOT_INO), told[0].name, told[0].value)
        return made

    def _new(self, kind: int = stat.S_IFDIR) -> Inode:
        root = self._namespace.get(ROOT_INO)
        made = Inode(self._namespace.allocate_ino(), kind | _PRIVATE, root.uid, root.gid)
        now = self._volume.now()
        made.atime_ns = made.mtime_ns = made.ctime_ns = made.birth_ns = now
        made.committed_mtime_ns = made.committed_ctime_ns = now
        return made

    def _make_way(self) -> list[Operation]:
        """What somebody else gave the name gets another one."""
        blocking = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if blocking is None:
            return []
        name = free_name(self._namespace, ROOT_INO, ASIDE_NAME, b"user")
        self._volume.event(
            "unit-place",
            f"the store did not make what had the name /{ASIDE_NAME.decode()}; it has another one",
            ino=blocking.ino,
        )
        return [
            UnlinkOperation(ROOT_INO, ASIDE_NAME),
            LinkOperation(ROOT_INO, blocking.ino, name),
        ]

    # --- what lies there ------------------------------------------------------------------------

    def holds(self, directory: int) -> bool:
        """The directory of that number is the place, or one in it that the store has made."""
        return directory in self._namespace.kept_directories

    def home_of(self, directory: int) -> int:
        """The directory whose names one has; 0: it is the store's, and has none."""
        if directory not in self._namespace.kept_directories:
            return directory
        name = self._namespace.get(directory).name.removeprefix(GIVEN)
        is_home = name.isdigit() and self._namespace.get(directory).parent != self._place_ino()
        return int(name) if is_home else 0

    def _place_ino(self) -> int:
        place = self.directory()
        return 0 if place is None else place.ino

    def check_made(self, directory: Inode, name: bytes) -> None:
        """Somebody wants a new name. Raises NotPermittedError."""
        if self.is_place(directory.ino, name):
            reason = f"the store keeps the name {ASIDE_NAME.decode()} for itself"
            self._volume.event("aside-refused", reason, ino=directory.ino)
            raise NotPermittedError(reason)


def stands_for(inode: Inode) -> int:
    """The inode number of what is kept by this: itself, or the directory that it stands for."""
    value = (inode.xattrs or {}).get(STAND_IN_XATTR)
    return int(value) if value is not None and value.isdigit() else inode.ino


def free_name(namespace: Namespace, directory: int, name: bytes, kind: bytes) -> bytes:
    """A name like ``name`` that nothing in the directory has."""
    stem = name[:_STEM_BYTES_MAX] + b"." + kind
    found, number = stem, 1
    while namespace.find(directory, found) is not None:
        number += 1
        found = b"%s-%d" % (stem, number)
    return found


def apply_attributes(namespace: Namespace, ops: Iterable[Operation]) -> None:
    """What the operations of a stored record mean for extended attributes."""
    for op in ops:
        if isinstance(op, XattrSetOperation):
            namespace.set_xattr(namespace.get(op.ino), op.name, op.value)
        elif isinstance(op, XattrRemoveOperation):
            namespace.remove_xattr(namespace.get(op.ino), op.name)


def apply_names(namespace: Namespace, ops: list[Operation]) -> None:
    """What the operations of a stored record mean for names."""
    unlinked: list[int] = []
    for op in ops:
        if isinstance(op, UnlinkOperation):
            unlinked.append(namespace.unlink(op.parent, op.name).ino)
        elif isinstance(op, LinkOperation):
            namespace.link(op.parent, op.name, op.ino)
    for ino in unlinked:
        namespace.reap(ino)

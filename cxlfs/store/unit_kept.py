"""What an open checkpoint unit has kept, as the media say it: names, what was moved, where from.

Never here: keeping something (``unit_keeping``), bringing it back (``unit_returns``).

Invariants
- Nothing is remembered: each answer holds for the names as they are, in the middle of a way back,
  too.
- A directory lies *inside* if it was in the unit when the unit began, or has come into it since:
  its names go back one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cxlfs.store.unit_aside import CONTENTS, GIVEN, stands_for
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.unit_record import OpenRecord


class KeptName(NamedTuple):
    """What had a name in the directory of the number ``parent``, and where it is kept."""

    home: Inode
    name: bytes
    parent: int
    inode: Inode


class Kept:
    """Of one unit; ``top``: the directory that it keeps things in, None: nothing is kept."""

    def __init__(self, namespace: Namespace, aside: Aside, record: OpenRecord) -> None:
        self._namespace = namespace
        self._record = record
        self._place = aside.directory()
        self.top = self._find()

    def _find(self) -> Inode | None:
        kept = self._namespace.inodes.get(self._record.kept)
        if kept is None or kept.entries is None or self._place is None:
            return None
        return kept if kept.links and kept.parent == self._place.ino else None

    # --- names --------------------------------------------------------------------------------

    def names(self) -> Iterator[KeptName]:
        """All that were, with what stands for a directory."""
        return self._names_of(self.top, b"")

    def given(self) -> list[KeptName]:
        """Those that were given."""
        return list(self._names_of(self.top, GIVEN))

    def _names_of(self, top: Inode | None, kind: bytes) -> Iterator[KeptName]:
        for name, ino in list((top.entries or {}).items()) if top is not None else ():
            home, digits = self._namespace.get(ino), name.removeprefix(kind)
            is_kind = len(digits) == len(name) - len(kind) and digits.isdigit()
            if not is_kind or home.entries is None:
                continue
            for each, child in list(home.entries.items()):
                yield KeptName(home, each, int(digits), self._namespace.get(child))

    def at(self, parent: int, name: bytes) -> Inode | None:
        """What the unit keeps of that name."""
        home = self._home(b"%d" % parent)
        return None if home is None else self._namespace.find(home.ino, name)

    def _home(self, name: bytes) -> Inode | None:
        return None if self.top is None else self._namespace.find(self.top.ino, name)

    def given_at(self, parent: int, name: bytes) -> tuple[Inode, bytes] | None:
        """Where it says that this name was given."""
        home = self._home(GIVEN + b"%d" % parent)
        return (home, name) if home is not None and name in (home.entries or {}) else None

    def contents(self) -> list[tuple[bytes, Inode]]:
        """Copies of contents, by the numbers of their files."""
        home = self._home(CONTENTS)
        entries = ((home.entries or {}) if home is not None else {}).items()
        return [(name, self._namespace.get(ino)) for name, ino in entries]

    # --- copies -------------------------------------------------------------------------------

    def keeps(self) -> Callable[[Inode], bool]:
        """What says whether the unit keeps a name of a file now, or a copy of it."""
        inos: set[int] = set()
        copies: dict[int, int] = {}
        for kept in self.names():
            inos.add(kept.inode.ino)
            copies[kept.inode.birth_ns] = max(kept.inode.ino, copies.get(kept.inode.birth_ns, 0))
        return lambda file: file.ino in inos or copies.get(file.birth_ns, 0) > file.ino

    def is_elsewhere(self, kept: KeptName, records: Iterable[OpenRecord]) -> bool:
        """One of these units keeps a copy of the file under that name."""
        for record in records:
            place = self._namespace.inodes.get(record.kept)
            home = (place.entries or {}).get(b"%d" % kept.parent) if place is not None else None
            found = None if home is None else self._namespace.find(home, kept.name)
            if found is not None and is_copy(found, kept.inode):
                return True
        return False

    # --- directories --------------------------------------------------------------------------

    def stand_ins(self) -> dict[int, KeptName]:
        """What stands for directories that have their names elsewhere, by their numbers."""
        found = ((stands_for(kept.inode), kept) for kept in self.names())
        return {ino: kept for ino, kept in found if ino != kept.inode.ino}

    def kept_directories(self) -> list[KeptName]:
        """Those that have no other name now."""
        return [kept for kept in self.names() if kept.inode.entries is not None]

    def is_inside(self, ino: int, stand_ins: dict[int, KeptName] | None = None) -> bool:
        """See the module. ``stand_ins``: what they stand for counts as being where it was."""
        places = stand_ins or {}
        for _ in range(len(self._namespace.inodes) + 1):
            inode = self._namespace.inodes.get(ino)
            if ino == self._record.ino:
                return True
            if inode is None or ino == ROOT_INO:
                return False
            if ino in places:
                ino = places[ino].parent
            elif inode.parent in self._namespace.kept_directories:
                return self._is_home(inode.parent)
            else:
                ino = inode.parent
        return False

    def _is_home(self, ino: int) -> bool:
        return self.top is not None and self._namespace.get(ino).parent == self.top.ino

    def regions(self, stand_ins: dict[int, KeptName]) -> dict[int, int]:
        """Of each directory that something stands for: the first inode number that was not there
        when the unit began, or when the directory came from elsewhere.
        """
        found: dict[int, int] = {}
        for ino in stand_ins:
            came, at = None, ino
            for _ in range(len(stand_ins) + 1):
                above = self._moved_above(stand_ins[at].parent, stand_ins)
                if above is None:
                    came = None if self._is_below_top(stand_ins[at].parent) else at
                    break
                at = above
            found[ino] = self._record.first_ino if came is None else stand_ins[came].inode.ino
        for given in self.given():
            ino = stands_for(given.inode)
            if ino != given.inode.ino:
                found.setdefault(ino, self._record.first_ino)
        return found

    def _moved_above(self, ino: int, stand_ins: dict[int, KeptName]) -> int | None:
        """The nearest directory at or above this one that something stands for."""
        current = self._namespace.inodes.get(ino)
        while current is not None and current.ino not in {ROOT_INO, self._record.ino}:
            if current.ino in stand_ins:
                return current.ino
            current = self._namespace.inodes.get(current.parent)
        return None

    def _is_below_top(self, ino: int) -> bool:
        return self._namespace.is_below(ino, self._record.ino) or self.is_inside(ino)


def is_copy(copy: Inode, inode: Inode) -> bool:
    """It is what the file was when that left a unit: made later, born at the same time."""
    return copy.live is not None and copy.ino > inode.ino and copy.birth_ns == inode.birth_ns

"""The store as it was when a commit was the last one: what a name meant, and what a file held.

The state is laid together from what lives and from rows of history. Other modules keep rows
(``past``), and make a view (``fuse.past_view``) or a pin (``pins``) of a state.

Invariants
- Nothing is shown that was not so: a name or a content of which that is not certain is absent.
- Names, contents and targets are those of that commit. Owner, mode, times and extended attributes
  are those at the end of the version: a change of them alone leaves no row.
- Nothing is changed or held. The next commit may take a content away; a reader makes a copy of it
  by reference first (:meth:`Fact.copy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from cxlfs.errors import NotFoundError
from cxlfs.format import layout
from cxlfs.native.extents import Counting
from cxlfs.store.hidden import is_unlisted
from cxlfs.store.namespace import DIRECTORY_SIZE_BYTES, Attributes, FileKind
from cxlfs.store.past_rows import LAST_NAMES, Row
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.past import Past
    from cxlfs.store.volume import Volume

TIME_NS_MIN = 10**17
"""A number that is larger is a time (1973), not a commit."""
SHOWN_NS = 1_000_000
"""Times are shown without what is smaller."""


class Fact(NamedTuple):
    """What something was. ``content``: of a file; it belongs to ``source``, a row or an inode."""

    ino: int
    source: Row | Inode
    content: FileMap | None

    @property
    def kind(self) -> FileKind:
        return self.source.kind

    @property
    def uid(self) -> int:
        return self.source.uid

    @property
    def is_incomplete(self) -> bool:
        return bool(self.source.flags & layout.INODE_INCOMPLETE)

    @property
    def commit_lsn(self) -> int:
        """The record that published the content; 0: it was made with its inode."""
        source = self.source
        return source.born_lsn if isinstance(source, Row) else source.commit_lsn

    @property
    def mtime_ns(self) -> int:
        source = self.source
        return source.mtime_ns if isinstance(source, Row) else source.committed_mtime_ns

    @property
    def xattrs(self) -> dict[bytes, bytes]:
        """Those that users see."""
        hidden = layout.XATTR_HIDDEN_PREFIX
        found = self.source.xattrs or {}
        return {name: value for name, value in found.items() if not name.startswith(hidden)}

    def attributes(self) -> Attributes:
        """What stat tells."""
        source = self.source
        size, allocated = len(source.target), 0
        if self.content is not None:
            size, allocated = self.content.size_and_occupied
        elif self.kind is FileKind.DIRECTORY:
            size = DIRECTORY_SIZE_BYTES
        links = 2 if self.kind is FileKind.DIRECTORY else 1
        owned = (self.ino, source.mode, links, source.uid, source.gid, source.rdev, size, allocated)
        mtime_ns = self.mtime_ns
        return Attributes(*owned, source.atime_ns, mtime_ns, mtime_ns, source.birth_ns)

    def copy(self) -> FileMap | None:
        """Return the content once more. Its bytes stay on the media until it is closed, and count
        as used.
        """
        return None if self.content is None else self.content.clone(Counting.HELD)


class State(Protocol):
    """Names and facts of one state."""

    def names(self, directory: int) -> dict[bytes, int]:
        """The names in a directory, and the inodes that they meant."""
        ...

    def find(self, directory: int, name: bytes) -> int | None:
        """The inode that a name in a directory meant."""
        ...

    def fact(self, ino: int) -> Fact | None:
        """What an inode was; None: that is not known any more."""
        ...

    def facts(self, inos: set[int]) -> dict[int, Fact]:
        """The same of many, by number, without those of which it is not known."""
        ...


class PastState:
    """The state when ``commit`` was the last one."""

    def __init__(self, volume: Volume, past: Past, commit: int) -> None:
        self.commit = commit
        self._namespace = volume.namespace
        self._past = past

    def names(self, directory: int) -> dict[bytes, int]:
        found = dict(self._ended(directory, None))
        living = self._namespace.inodes.get(directory)
        if living is not None:
            entries = (living.entries or {}).items()
            found |= {name: ino for name, ino in entries if self._meant(living, name, ino)}
        return found

    def find(self, directory: int, name: bytes) -> int | None:
        living = self._namespace.inodes.get(directory)
        ino = None if living is None else (living.entries or {}).get(name)
        if living is not None and ino is not None and self._meant(living, name, ino):
            return ino
        return dict(self._ended(directory, name)).get(name)

    def follow(self, path: Iterable[bytes]) -> int | None:
        """The inode that a path meant; None: that is not known any more, or it meant none."""
        ino: int | None = ROOT_INO
        for name in path:
            ino = None if ino is None else self.find(ino, name)
        return ino

    def _meant(self, directory: Inode, name: bytes, ino: int) -> bool:
        """A name that means an inode did so then."""
        inode = self._namespace.get(ino)
        since = self._namespace.named_since(inode)
        return not inode.uncommitted and since <= self.commit and not is_unlisted(directory, name)

    def _ended(self, directory: int, name: bytes | None) -> Iterator[tuple[bytes, int]]:
        """Names in a directory, or one of them, that do not mean any more what they meant then."""
        past, commit = self._past, self.commit
        rows = past.died_in(directory) if name is None else past.versions_of(directory, name)
        for row in rows:
            if row.death in LAST_NAMES and row.named_lsn <= commit < row.died_lsn:
                yield row.name, row.ino
        for end in past.name_ends.of_directory(directory):
            if name in (None, end.name) and end.since <= commit < end.until:
                yield end.name, end.ino

    def fact(self, ino: int) -> Fact | None:
        return self._living(ino) or self._died(ino, self._past.of_inode(ino))

    def facts(self, inos: set[int]) -> dict[int, Fact]:
        living = {ino: self._living(ino) for ino in inos}
        found = {ino: fact for ino, fact in living.items() if fact is not None}
        rows = self._past.of_inodes(inos - found.keys())
        died = {ino: self._died(ino, those) for ino, those in rows.items()}
        return found | {ino: fact for ino, fact in died.items() if fact is not None}

    def _living(self, ino: int) -> Fact | None:
        inode = self._namespace.inodes.get(ino)
        if inode is None or inode.uncommitted or inode.is_removed:
            return None
        if inode.kind is not FileKind.FILE:
            return Fact(ino, inode, None)
        content = inode.committed_content
        if content is None or inode.damaged or self._past.placed(inode)[0] > self.commit:
            return None
        return Fact(ino, inode, content)

    def _died(self, ino: int, rows: list[Row]) -> Fact | None:
        for row in rows:
            if row.kind is not FileKind.FILE:
                return Fact(ino, row, None)
            if row.was_there(self.commit) and row.data is not None:
                return Fact(ino, row, row.data)
        return None


class Moments:
    """Which commit a number or a time means."""

    def __init__(self, volume: Volume, past: Past) -> None:
        self._volume = volume
        self._past = past
        self._earlier: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
        """Times and commits before this opening, ordered; found when they are first needed."""

    def commit(self, at: int) -> int:
        """Return the commit that was the last one at a time, in ns, or that has a number.

        Raises:
            NotFoundError: the store has no such commit, or knows of none that early.
        """
        last = self._volume.last_lsn
        if at < TIME_NS_MIN:
            if not 0 < at <= last:
                raise NotFoundError(f"no commit {at}: the last one is {last}")
            return at
        if at % SHOWN_NS == 0:
            at += SHOWN_NS - 1
        if at > self._volume.now():
            raise NotFoundError("that time is to come")
        found = self._volume.commit_times.last_until(at)
        if found is not None:
            return found
        times, commits = self._before()
        place = int(np.searchsorted(times, at, side="right"))
        if not place:
            raise NotFoundError("the store knows of no commit that early")
        return int(commits[place - 1])

    def _before(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        if self._earlier is None:
            namespace = self._volume.namespace
            known = [(row.died_ns, row.died_lsn) for row in self._past]
            known += [(row.born_ns, row.born_lsn) for row in self._past]
            known += [(inode.commit_ns, inode.commit_lsn) for inode in namespace.inodes.values()]
            pairs = np.array(known, np.int64).reshape(-1, 2)
            pairs = pairs[(pairs[:, 1] > 0) & (pairs[:, 1] <= namespace.opened_lsn)]
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
            self._earlier = pairs[:, 0], np.maximum.accumulate(pairs[:, 1])
        return self._earlier

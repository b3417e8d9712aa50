"""Rules that every journal record obeys: what each operation may say of the state before it.

Two users share them. ``admission`` asks before a record is stored, and changes nothing. ``replay``
asks before it applies an operation. Other modules check the shape of operations
(``format.operations``), and the engine checks extents and references.

Invariants
- A record that the rules accept is applied by replay, and leaves a state that an image can hold.
- The rules read the state through the methods of :class:`RecordRules` only, and change nothing.
"""

from __future__ import annotations

import abc
import stat

from cxlfs.errors import CorruptionError, InvalidArgumentError, NotDirectoryError, NotFoundError
from cxlfs.store.namespace import kind_of
from cxlfs.types import ROOT_INO


class RecordRules(abc.ABC):
    """The rules, over a state that subclasses describe. A method raises NamespaceError or
    CorruptionError if its operation contradicts the state.
    """

    __slots__ = ("_links_made",)

    def __init__(self) -> None:
        self._links_made: set[int] = set()
        """Symbolic links that the record has made, and that have no target yet."""

    # --- the state ----------------------------------------------------------------------------

    @abc.abstractmethod
    def mode_of(self, ino: int) -> int | None:
        """Return the mode of an inode; None if there is none."""

    @abc.abstractmethod
    def links_of(self, ino: int) -> int:
        """Return how many names mean an inode that exists."""

    @abc.abstractmethod
    def parent_of(self, ino: int) -> int:
        """Return the directory that a directory was named in last; 0 if it never was."""

    @abc.abstractmethod
    def meaning_of(self, parent: int, name: bytes) -> int:
        """Return the inode that a name in an existing directory means; 0 if none."""

    @abc.abstractmethod
    def has_names(self, ino: int) -> bool:
        """True if an existing directory has a name in it."""

    @abc.abstractmethod
    def has_aside(self, ino: int) -> bool:
        """True if an existing file has a version kept aside."""

    # --- one operation ------------------------------------------------------------------------

    def inode(self, ino: int, mode: int) -> bool:
        """Check that an inode can be made, or have its attributes set. True: it is made."""
        known = self.mode_of(ino)
        if known is not None:
            if stat.S_IFMT(known ^ mode):
                raise InvalidArgumentError("an inode cannot change its type")
            return False
        if kind_of(mode) is None:
            raise CorruptionError(f"no such file type: mode {mode:#o}", structure="inode")
        if stat.S_ISLNK(mode):
            self._links_made.add(ino)
        return True

    def link(self, parent: int, ino: int) -> None:
        """Check that a name in ``parent`` can mean ``ino``."""
        self._require_directory(parent)
        if stat.S_ISDIR(self._require(ino)) and (self.links_of(ino) or self._is_below(parent, ino)):
            raise InvalidArgumentError("a directory has one name and cannot lie below itself")

    def unlink(self, parent: int, name: bytes) -> int:
        """Check that a name can be taken away; returns the inode that it means."""
        self._require_directory(parent)
        ino = self.meaning_of(parent, name)
        if not ino:
            raise NotFoundError("no such name")
        return ino

    def target(self, ino: int) -> None:
        """Check that an inode can have the target of a symbolic link."""
        if not stat.S_ISLNK(self._require(ino)):
            raise InvalidArgumentError("not a symbolic link")
        self._links_made.discard(ino)

    def attribute(self, ino: int) -> None:
        """Check that an extended attribute of an inode can be set or removed."""
        self._require(ino)

    def content(self, ino: int) -> None:
        """Check that an inode can have content."""
        if not stat.S_ISREG(self._require(ino)):
            raise InvalidArgumentError("not a file")

    def promote(self, ino: int) -> None:
        """Check that the version kept aside of an inode can become its content."""
        self.content(ino)
        if not self.has_aside(ino):
            raise InvalidArgumentError("there is no version to promote")

    # --- the record as a whole ----------------------------------------------------------------

    def end(self) -> None:
        """Check what must hold at the end of a record, but for directories without a name."""
        made, self._links_made = self._links_made, set()
        for ino in made:
            if self.mode_of(ino) is not None and self.links_of(ino):
                raise InvalidArgumentError("a symbolic link has no target")

    def nameless(self, ino: int) -> None:
        """Check that an inode may go, which has no name at the end of a record."""
        if stat.S_ISDIR(self._require(ino)) and self.has_names(ino):
            raise CorruptionError("a directory lost its name", structure="namespace")

    # --- parts of rules -----------------------------------------------------------------------

    def _require(self, ino: int) -> int:
        mode = self.mode_of(ino)
        if mode is None:
            raise NotFoundError(f"no inode {ino}")
        return mode

    def _require_directory(self, ino: int) -> None:
        if not stat.S_ISDIR(self._require(ino)):
            raise NotDirectoryError("not a directory")

    def _is_below(self, ino: int, ancestor: int) -> bool:
        """True if a directory is ``ancestor``, or is somewhere below it."""
        while ino not in (ancestor, ROOT_INO, 0):
            ino = self.parent_of(ino)
        return ino == ancestor

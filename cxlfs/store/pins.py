"""Pins: what a path meant at a commit stays readable until its owner takes the pin away.

A pin is a copy by reference, of ordinary files in a directory of the store's own. So what keeps it
through overwrites, full stores, crashes, the cleaner and rollovers is what keeps every file. Its
data counts as used. Other modules know earlier states (``past_state``), and show pins to users
(``fuse.past_view``).

The directory is ``/.cxlfs``. It has one directory for each user, whose name is the user's number,
and in it one for each pin. Below that is the pinned path, with the directories above it.

Invariants
- The directory is the store's: it has PLACE_XATTR, which users neither see nor set. What somebody
  else has called so gets another name when the store is opened.
- No request leads there: the daemon answers for its name, and verbs on names refuse it.
- A pin is made in UNFINISHED, and one record moves it to its name. One record moves it back there
  when it is taken away. An opening removes what it finds there.
- A user pins what is theirs, up to limits of their own. No user meets a pin of another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import stat
import struct
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from cxlfs.errors import (
    ExistsError,
    InvalidArgumentError,
    NotFoundError,
    NotPermittedError,
    StaleError,
    TooManyPinsError,
)
from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.format.operations import LinkOperation, Operation, UnlinkOperation, XattrSetOperation
from cxlfs.store.hidden import PAST_NAME, is_past
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.past_state import Fact, PastState, State
from cxlfs.store.unit_aside import apply_names, free_name
from cxlfs.store.unit_hooks import NoUnits
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.names import Names
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

PLACE_XATTR: Final = XATTR_HIDDEN_PREFIX + b"pins"
PIN_XATTR: Final = XATTR_HIDDEN_PREFIX + b"pin"
UNFINISHED: Final = b"unfinished"
PINS_MAX = 64
NAMES_MAX = 100_000
"""For each user but root: pins, and files and directories in all of them."""
NAME_BYTES_MAX = 64
_NAME = re.compile(rb"[A-Za-z][A-Za-z0-9._+-]*\Z")
_RESERVED = frozenset({b"now"})
_PRIVATE, _OPEN = 0o700, 0o755
_AT_ONCE = 16
"""So many names are made or removed in one step."""
_RECORD = struct.Struct("<B7xQqQQQQ")
_VERSION = 1
_ROOT_UID = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pin:
    """A pin. ``path``: what is pinned, from the top; ``commit``: as of which commit. ``count``:
    files and directories in it, of ``size_bytes``; ``left_out``: what is another user's;
    ``missing``: what history did not have. ``directory``: where the store keeps it.
    """

    name: bytes
    uid: int
    path: bytes
    commit: int
    made_ns: int
    count: int
    size_bytes: int
    left_out: int
    missing: int
    directory: Inode

    @property
    def value(self) -> bytes:
        """Of PIN_XATTR."""
        numbers = (self.commit, self.made_ns, self.count, self.size_bytes)
        return _RECORD.pack(_VERSION, *numbers, self.left_out, self.missing) + self.path

    @classmethod
    def of(cls, name: bytes, uid: int, directory: Inode) -> Pin | None:
        """What a directory says; None: it is no pin, or of a later kind."""
        value = (directory.xattrs or {}).get(PIN_XATTR, b"")
        if len(value) < _RECORD.size or value[0] != _VERSION:
            return None
        _, commit, made_ns, count, size, left_out, missing = _RECORD.unpack_from(value)
        path = value[_RECORD.size :]
        numbers = (commit, made_ns, count, size, left_out, missing)
        return cls(name, uid, path, *numbers, directory)


class PinState:
    """What a pin holds, as a state: the paths are those of the mount."""

    def __init__(self, volume: Volume) -> None:
        self._namespace = volume.namespace

    def names(self, directory: int) -> dict[bytes, int]:
        found = self._namespace.inodes.get(directory)
        return dict(found.entries or {}) if found is not None else {}

    def find(self, directory: int, name: bytes) -> int | None:
        found = self._namespace.inodes.get(directory)
        return (found.entries or {}).get(name) if found is not None else None

    def fact(self, ino: int) -> Fact | None:
        inode = self._namespace.inodes.get(ino)
        if inode is None or not inode.links:
            return None
        return Fact(ino, inode, inode.committed_content)

    def facts(self, inos: set[int]) -> dict[int, Fact]:
        found = {ino: self.fact(ino) for ino in inos}
        return {ino: fact for ino, fact in found.items() if fact is not None}


@dataclasses.dataclass(slots=True)
class Made:
    """How far a pin is: names, bytes, what is another user's, what history does not have."""

    names_left: float
    count: int = 0
    size_bytes: int = 0
    left_out: int = 0
    missing: int = 0

    def count_one(self) -> None:
        """Count a name. Raises TooManyPinsError."""
        if self.count >= self.names_left:
            raise TooManyPinsError(f"{NAMES_MAX} names in the pins of one user")
        self.count += 1


class Pins:
    """One for each volume."""

    def __init__(self, volume: Volume, versions: Versions, names: Names) -> None:
        self._volume = volume
        self._versions = versions
        self._names = names
        self._namespace = volume.namespace
        self._directories: set[int] = set()
        """All directories of the place, and the place."""
        self._place: Inode | None = None
        self._working = False
        self._being_made: set[int] = set()
        self._has_garbage = True
        """Ends what programs store by themselves; they ask for more."""
        names.check_place = self._check

    # --- the place --------------------------------------------------------------------------

    def recover(self) -> None:
        """Find the place when the store is opened, and give another name to what is not the
        store's. Raises as ``Volume.commit``.
        """
        found = self._namespace.find(ROOT_INO, PAST_NAME)
        if found is None:
            return
        if found.entries is not None and PLACE_XATTR in (found.xattrs or {}):
            self._adopt(found)
        elif not self._volume.read_only:
            name = free_name(self._namespace, ROOT_INO, PAST_NAME, b"user")
            ops: list[Operation] = [
                UnlinkOperation(ROOT_INO, PAST_NAME),
                LinkOperation(ROOT_INO, found.ino, name),
            ]
            self._volume.commit(ops)
            apply_names(self._namespace, ops)
            message = f"the store keeps the name /.cxlfs; what had it is /{name.decode()} now"
            self._volume.event("past-place", message, ino=found.ino)

    def _adopt(self, place: Inode) -> None:
        self._place = place
        pending = [place]
        while pending:
            directory = pending.pop()
            self._directories.add(directory.ino)
            for ino in (directory.entries or {}).values():
                inode = self._namespace.inodes.get(ino)
                if inode is not None and inode.entries is not None:
                    pending.append(inode)

    def holds(self, ino: int) -> bool:
        """True for a directory of the place."""
        return ino in self._directories

    def _check(self, parent: int, name: bytes) -> None:
        """Somebody wants to change a name. Raises NotPermittedError."""
        if (parent in self._directories or is_past(parent, name)) and not self._working:
            raise NotPermittedError("the store keeps .cxlfs for itself")

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """The store changes names there itself; no checkpoint unit begins."""
        units, self._versions.units = self._versions.units, NoUnits()
        self._working = True
        try:
            yield
        finally:
            self._working = False
            self._versions.units = units

    def _below(self, directory: Inode, name: bytes, mode: int = _PRIVATE, uid: int = 0) -> Inode:
        """A directory of the place, made if there is none."""
        found = self._namespace.find(directory.ino, name)
        if found is None:
            found = self._names.make(
                directory.ino, name, stat.S_IFDIR | mode, uid, 0, rdev=0, target=b""
            )
            self._directories.add(found.ino)
        return found

    def _directory_of_place(self) -> Inode:
        if self._place is None:
            root = self._namespace.get(ROOT_INO)
            made = self._names.make(
                *(ROOT_INO, PAST_NAME, stat.S_IFDIR | _PRIVATE, root.uid, root.gid),
                rdev=0,
                target=b"",
                dress=lambda inode: self._namespace.set_xattr(inode, PLACE_XATTR, b"1"),
            )
            self._directories.add(made.ino)
            self._place = made
        return self._place

    # --- looking ----------------------------------------------------------------------------

    def of_user(self, uid: int) -> list[Pin]:
        """The pins of a user, by name."""
        if self._place is None:
            return []
        directory = self._namespace.find(self._place.ino, b"%d" % uid)
        if directory is None:
            return []
        entries = sorted((directory.entries or {}).items())
        found = (Pin.of(name, uid, self._namespace.get(ino)) for name, ino in entries)
        return [pin for pin in found if pin is not None]

    def users(self) -> list[int]:
        """Users that have pins, or had some."""
        entries = self._place.entries if self._place is not None else None
        return sorted(int(name) for name in entries or () if name.isdigit())

    def find(self, uid: int, name: bytes) -> Pin | None:
        """A pin of a user."""
        if self._place is None:
            return None
        directory = self._namespace.find(self._place.ino, b"%d" % uid)
        inode = None if directory is None else self._namespace.find(directory.ino, name)
        return None if inode is None else Pin.of(name, uid, inode)

    def holding(self, paths: Sequence[bytes], births: set[int]) -> list[Pin]:
        """Pins with something of these paths, or below them, or of inodes made at these times."""
        found = []
        for pin in (pin for uid in self.users() for pin in self.of_user(uid)):
            has_path = any(self._has(pin, path) for path in paths)
            if has_path or any(inode.birth_ns in births for inode in self._contents(pin)):
                found.append(pin)
        return found

    def _has(self, pin: Pin, path: bytes) -> bool:
        inode: Inode | None = pin.directory
        for part in filter(None, path.split(b"/")):
            if inode is None or inode.entries is None:
                return False
            inode = self._namespace.find(inode.ino, part)
        return inode is not None

    def _contents(self, pin: Pin) -> Iterator[Inode]:
        """Everything in a pin that was copied: from its path on."""
        inode: Inode | None = pin.directory
        for part in filter(None, pin.path.split(b"/")):
            inode = self._namespace.find(inode.ino, part) if inode is not None else None
        return iter(()) if inode is None else self._namespace.walk(inode.ino)

    # --- making -----------------------------------------------------------------------------

    def check_new(self, uid: int, name: bytes) -> None:
        """Raises InvalidArgumentError, ExistsError, TooManyPinsError: the name can be no pin."""
        if len(name) > NAME_BYTES_MAX or not _NAME.match(name) or name in _RESERVED:
            raise InvalidArgumentError("a name of a pin has letters, digits and . _ + - only")
        if self.find(uid, name) is not None:
            raise ExistsError("there is a pin of that name")
        if uid != _ROOT_UID and len(self.of_user(uid)) >= PINS_MAX:
            raise TooManyPinsError(f"{PINS_MAX} pins of one user")

    def make(
        self, uid: int, name: bytes, path: bytes, state: PastState
    ) -> Generator[Made, None, None]:
        """Pin what a path meant in a state. Each step is short; others may have their turn between
        two. The pin is there, and durable, when the last step is done.

        Raises:
            NotFoundError: the state has no such path.
            NotPermittedError: it is another user's.
            StaleError: a part of it is not known any more.
            InvalidArgumentError, ExistsError, TooManyPinsError: see :meth:`check_new`.
            NoSpaceError, MediaError, ReadOnlyError: nothing is pinned.
        """
        self._volume.require_writable()
        self.check_new(uid, name)
        parts = [part for part in path.split(b"/") if part]
        fact = _fact_at(state, parts)
        if uid not in (_ROOT_UID, fact.uid):
            raise NotPermittedError("only the owner pins a path")
        names_left = NAMES_MAX - sum(pin.count for pin in self.of_user(uid))
        made = Made(math.inf if uid == _ROOT_UID else names_left)
        with self._new_top(uid) as top:
            for _ in self._fill(top, parts, fact, state, uid, made):
                yield made
            with self._at_work():
                self._finish(top, uid, name, b"/" + b"/".join(parts), state.commit, made)
        yield made

    def copy_to(
        self, path: bytes, state: PastState, parent: int, name: bytes
    ) -> Generator[Made, None, None]:
        """Make what a path meant in a state, and all below it, a new name outside the place. Steps
        as in :meth:`make`. The name is there, whole and durable, when the last step is done.

        Raises:
            NotFoundError, StaleError: the path, or a part of it, is not known in that state.
            ExistsError: the name means something.
            NoSpaceError, MediaError, ReadOnlyError: nothing has the name.
        """
        self._volume.require_writable()
        fact = _fact_at(state, [part for part in path.split(b"/") if part])
        made = Made(math.inf)
        with self._new_top(_ROOT_UID) as top:
            for _ in self._fill(top, [name], fact, state, _ROOT_UID, made):
                yield made
            if made.missing:
                raise StaleError(f"the contents of {made.missing} names are not known any more")
            copy = self._namespace.get((top.entries or {})[name])
            with self._at_work():
                self._names.rename(top.ino, name, parent, name, no_replace=True)
            self._directories.difference_update(
                each.ino for each in self._namespace.walk(copy.ino) if each.entries is not None
            )
            self._has_garbage = True
        yield made

    @contextlib.contextmanager
    def _new_top(self, uid: int) -> Iterator[Inode]:
        """A directory in which something is made. What is in it at the end is removed."""
        with self._at_work():
            unfinished = self._below(self._directory_of_place(), UNFINISHED)
            number = 1
            while self._namespace.find(unfinished.ino, b"%d" % number) is not None:
                number += 1
            top = self._below(unfinished, b"%d" % number, _OPEN, uid)
        self._being_made.add(top.ino)
        try:
            yield top
        except BaseException:
            self._has_garbage = True
            raise
        finally:
            self._being_made.discard(top.ino)

    def _fill(
        self,
        top: Inode,
        parts: list[bytes],
        fact: Fact,
        state: State,
        uid: int,
        made: Made,
    ) -> Iterator[None]:
        """Make the path below ``top``, and what is below that; a step of some names at a time."""
        with self._at_work():
            for part in parts[:-1]:
                top = self._below(top, part, _OPEN, uid)
            if not parts:
                self._dress_directory(top, fact)
                place = top
            else:
                place = self._copy(top, parts[-1], fact, made)
        pending = [(place, fact.ino)] if fact.kind is FileKind.DIRECTORY else []
        step = 0
        while pending:
            place, directory = pending.pop()
            for each, ino in sorted(state.names(directory).items()):
                step += 1
                if step % _AT_ONCE == 0:
                    yield
                below = state.fact(ino)
                if below is None:
                    made.missing += 1
                elif uid not in (_ROOT_UID, below.uid):
                    made.left_out += 1
                else:
                    with self._at_work():
                        copy = self._copy(place, each, below, made)
                    if copy.entries is not None:
                        pending.append((copy, ino))
        yield

    def _copy(self, parent: Inode, name: bytes, fact: Fact, made: Made) -> Inode:
        source = fact.source
        made.count_one()
        if fact.kind is not FileKind.FILE:
            copy = self._names.make(
                *(parent.ino, name, source.mode, source.uid, source.gid),
                rdev=source.rdev,
                target=source.target,
                dress=lambda inode: self._dress(inode, fact),
            )
            if copy.entries is not None:
                self._directories.add(copy.ino)
            return copy
        if fact.content is None:
            raise StaleError("the content is not known any more")
        copy = self._names.create(parent.ino, name, source.mode, source.uid, source.gid)
        try:
            self._dress(copy, fact)
            self._versions.sharing.whole(fact.content, copy.content)
            self._names.require_metadata_room()
            self._versions.publish(copy, incomplete=fact.is_incomplete)
        except BaseException:
            if copy.uncommitted or not copy.commit_lsn:
                self._names.unlink(parent.ino, name)
            raise
        self._versions.finish(copy)
        made.size_bytes += copy.content.size
        return copy

    def _dress(self, inode: Inode, fact: Fact) -> None:
        """Attributes as they were. The time of birth tells whose copy it is."""
        source = fact.source
        inode.mode, inode.uid, inode.gid = source.mode, source.uid, source.gid
        inode.atime_ns, inode.birth_ns = source.atime_ns, source.birth_ns
        inode.mtime_ns = inode.committed_mtime_ns = fact.mtime_ns
        for name, value in fact.xattrs.items():
            self._namespace.set_xattr(inode, name, value)

    def _dress_directory(self, top: Inode, fact: Fact) -> None:
        """The pin is of the whole mount."""
        changed = top.operation(birth_ns=fact.source.birth_ns)
        self._volume.commit([changed])
        top.birth_ns = fact.source.birth_ns

    def _finish(
        self, top: Inode, uid: int, name: bytes, path: bytes, commit: int, made: Made
    ) -> None:
        self.check_new(uid, name)  # others had their turn
        numbers = (self._volume.now(), made.count, made.size_bytes, made.left_out, made.missing)
        pin = Pin(name, uid, path, commit, *numbers, top)
        self._volume.commit([XattrSetOperation(top.ino, PIN_XATTR, pin.value)], durable=False)
        self._namespace.set_xattr(top, PIN_XATTR, pin.value)
        user = self._below(self._directory_of_place(), b"%d" % uid)
        self._names.rename(top.parent, top.name, user.ino, name)

    # --- taking away ------------------------------------------------------------------------

    def remove(self, uid: int, name: bytes) -> None:
        """Take a pin away: one record, durable on return. :meth:`step` gives its space back.

        Raises NotFoundError, ReadOnlyError, MediaError.
        """
        self._volume.require_writable()
        pin = self.find(uid, name)
        if pin is None:
            raise NotFoundError("no such pin")
        with self._at_work():
            unfinished = self._below(self._directory_of_place(), UNFINISHED)
            number = pin.directory.ino
            self._names.rename(pin.directory.parent, name, unfinished.ino, b"-%d" % number)
        self._has_garbage = True

    def step(self) -> bool:
        """Remove some names of what is unfinished; True when there is more. Raises MediaError."""
        if not self._has_garbage or self._volume.read_only or self._place is None:
            return False
        self._has_garbage = self._sweep()
        return self._has_garbage

    def _sweep(self) -> bool:
        place = self._place
        unfinished = None if place is None else self._namespace.find(place.ino, UNFINISHED)
        if unfinished is None:
            return False
        with self._at_work():
            for name, ino in list((unfinished.entries or {}).items()):
                if ino in self._being_made:
                    continue
                for _ in range(_AT_ONCE):
                    removed = self._names.remove_leaf(unfinished, name)[2].ino
                    self._directories.discard(removed)
                    if removed == ino:
                        break
                return True
        return False


def _fact_at(state: State, parts: Sequence[bytes]) -> Fact:
    """What a path meant. Raises NotFoundError."""
    ino = int(ROOT_INO)
    for part in parts:
        found = state.find(ino, part)
        if found is None:
            raise NotFoundError("no such path in that state")
        ino = found
    fact = state.fact(ino)
    if fact is None:
        raise NotFoundError("what the path meant is not known any more")
    return fact

"""The read-only view of the past: ``.cxlfs/at/WHEN/…``, where WHEN is a commit, a time, ``now``, or
the name of a pin.

Other modules compute states (``store.past_state``), keep pins (``store.pins``), and carry requests
(``past_operations``, ``past_direct``).

Invariants
- Nothing of it is an inode of the store. Numbers of inodes and handles begin at FIRST, which no
  number of the store reaches, and none is used twice.
- Memory is bounded by NODES_MAX, whatever is looked up. A node that was dropped is stale: the
  kernel looks its path up again. FORGET changes nothing. What a user lists at a time is bounded,
  and handles of one content share it.
- The kernel remembers no name and no attribute, so each request is answered for its own user.
- A user sees what was theirs, and root everything. Directories of others are passed and listed if
  everybody could read them, then and now.
- An open file keeps a copy of its content by reference: no other bytes are ever read from it.
- Nothing can be changed. The attribute PIN_XATTR makes a pin and takes one away.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import stat
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from cxlfs.errors import (
    BadHandleError,
    BeyondDataError,
    CorruptionError,
    InvalidArgumentError,
    IsDirectoryError,
    MediaError,
    NoAttributeError,
    NotDirectoryError,
    NotFoundError,
    NotPermittedError,
    OutOfMemoryError,
    ReadOnlyError,
    StaleError,
    UsageError,
)
from cxlfs.store import UnfinishedError
from cxlfs.store.attributes import COMMIT_XATTR, CRC32C_XATTR, STATE_XATTR
from cxlfs.store.hidden import PAST_NAME, is_past
from cxlfs.store.namespace import DIRECTORY_SIZE_BYTES, Attributes, FileKind
from cxlfs.store.past_state import Fact, PastState, State
from cxlfs.store.pins import Pin, PinState
from cxlfs.types import ROOT_INO
from cxlfs.units import parse_moment

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store import Store
    from cxlfs.store.pins import Made

FIRST: Final = 1 << 62
NODES_MAX = 1 << 16
LISTED_MAX = 1 << 21
"""Names in all directories that a user other than root lists at a time."""
PIN_XATTR: Final = b"user.cxlfs.pin"
AT_NAME: Final = b"at"
NOW_NAME: Final = b"now"
_ROOT_UID = 0
_EVERYBODY = stat.S_IROTH | stat.S_IXOTH
_LISTED_AT_ONCE = 128
_SUM_STEP_BYTES, _SUMS_MAX = 4 << 20, 256
_PEEK_BYTES_MIN = 16384


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """What the kernel knows by a number. ``state``: None of ``.cxlfs`` and ``at``; ``pin``: of the
    top of a pin.
    """

    number: int
    parent: Node | None
    name: bytes
    state: State | None = None
    ino: int = 0
    pin: Pin | None = None

    @property
    def is_pinned(self) -> bool:
        """It lies in a pin."""
        return isinstance(self.state, PinState)


@dataclasses.dataclass(slots=True)
class _Open:
    """A node with ``count`` open files, and its attributes as long as that is so."""

    node: Node
    attributes: Attributes
    count: int = 0


class Listed(NamedTuple):
    """An entry of a listing."""

    name: bytes
    attributes: Attributes


@dataclasses.dataclass(slots=True)
class _Listing:
    """An open directory: its first entries, then names and what they mean in the state."""

    node: Node
    uid: int
    first: list[Listed]
    names: list[tuple[bytes, int]]


@dataclasses.dataclass(slots=True)
class _Content:
    """A content that ``count`` handles read."""

    ino: int
    content: FileMap
    count: int = 0


class PastView:
    """One for each mount. ``uid``: whose request it is."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._next = FIRST
        self._nodes: collections.OrderedDict[int, Node] = collections.OrderedDict()
        """Those that a state has, the one used last at the end."""
        self._numbers: dict[tuple[object, ...], int] = {}
        self._top = Node(self._take_number(), None, PAST_NAME)
        self._at = Node(self._take_number(), self._top, AT_NAME)
        self._files: dict[int, tuple[Node, tuple[int, int]]] = {}
        """Node and content of each handle."""
        self._contents: dict[tuple[int, int], _Content] = {}
        """By inode and the commit that published it."""
        self._open: dict[int, _Open] = {}
        """Nodes with open files, by number."""
        self._sums: collections.OrderedDict[tuple[int, int], tuple[int, int]]
        self._sums = collections.OrderedDict()
        """Of contents: so many bytes, and their checksum."""
        self._listings: dict[int, _Listing] = {}
        self._listed: collections.Counter[int] = collections.Counter()
        """Names in the listings of each user."""
        self._making: dict[tuple[int, int, bytes], Generator[Made, None, None]] = {}

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    @staticmethod
    def concerns(number: object) -> bool:
        """True for a number of an inode or a handle of the view."""
        return isinstance(number, int) and number >= FIRST

    @staticmethod
    def concerns_name(parent: object, name: object) -> bool:
        """True for the name that leads to the view."""
        return isinstance(parent, int) and isinstance(name, bytes) and is_past(parent, name)

    # --- nodes ------------------------------------------------------------------------------

    def _node(self, number: int) -> Node:
        """Raises StaleError."""
        for node in (self._top, self._at):
            if number == node.number:
                return node
        found = self._nodes.get(number)
        if found is None and number in self._open:
            return self._open[number].node
        if found is None:
            raise StaleError("the path is to be looked up again")
        self._nodes.move_to_end(number)
        return found

    def _below(self, parent: Node, name: bytes, state: State, ino: int, pin: Pin | None) -> Node:
        """The node of a name, made if there is none."""
        state_key = state.commit if isinstance(state, PastState) else None
        key = (parent.number, name, state_key, ino)
        number = self._numbers.get(key)
        if number is not None:
            return self._node(number)
        node = Node(self._take_number(), parent, name, state, ino, pin)
        self._nodes[node.number] = node
        self._numbers[key] = node.number
        while len(self._nodes) > NODES_MAX:
            _, dropped = self._nodes.popitem(last=False)
            above = dropped.parent.number if dropped.parent is not None else 0
            commit = dropped.state.commit if isinstance(dropped.state, PastState) else None
            del self._numbers[above, dropped.name, commit, dropped.ino]
        return node

    def _fact(self, node: Node, uid: int) -> Fact:
        """What a node is. Raises StaleError, NotPermittedError."""
        fact = node.state.fact(node.ino) if node.state is not None else None
        if fact is None:
            raise StaleError("what it was is not known any more")
        if not self._may_see(node, fact, uid):
            raise NotPermittedError("it was another user's")
        return fact

    def _may_see(self, node: Node, fact: Fact, uid: int) -> bool:
        return self._may_see_fact(fact, uid, is_pinned=node.is_pinned)

    def _may_see_fact(self, fact: Fact, uid: int, *, is_pinned: bool) -> bool:
        if uid in (_ROOT_UID, fact.uid):
            return True
        return not is_pinned and self._is_open(fact)

    def _is_open(self, fact: Fact) -> bool:
        """A directory that everybody could list and pass, then and now."""
        if fact.kind is not FileKind.DIRECTORY:
            return False
        living = self._store.namespace.inodes.get(fact.ino)
        modes = (fact.source.mode, fact.source.mode if living is None else living.mode)
        return all(mode & _EVERYBODY == _EVERYBODY for mode in modes)

    def _attributes(self, node: Node, fact: Fact | None) -> Attributes:
        if fact is None:  # .cxlfs, at
            root = self._store.namespace.get(ROOT_INO)
            times = (root.birth_ns, root.birth_ns, root.birth_ns, root.birth_ns)
            return Attributes(
                *(node.number, stat.S_IFDIR | 0o555, 2, _ROOT_UID, 0, 0, DIRECTORY_SIZE_BYTES, 0),
                *times,
            )
        found = fact.attributes()
        return found._replace(ino=node.number, mode=self._mode(node, fact))

    def _mode(self, node: Node, fact: Fact) -> int:
        """Readable for the owner alone, but for what everybody may pass. The owner may write, as
        far as the kernel knows: so the answer to a change is that the view is read-only.
        """
        kind, mode = stat.S_IFMT(fact.source.mode), fact.source.mode
        if stat.S_ISLNK(kind):
            return kind | 0o777
        if stat.S_ISDIR(kind):
            return kind | (0o755 if not node.is_pinned and self._is_open(fact) else 0o700)
        return kind | 0o600 | mode & stat.S_IXUSR

    # --- names ------------------------------------------------------------------------------

    def lookup(self, parent: int, name: bytes, uid: int) -> Attributes:
        """Raises NotFoundError, NotDirectoryError, StaleError, NotPermittedError."""
        if is_past(parent, name):
            return self._attributes(self._top, None)
        above = self._node(parent)
        if name in {b".", b".."}:
            return self._dot(above, name, uid)
        if above is self._top:
            if name != AT_NAME:
                raise NotFoundError("no such name")
            return self._attributes(self._at, None)
        node = self._moment(name, uid) if above is self._at else self._find(above, name, uid)
        if node.state is None:
            raise NotFoundError("no such name")
        fact = node.state.fact(node.ino)
        if fact is None or not self._may_see(node, fact, uid):
            raise NotFoundError("no such name")
        return self._attributes(node, fact)

    def _dot(self, node: Node, name: bytes, uid: int) -> Attributes:
        found = node if name == b"." else node.parent
        if found is None:
            return self._store.get_attributes(ROOT_INO)
        return self.get_attributes(found.number, uid)

    def _find(self, above: Node, name: bytes, uid: int) -> Node:
        fact = self._fact(above, uid)
        if fact.kind is not FileKind.DIRECTORY:
            raise NotDirectoryError("not a directory")
        if above.state is None:
            raise NotFoundError("no such name")
        ino = above.state.find(above.ino, name)
        if ino is None:
            raise NotFoundError("no such name")
        return self._below(above, name, above.state, ino, None)

    def _moment(self, name: bytes, uid: int) -> Node:
        """The top of a state. Raises NotFoundError."""
        pin = self._pin(name, uid)
        if pin is not None:
            state = PinState(self._store.volume)
            return self._below(self._at, name, state, pin.directory.ino, pin)
        if name == NOW_NAME:
            commit = self._store.volume.last_lsn
        else:
            try:
                commit = self._store.moments.commit(parse_moment(os.fsdecode(name)))
            except UsageError:
                raise NotFoundError("neither a pin, nor a commit, nor a time") from None
        return self._below(self._at, name, self._store.state_at(commit), ROOT_INO, None)

    def _pin(self, name: bytes, uid: int) -> Pin | None:
        """A pin of the user; root names one of another user NAME@UID."""
        name, _, owner = name.partition(b"@")
        if owner:
            if not owner.isdigit() or uid not in (_ROOT_UID, int(owner)):
                return None
            uid = int(owner)
        return self._store.pins.find(uid, name)

    # --- attributes -------------------------------------------------------------------------

    def get_attributes(self, number: int, uid: int) -> Attributes:
        """Raises StaleError, NotPermittedError."""
        node = self._node(number)
        if number in self._open:
            return self._open[number].attributes
        return self._attributes(node, None if node.state is None else self._fact(node, uid))

    def read_symlink(self, number: int, uid: int) -> bytes:
        """Raises InvalidArgumentError, and as :meth:`get_attributes`."""
        fact = self._fact(self._node(number), uid)
        if fact.kind is not FileKind.SYMLINK:
            raise InvalidArgumentError("not a symbolic link")
        return fact.source.target

    def xattr(self, number: int, name: bytes, uid: int) -> bytes:
        """Raises NoAttributeError, and as :meth:`get_attributes`."""
        node = self._node(number)
        if node.state is None:
            found = {COMMIT_XATTR: b"%d" % self._store.volume.last_lsn}
        else:
            fact = self._fact(node, uid)
            found = {key: v for key, v in fact.xattrs.items() if key.startswith(b"user.")}
            if fact.kind is FileKind.FILE:
                found[STATE_XATTR] = b"incomplete" if fact.is_incomplete else b"complete"
                found[COMMIT_XATTR] = b"%d" % fact.commit_lsn
                if name == CRC32C_XATTR and uid in (_ROOT_UID, fact.uid):
                    found[name] = b"%08x" % self._crc32c(fact)
        if node.pin is not None:
            found[PIN_XATTR] = _told(node.pin)
        if name not in found:
            raise NoAttributeError("no such attribute")
        return found[name]

    def _crc32c(self, fact: Fact) -> int:
        """Of a whole content. Raises UnfinishedError (ask again), CorruptionError, MediaError."""
        key = fact.ino, fact.commit_lsn
        done, crc = self._sums.pop(key, (0, 0))
        if fact.content is not None and done < fact.content.size:
            count, crc = fact.content.crc32c(done, crc, _SUM_STEP_BYTES)
            done += count
        self._sums[key] = done, crc
        if len(self._sums) > _SUMS_MAX:
            self._sums.popitem(last=False)
        if fact.content is not None and done < fact.content.size:
            raise UnfinishedError
        return crc

    def list_xattrs(self, number: int, uid: int) -> list[bytes]:
        """Raises as :meth:`get_attributes`."""
        node = self._node(number)
        if node.state is None:
            return []
        return [key for key in self._fact(node, uid).xattrs if key.startswith(b"user.")]

    # --- directories ------------------------------------------------------------------------

    def open_directory(self, number: int, uid: int) -> int:
        """What is there now. Raises NotDirectoryError, OutOfMemoryError (the user lists too much at
        once), and as :meth:`get_attributes`.
        """
        node = self._node(number)
        first = [
            Listed(b".", self.get_attributes(number, uid)),
            Listed(b"..", self._dot(node, b"..", uid)),
        ]
        names: list[tuple[bytes, int]] = []
        if node is self._top:
            first.append(Listed(AT_NAME, self._attributes(self._at, None)))
        elif node is self._at:
            for pin in self._pins_of(uid):
                name = pin.name if pin.uid == uid else b"%s@%d" % (pin.name, pin.uid)
                first.append(Listed(name, self.lookup(node.number, name, uid)))
        elif node.state is not None:
            if self._fact(node, uid).kind is not FileKind.DIRECTORY:
                raise NotDirectoryError("not a directory")
            names = list(node.state.names(node.ino).items())
        if self._listed[uid] + len(names) > LISTED_MAX and uid != _ROOT_UID:
            raise OutOfMemoryError("the user lists too many names at once")
        self._listed[uid] += len(names)
        handle = self._take_number()
        self._listings[handle] = _Listing(node, uid, first, names)
        return handle

    def _pins_of(self, uid: int) -> list[Pin]:
        pins = self._store.pins
        others = [other for other in pins.users() if other != uid] if uid == _ROOT_UID else []
        return [pin for each in (uid, *others) for pin in pins.of_user(each)]

    def listing(self, handle: int, start: int) -> Iterator[tuple[int, Listed]]:
        """Entries from a place on, as the user sees them now, and the place behind each. The kernel
        knows each one that it is told of. Raises BadHandleError.
        """
        found = self._listings.get(handle)
        if found is None:
            raise BadHandleError(f"no open directory {handle}")
        for place, listed in enumerate(found.first[start:], start + 1):
            yield place, listed
        state, offset = found.node.state, len(found.first)
        place = max(start - offset, 0)
        while state is not None and place < len(found.names):
            part = found.names[place : place + _LISTED_AT_ONCE]
            facts = state.facts({ino for _, ino in part})
            for name, ino in part:
                place += 1
                fact = facts.get(ino)
                if fact is not None and self._may_see(found.node, fact, found.uid):
                    below = self._below(found.node, name, state, ino, None)
                    yield place + offset, Listed(name, self._attributes(below, fact))

    def release_directory(self, handle: int) -> None:
        found = self._listings.pop(handle, None)
        if found is not None:
            self._listed[found.uid] -= len(found.names)
            if not self._listed[found.uid]:
                del self._listed[found.uid]

    # --- files ------------------------------------------------------------------------------

    def open(self, number: int, flags: int, uid: int) -> int:
        """Raises ReadOnlyError, IsDirectoryError, StaleError, OutOfMemoryError."""
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise _read_only()
        node = self._node(number)
        fact = self._fact(node, uid)
        if fact.kind is FileKind.DIRECTORY:
            raise IsDirectoryError("a directory")
        if uid not in (_ROOT_UID, fact.uid):
            raise NotPermittedError("it was another user's")
        key = fact.ino, fact.commit_lsn
        shared = self._contents.get(key)
        if shared is None:
            content = fact.copy()
            if content is None:
                raise StaleError("the content is not known any more")
            shared = self._contents[key] = _Content(fact.ino, content)
            self._store.past.lend(fact.ino, content)
        shared.count += 1
        handle = self._take_number()
        self._files[handle] = node, key
        kept = self._open.setdefault(number, _Open(node, self._attributes(node, fact)))
        kept.count += 1
        return handle

    def _content(self, handle: int) -> FileMap:
        found = self._files.get(handle)
        if found is None:
            raise BadHandleError(f"no open file {handle}")
        return self._contents[found[1]].content

    def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Verified bytes. Raises BadHandleError, CorruptionError, MediaError."""
        content = self._content(handle)
        verify = self._store.files.verify_reads
        try:
            if length >= _PEEK_BYTES_MIN:
                found = content.peek(offset, length, verify=verify)
                if found is not None:
                    return found
            return content.read(offset, length, verify=verify)
        except (CorruptionError, MediaError) as error:
            node = self._files[handle][0]
            self._store.volume.event("past-damaged", f"{os.fsdecode(node.name)}: {error.message}")
            raise

    def seek(self, handle: int, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE. Raises BeyondDataError, InvalidArgumentError."""
        content = self._content(handle)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise InvalidArgumentError("not a way to look for data")
        if not 0 <= offset < content.size:
            raise BeyondDataError("beyond the end of file")
        return content.seek(offset, hole=whence == os.SEEK_HOLE)

    def release(self, handle: int) -> None:
        """The content is given back."""
        found = self._files.pop(handle, None)
        if found is not None:
            node, key = found
            kept = self._open[node.number]
            kept.count -= 1
            if not kept.count:
                del self._open[node.number]
            shared = self._contents[key]
            shared.count -= 1
            if not shared.count:
                del self._contents[key]
                self._store.past.give_back(shared.ino, shared.content)

    def release_all(self) -> None:
        """The connection is gone."""
        for handle in list(self._files):
            self.release(handle)
        for making in self._making.values():
            making.close()
        self._making.clear()
        self._listings.clear()
        self._listed.clear()

    # --- pins -------------------------------------------------------------------------------

    def pin(self, number: int, name: bytes, uid: int) -> None:
        """Pin what a node is. Raises UnfinishedError (call it again), NotPermittedError, and as
        ``Pins.make``.
        """
        key = (uid, number, name)
        making = self._making.get(key)
        if making is None:
            node = self._node(number)
            if not isinstance(node.state, PastState):
                raise _read_only()
            path = b"/" + b"/".join(_parts(node))
            making = self._store.pins.make(uid, name, path, node.state)
        self._making.pop(key, None)
        if next(making, None) is not None:
            self._making[key] = making
            raise UnfinishedError

    def unpin(self, number: int, uid: int) -> None:
        """Take the pin away whose top a node is. Raises ReadOnlyError, NotPermittedError."""
        pin = self._node(number).pin
        if pin is None:
            raise _read_only()
        if uid not in (_ROOT_UID, pin.uid):
            raise NotPermittedError("another user's pin")
        self._store.pins.remove(pin.uid, pin.name)


def _parts(node: Node) -> list[bytes]:
    """The path below the top of its state."""
    parts: list[bytes] = []
    while node.parent is not None and node.parent.state is not None:
        parts.append(node.name)
        node = node.parent
    return parts[::-1]


def _read_only() -> ReadOnlyError:
    return ReadOnlyError("the past cannot be changed")


def _told(pin: Pin) -> bytes:
    said = {
        "name": os.fsdecode(pin.name),
        "uid": pin.uid,
        "path": os.fsdecode(pin.path),
        "commit": pin.commit,
        "made_ns": pin.made_ns,
        "count": pin.count,
        "size_bytes": pin.size_bytes,
        "left_out": pin.left_out,
        "missing": pin.missing,
    }
    return json.dumps(said).encode()

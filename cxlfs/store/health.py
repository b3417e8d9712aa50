"""What a store remembers beyond one mount: files whose data is damaged, the last verify, and writes
that found no room.

Kept in extended attributes under a prefix that users neither see nor set: one on each damaged file,
which goes away with it, and one on the root directory. So a program of any version reads the store.

Never here: looking for damage (``cxlfs.verify``), counting space (``report``), words for people.

Invariants
- What is remembered is of bounded size: one short attribute for each damaged file, and at most
  _RECORD_BYTES_MAX for everything else.
- Nothing is written while a file is read: :meth:`Health.maintain`, called between requests, does
  it, a bounded number of files at a time, and gives no content up to make room for it.
- What cannot be written, because the store is read-only or full, is still known until it is closed.
- What is read from the media is not trusted: an attribute that makes no sense counts as none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from cxlfs.errors import NoSpaceError
from cxlfs.format import layout
from cxlfs.format.operations import Operation, XattrRemoveOperation, XattrSetOperation
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace

HIDDEN_PREFIX: Final = layout.XATTR_HIDDEN_PREFIX
DAMAGED_XATTR: Final = HIDDEN_PREFIX + b"damaged"
HEALTH_XATTR: Final = HIDDEN_PREFIX + b"health"

_KINDS_MAX = 8
_KIND_LENGTH_MAX = 64
_RECORD_BYTES_MAX = 4096
_MARKS_AT_ONCE = 64
_RETRY_SECONDS = 30.0
_REFUSALS_SECONDS = 5.0
"""How often refused writes are looked at again: counting what is free takes some work."""
_MORE_PART = 16
_NUMBER_MAX = 1 << 62


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOutcome:
    """How the last verify ended that was recorded. ``kinds``: ids of the first kinds of findings.

    ``structure_findings``: those that are not about file data; damaged files are remembered one by
    one. ``complete``: no pass was skipped.
    """

    ended_ns: int
    structure_only: bool
    complete: bool
    errors: int
    warnings: int
    structure_findings: int
    kinds: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        return self.complete and not self.errors and not self.warnings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedWrites:
    """Writes that found no room. ``needed_bytes``: what must be free for the last of them to fit;
    0: it was about metadata.
    """

    since_ns: int
    last_ns: int
    count: int
    needed_bytes: int


class Journaled(Protocol):
    """What is needed of an open store (``volume``): its inodes, and a way to commit."""

    namespace: Namespace

    @property
    def read_only(self) -> bool: ...

    def require_writable(self) -> None: ...

    def metadata_room(self) -> bool: ...

    def commit(self, ops: Sequence[Operation]) -> object: ...


class Health:
    """See the module; one for each volume."""

    def __init__(self, volume: Journaled) -> None:
        self._volume = volume
        self._damaged: dict[int, int] = {}
        """Inode number: when its damage was seen last, as a number of sightings."""
        self._pending: dict[int, Inode] = {}
        """Damaged files that have no mark yet."""
        self._sightings = 0
        self._due_monotonic = 0.0
        self._refusals_due_monotonic = 0.0
        self._is_dirty = False
        self.last_verify: VerifyOutcome | None = None
        self.refused: RefusedWrites | None = None
        for inode in volume.namespace.inodes.values():
            if inode.xattrs is not None:
                self._load(inode)

    def _load(self, inode: Inode) -> None:
        xattrs = inode.xattrs or {}
        if inode.ino == ROOT_INO and HEALTH_XATTR in xattrs:
            self.last_verify, self.refused = _decode(xattrs[HEALTH_XATTR])
        if inode.live is not None and DAMAGED_XATTR in xattrs:
            inode.damaged = True
            self._damaged[inode.ino] = 0

    # --- damaged files ----------------------------------------------------------------------

    @property
    def damaged_count(self) -> int:
        return len(self._damaged)

    def damaged(self) -> Iterable[int]:
        """Inode numbers of the files whose data is known to be damaged."""
        return list(self._damaged)

    @property
    def sightings(self) -> int:
        """Grows with each damage that is seen: what was known before can be told from it."""
        return self._sightings

    def seen(self, inode: Inode) -> None:
        """Damage was seen in the content of a file; it will be remembered."""
        self._sightings += 1
        self._damaged[inode.ino] = self._sightings
        inode.damaged = True
        if DAMAGED_XATTR not in (inode.xattrs or {}):
            self._pending[inode.ino] = inode

    def met(self) -> None:
        """Damage was met that may be any file's, and is not remembered as one's."""
        self._sightings += 1

    def found_good(self, *, known_at: int, except_inos: set[int]) -> None:
        """A verify that began after ``known_at`` sightings read all file data: damage that was seen
        before, of others than ``except_inos``, is no more. Raises as :meth:`Volume.commit`.
        """
        inodes = self._volume.namespace.inodes
        good = [
            inodes[ino]
            for ino, seen in self._damaged.items()
            if seen <= known_at and ino not in except_inos and ino in inodes
        ]
        marked = [inode for inode in good if DAMAGED_XATTR in (inode.xattrs or {})]
        for start in range(0, len(marked), _MARKS_AT_ONCE):
            batch = marked[start : start + _MARKS_AT_ONCE]
            self._volume.commit([XattrRemoveOperation(i.ino, DAMAGED_XATTR) for i in batch])
            for inode in batch:
                self.replaced(inode)
        for inode in good:
            self.replaced(inode)

    def removal(self, inode: Inode, *, whole: bool) -> list[Operation]:
        """What takes the mark away in the record that publishes a content; ``whole``: one without
        anything of the content before.
        """
        if not whole or DAMAGED_XATTR not in (inode.xattrs or {}):
            return []
        return [XattrRemoveOperation(inode.ino, DAMAGED_XATTR)]

    def replaced(self, inode: Inode) -> None:
        """Nothing of the damaged content is left; the media know."""
        inode.damaged = False
        self._volume.namespace.remove_xattr(inode, DAMAGED_XATTR)
        self.forget(inode)

    def forget(self, inode: Inode) -> None:
        """The inode is gone."""
        self._damaged.pop(inode.ino, None)
        self._pending.pop(inode.ino, None)

    # --- verify -----------------------------------------------------------------------------

    def verified(self, outcome: VerifyOutcome) -> None:
        """Remember how a verify ended, and the damaged files it found. Durable when it returns.

        Raises ReadOnlyError, NoSpaceError, MediaError; then it is known until the store is closed.
        """
        self.last_verify = outcome
        self._is_dirty = True
        self._volume.require_writable()
        while self._pending:
            self._mark()
        self._write()

    # --- refused writes ---------------------------------------------------------------------

    def refuse(self, needed_bytes: int) -> None:
        """A write was refused; ``needed_bytes``: what its file takes as far as that is known (0: it
        was about metadata). What the writer would have gone on with is not: a little more has to be
        free before it counts as over.
        """
        now = time.time_ns()
        before = self.refused
        self.refused = RefusedWrites(
            since_ns=now if before is None else before.since_ns,
            last_ns=now,
            count=1 if before is None else before.count + 1,
            needed_bytes=min(needed_bytes + needed_bytes // _MORE_PART, _NUMBER_MAX - 1),
        )

    def refused_still(self, free_bytes: int) -> RefusedWrites | None:
        """Refused writes that would still find no room; None: there were none, or there is room."""
        refused = self.refused
        if refused is None:
            return None
        if refused.needed_bytes == 0:
            return None if self._volume.metadata_room() else refused
        return refused if free_bytes < refused.needed_bytes else None

    # --- writing ----------------------------------------------------------------------------

    def maintain(self, now_monotonic: float, free_bytes: Callable[[], int]) -> bool:
        """Write down a little of what is not yet, and look whether there is room again; True when
        there is more to do at once. Raises MediaError.
        """
        if self._volume.read_only or now_monotonic < self._due_monotonic:
            return False
        if self.refused is not None and now_monotonic >= self._refusals_due_monotonic:
            self._refusals_due_monotonic = now_monotonic + _REFUSALS_SECONDS
            if self.refused_still(free_bytes()) is None:
                self.refused = None
            self._is_dirty = True
        try:
            return self._record()
        except NoSpaceError:
            self._due_monotonic = now_monotonic + _RETRY_SECONDS
            return False

    def finish(self) -> None:
        """The store is about to be closed: write down what is not yet, where there is room."""
        self._is_dirty = self._is_dirty or self.refused is not None
        with contextlib.suppress(NoSpaceError):
            while self._record():
                pass

    def _record(self) -> bool:
        """One record; True when there is more. Raises NoSpaceError, MediaError."""
        if not (self._pending or self._is_dirty):
            return False
        if not self._volume.metadata_room():
            raise NoSpaceError("the metadata of this store has no room to grow")
        self._mark() if self._pending else self._write()
        return bool(self._pending or self._is_dirty)

    def _mark(self) -> None:
        """Of the files that wait for it, the first few; what was never committed needs none."""
        batch = [i for i in self._pending.values() if i.links and not i.uncommitted]
        batch = batch[:_MARKS_AT_ONCE]
        value = b"%d" % time.time_ns()
        if batch:
            self._volume.commit([XattrSetOperation(i.ino, DAMAGED_XATTR, value) for i in batch])
        for inode in batch:
            self._volume.namespace.set_xattr(inode, DAMAGED_XATTR, value)
        marked = {inode.ino for inode in batch} if batch else set(self._pending)
        self._pending = {ino: i for ino, i in self._pending.items() if ino not in marked}

    def _write(self) -> None:
        root = self._volume.namespace.get(ROOT_INO)
        value = _encode(self.last_verify, self.refused)
        if value != (root.xattrs or {}).get(HEALTH_XATTR):
            self._volume.commit([XattrSetOperation(ROOT_INO, HEALTH_XATTR, value)])
            self._volume.namespace.set_xattr(root, HEALTH_XATTR, value)
        self._is_dirty = False


# --- the record ---------------------------------------------------------------------------------


def _encode(outcome: VerifyOutcome | None, refused: RefusedWrites | None) -> bytes:
    record: dict[str, object] = {}
    if outcome is not None:
        kinds = [kind[:_KIND_LENGTH_MAX] for kind in outcome.kinds[:_KINDS_MAX]]
        record["verify"] = {**dataclasses.asdict(outcome), "kinds": kinds}
    if refused is not None:
        record["refused"] = dataclasses.asdict(refused)
    return json.dumps(record, separators=(",", ":")).encode()


def _decode(value: bytes) -> tuple[VerifyOutcome | None, RefusedWrites | None]:
    """What makes no sense counts as not there."""
    try:
        record = json.loads(value) if len(value) <= _RECORD_BYTES_MAX else {}
    except (ValueError, RecursionError):
        record = {}
    if not isinstance(record, dict):
        return None, None
    return _outcome(record.get("verify")), _refused(record.get("refused"))


def _outcome(fields: object) -> VerifyOutcome | None:
    numbers = _numbers(fields, ("ended_ns", "errors", "warnings", "structure_findings"))
    if numbers is None or not isinstance(fields, dict):
        return None
    kinds = fields.get("kinds")
    texts = [str(kind)[:_KIND_LENGTH_MAX] for kind in kinds] if isinstance(kinds, list) else []
    return VerifyOutcome(
        structure_only=fields.get("structure_only") is True,
        complete=fields.get("complete") is True,
        kinds=tuple(text for text in texts[:_KINDS_MAX] if text.isascii() and text.isprintable()),
        **numbers,
    )


def _refused(fields: object) -> RefusedWrites | None:
    numbers = _numbers(fields, ("since_ns", "last_ns", "count", "needed_bytes"))
    return None if numbers is None else RefusedWrites(**numbers)


def _numbers(fields: object, names: tuple[str, ...]) -> dict[str, int] | None:
    if not isinstance(fields, dict):
        return None
    found: dict[str, int] = {}
    for name in names:
        value = fields.get(name)
        if type(value) is not int or not 0 <= value < _NUMBER_MAX:
            return None
        found[name] = value
    return found

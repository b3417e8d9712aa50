"""Applying journal records to a namespace and an extent engine during recovery.

Many records at once: names change in Python, operation by operation; extents and contents change in
C, in their own order, whenever something depends on them, at the latest behind the last record. Of
attributes that are set several times the last ones count, which are set at the end.

Never here: reading the journal, taking it apart, writing anything.

Invariants
- Deterministic: the same records over the same image give the same state, however they are divided
  into batches; no clock, no randomness.
- Nothing in a record is trusted: what does not fit the state raises CorruptionError. The state is
  worth nothing then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import ContradictionError, CorruptionError, NamespaceError
from cxlfs.format import layout, operation_columns, operations
from cxlfs.native.extents import MOVE_DTYPE
from cxlfs.native.maps import FileMap
from cxlfs.store.commit_numbers import COMMIT_XATTR, decode_commit
from cxlfs.store.namespace import FileKind, Inode, Namespace, entries_of
from cxlfs.store.record_rules import RecordRules

if TYPE_CHECKING:
    from cxlfs.format.journal_reader import RecordBatch
    from cxlfs.format.operation_columns import OperationColumns
    from cxlfs.native.extents import Engine, Rows

_BESIDE_MOVES = frozenset({layout.OP_MOVE, layout.OP_INODE})
"""Operations that change no content: moves of several records go together over them."""
_STRINGS = frozenset({layout.OP_SYMLINK, layout.OP_XATTR_SET, layout.OP_XATTR_REMOVE})


class _Changes:
    """Extents and contents of one batch, on their way to the engine."""

    def __init__(self, engine: Engine, batch: RecordBatch, found: OperationColumns) -> None:
        self._engine = engine
        self._batch = batch
        self._found = found
        self._defined = self._changed = 0
        self.contents: list[FileMap] = []
        """Those that the first of the changes are of."""

    def flush(self, definitions: int) -> None:
        """Apply ``definitions`` in all, and every change whose content is known."""
        found = self._found
        defined, changed = self._defined, self._changed
        self._defined, self._changed = definitions, len(self.contents)
        changes = found.changes[changed : self._changed].copy()
        changes["definitions"] -= defined
        stop = self._engine.replay(
            found.extents[defined:definitions], changes, self.contents[changed:], self._batch.data
        )
        if stop is not None:
            if stop.change is not None:
                record = found.change_records[changed + stop.change]
            else:
                record = found.extent_records[defined + (stop.definition or 0)]
            raise _contradiction(self._batch, int(record), stop.error) from stop.error


class _Rules(RecordRules):
    """The rules, over the state that replay has come to."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        self._inodes = namespace.inodes

    def mode_of(self, ino: int) -> int | None:
        inode = self._inodes.get(ino)
        return None if inode is None else inode.mode

    def links_of(self, ino: int) -> int:
        return self._inodes[ino].links

    def parent_of(self, ino: int) -> int:
        return self._inodes[ino].parent

    def meaning_of(self, parent: int, name: bytes) -> int:
        return entries_of(self._inodes[parent]).get(name, 0)

    def has_names(self, ino: int) -> bool:
        return bool(self._inodes[ino].entries)

    def has_aside(self, ino: int) -> bool:
        return self._inodes[ino].aside is not None


def _contradiction(
    batch: RecordBatch, record: int, error: NamespaceError | CorruptionError
) -> ContradictionError:
    lsn = int(batch.rows["lsn"][record])
    return ContradictionError(
        f"journal record {lsn} contradicts the state: {error.message}",
        structure="journal record",
        media_offset=int(batch.media_offsets[record]),
        lsn=lsn,
    )


class Replayer:
    """Applies batches of records; ``next_extent_id`` follows what they define."""

    def __init__(self, namespace: Namespace, engine: Engine, *, next_extent_id: int) -> None:
        self.namespace = namespace
        self.engine = engine
        self.next_extent_id = next_extent_id
        self.last_time_ns = 0
        self._rules = _Rules(namespace)
        self._changes: _Changes
        self._lsns: list[int] = []  # of the records of this batch
        self._record = 0  # whose operation is applied, and
        self._definitions = 0  # how many definitions of the batch come before that
        self._attributes: dict[int, int] = {}  # inode number: its last row of this batch
        self._commits: dict[int, int] = {}  # inode number: last record of this batch to publish it
        self._own_commits: dict[int, tuple[bytes, int]] = {}  # what says so itself, and where
        self._moves: list[operations.MoveOperation] = []  # put down for _follow_moves, which
        self._moves_definitions = 0  # behind so many definitions,
        self._moves_record = 0  # the last of them in this record, and
        self._move_targets: set[int] = set()  # where they go
        self._dropped: list[FileMap] = []  # of inodes that are gone; changes to them may be waiting
        self._apply: dict[type, Callable[..., None]] = {
            operations.PromoteOperation: self._promote,
            operations.AsideDropOperation: self._aside_drop,
            operations.MoveOperation: self._move,
        }

    def apply(self, batch: RecordBatch) -> None:
        """Apply records. Raises ContradictionError if one is malformed or contradicts the state."""
        rows = batch.rows
        found = operation_columns.decode(
            batch.data,
            batch.starts + layout.RECORD_DTYPE.itemsize,
            rows["payload_bytes"].astype(np.int64),
            rows["operation_count"].astype(np.int64),
        )
        self._changes = _Changes(self.engine, batch, found)
        self._lsns = rows["lsn"].tolist()
        self._attributes.clear()
        self._commits.clear()
        self._own_commits.clear()
        self.namespace.on_drop = self._drop
        try:
            self._apply_names(batch, found)
        finally:
            self.namespace.on_drop = None
        self._changes.flush(len(found.extents))
        for content in self._dropped:
            content.close()
        self._dropped.clear()
        self._set_attributes(found.attributes(list(self._attributes.values())).tolist())
        self._set_commits(rows["time_ns"].tolist())
        if len(found.extents):
            self.next_extent_id = max(self.next_extent_id, int(found.extents["id"].max()) + 1)
        self.last_time_ns = int(rows["time_ns"][-1])
        if found.good_records < len(batch):
            _raise_malformed(batch, found.good_records)

    def _apply_names(self, batch: RecordBatch, found: OperationColumns) -> None:
        """All operations but definitions, in order; contents are only put down for the engine."""
        self._record = 0
        try:
            self._in_order(found)
            self._reap()
            self._follow_moves()
        except (NamespaceError, CorruptionError) as error:
            raise _contradiction(batch, self._record, error) from error

    def _reap(self) -> None:
        """At the end of a record: what has no name is gone."""
        self._rules.end()
        if self.namespace.orphan_count():
            self._follow_moves()
            self.namespace.reap()

    def _in_order(self, found: OperationColumns) -> None:
        """One operation after the other."""
        columns = (found.kinds, found.records, found.indexes)
        for kind, record, index in zip(*(column.tolist() for column in columns), strict=True):
            if record != self._record:
                self._reap()
                self._record = record
            if self._moves and kind not in _BESIDE_MOVES:
                self._follow_moves()
            if kind == layout.OP_INODE:
                self._inode(int(found.inos[index]), int(found.modes[index]), index)
            elif kind == layout.OP_CONTENT:
                self._content(int(found.change_inos[index]), aside=bool(found.asides[index]))
            elif kind == layout.OP_LINK:
                self._link(int(found.parents[index]), found.names[index], int(found.meant[index]))
            elif kind == layout.OP_UNLINK:
                parent, name = int(found.parents[index]), found.names[index]
                self._rules.unlink(parent, name)
                self.namespace.unlink(parent, name)
            elif kind in _STRINGS:
                ino, value = int(found.string_inos[index]), found.string_values[index]
                self._string(kind, ino, found.string_names[index], value)
            else:
                op = found.others[index]
                self._definitions = found.other_definitions[index]
                self._apply[type(op)](op)

    def _inode(self, ino: int, mode: int, row: int) -> None:
        if self._rules.inode(ino, mode):
            inode = Inode(ino, mode, 0, 0)
            if inode.kind is FileKind.FILE:
                inode.live = FileMap(self.engine, owner=ino)
            self.namespace.add_nameless(inode)
        self._attributes[ino] = row

    def _content(self, ino: int, *, aside: bool) -> None:
        inode = self._file(ino)
        if aside:
            if inode.aside is None:
                inode.aside = FileMap(self.engine, owner=ino)
            self._changes.contents.append(inode.aside)
        else:
            self._changes.contents.append(inode.content)
            self._publish(ino)

    def _publish(self, ino: int) -> None:
        self._commits[ino] = self._record
        self._own_commits.pop(ino, None)

    def _drop(self, inode: Inode) -> None:
        """The inode goes: its contents last until what waits for them was applied."""
        self._attributes.pop(inode.ino, None)
        self._own_commits.pop(inode.ino, None)
        self._commits.pop(inode.ino, None)
        self._dropped.extend(c for c in (inode.live, inode.aside) if c is not None)
        inode.live = inode.aside = None

    def _set_attributes(self, rows: list[tuple[int, ...]]) -> None:
        inodes = self.namespace.inodes
        for ino, mode, uid, gid, rdev, flags, _, atime, mtime, ctime, birth in rows:
            inode = inodes[ino]
            inode.mode, inode.uid, inode.gid = mode, uid, gid
            inode.rdev, inode.flags = rdev, flags
            inode.atime_ns, inode.birth_ns = atime, birth
            inode.mtime_ns = inode.committed_mtime_ns = mtime
            inode.ctime_ns = inode.committed_ctime_ns = ctime

    def _set_commits(self, times_ns: list[int]) -> None:
        lsns = self._lsns
        for ino, record in self._commits.items():
            inode = self.namespace.inodes[ino]
            inode.commit_lsn, inode.commit_ns = lsns[record], times_ns[record]
        for ino, (value, record) in self._own_commits.items():
            told = decode_commit(value, lsns[record])
            if told is not None:
                inode = self.namespace.inodes[ino]
                inode.commit_lsn, inode.commit_ns = told

    # --- the rarer operations ---------------------------------------------------------------

    def _link(self, parent: int, name: bytes, ino: int) -> None:
        self._rules.link(parent, ino)
        self.namespace.lsn = self._lsns[self._record]
        self.namespace.link(parent, name, ino)

    def _string(self, kind: int, ino: int, name: bytes, value: bytes) -> None:
        if kind == layout.OP_SYMLINK:
            self._rules.target(ino)
            self.namespace.set_target(self.namespace.get(ino), value)
            return
        self._rules.attribute(ino)
        inode = self.namespace.get(ino)
        if kind == layout.OP_XATTR_SET:
            self.namespace.set_xattr(inode, name, value)
            if name == COMMIT_XATTR:
                self._own_commits[ino] = value, self._record
        else:
            self.namespace.remove_xattr(inode, name)

    def _promote(self, op: operations.PromoteOperation) -> None:
        self._rules.promote(op.ino)
        inode = self._file(op.ino)
        self._dropped.append(inode.content)
        inode.live, inode.aside = inode.aside, None
        self._publish(op.ino)

    def _aside_drop(self, op: operations.AsideDropOperation) -> None:
        inode = self._file(op.ino)
        if inode.aside is not None:
            self._dropped.append(inode.aside)
            inode.aside = None

    def _move(self, op: operations.MoveOperation) -> None:
        """Put down until something else happens to contents, or to what was moved."""
        if op.source_id in self._move_targets:
            self._follow_moves()
        for ino in op.inos:
            self._file(ino)
        self._move_targets.add(op.target_id)
        self._moves.append(op)
        self._moves_definitions = self._definitions
        self._moves_record = self._record

    def _follow_moves(self) -> None:
        """References move as they are now: all that was to come before must have."""
        if not self._moves:
            return
        moves, self._moves = self._moves, []
        self._move_targets.clear()
        record, self._record = self._record, self._moves_record  # at fault if something is
        self._changes.flush(self._moves_definitions)
        rows = np.array([op[:5] for op in moves], dtype=np.uint64)
        table = np.zeros(len(moves), dtype=MOVE_DTYPE)
        for column, name in enumerate(MOVE_DTYPE.names or ()):
            table[name] = rows[:, column]
        of_inode: dict[int, list[int]] = {}
        for index, op in enumerate(moves):
            for ino in op.inos:
                of_inode.setdefault(ino, []).append(index)
        for ino, indexes in of_inode.items():
            inode = self._file(ino)
            contents = [c for c in (inode.live, inode.aside) if c is not None]
            self._re_aim(contents, table[indexes])
        self._record = record

    def _re_aim(self, contents: list[FileMap], moves: Rows) -> None:
        """Moves whose sources overlap take effect one after the other."""
        order = np.lexsort((moves["source_offset"], moves["source_id"]))
        ends = moves["source_offset"][order] + moves["length"][order]
        same = moves["source_id"][order][1:] == moves["source_id"][order][:-1]
        if (same & (moves["source_offset"][order][1:] < ends[:-1])).any():
            for row in range(len(moves)):
                self.engine.move(contents, moves[row : row + 1])
        else:
            self.engine.move(contents, moves)

    def _file(self, ino: int) -> Inode:
        self._rules.content(ino)
        return self.namespace.get(ino)


def _raise_malformed(batch: RecordBatch, record: int) -> None:
    """Raise ContradictionError for a record that operation_columns refused."""
    count, offset = int(batch.rows["operation_count"][record]), int(batch.media_offsets[record])
    wrong = CorruptionError("malformed journal record", structure="journal record")
    try:
        operations.decode(batch.payload(record), count, offset)
    except CorruptionError as error:
        wrong = error
    raise _contradiction(batch, record, wrong) from wrong

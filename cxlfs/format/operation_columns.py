"""The operations of many records at once, as columns: what ``operations.decode`` does for one.

The kinds that programs make many of (inode, link, unlink, extent, content, extended attributes,
targets of symbolic links) are checked and taken apart with numpy, 100 000 records in some 100 ms;
all others are decoded one by one.

Never here: what an operation does to the store, how records are found.

Invariants
- Nothing is trusted: what does not fit ends the good records before it.
- The order of the records, and of the operations in each, is kept.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cxlfs.errors import CorruptionError, InvariantError
from cxlfs.format import layout, operations
from cxlfs.native.extents import CHANGE_DTYPE, EXTENT_INFO_DTYPE

if TYPE_CHECKING:
    import numpy.typing as npt

    Buffer: TypeAlias = bytes | bytearray
    Integers: TypeAlias = npt.NDArray[np.int64]
    Rows: TypeAlias = npt.NDArray[np.void]

_HEADER_BYTES = layout.OPERATION_DTYPE.itemsize
_STEPS_TOGETHER = 16
"""Operations of a record that are found for all records at once; further ones one by one."""
_STRINGS = (layout.OP_SYMLINK, layout.OP_XATTR_SET, layout.OP_XATTR_REMOVE)
_KIND_COUNT = 1 << 16
_LEAST_BYTES = np.full(_KIND_COUNT, np.iinfo(np.int64).max)
for _kind, _bytes in operations.LEAST_BYTES.items():
    _LEAST_BYTES[_kind] = _bytes
_FLAGS_UNKNOWN = np.full(_KIND_COUNT, 0xFFFF, dtype=np.int64)
for _kind, _flags in layout.OP_FLAGS_KNOWN.items():
    _FLAGS_UNKNOWN[_kind] = 0xFFFF & ~_flags


@dataclasses.dataclass(frozen=True, slots=True)
class OperationColumns:
    """The operations of the first ``good_records`` records; the next one, if any, is malformed.

    ``kinds``, ``records`` (the record of each) and ``indexes`` (among the inode operations, the
    names, the changes, the strings or the others, as the kind says) have an entry for each that is
    not a definition.
    """

    good_records: int
    kinds: Integers
    records: Integers
    indexes: Integers
    inos: npt.NDArray[np.uint64]
    modes: npt.NDArray[np.uint32]
    names: list[bytes]
    """Of links and of unlinks; ``parents`` are the directories, ``meant`` what a link means."""
    parents: npt.NDArray[np.uint64]
    meant: npt.NDArray[np.uint64]
    extents: Rows
    """EXTENT_INFO_DTYPE; checksums stand in the data."""
    extent_records: Integers
    changes: Rows
    """CHANGE_DTYPE; references stand in the data."""
    change_records: Integers
    change_inos: npt.NDArray[np.uint64]
    asides: npt.NDArray[np.bool_]
    """Whether each of ``changes`` is one of the content kept aside."""
    string_inos: npt.NDArray[np.uint64]
    string_names: list[bytes]
    """Of extended attributes that are set or removed."""
    string_values: list[bytes]
    """Of those, and where symbolic links lead."""
    others: list[operations.Operation]
    other_definitions: list[int]
    """How many of ``extents`` come before each of ``others``."""
    _words: npt.NDArray[np.uint64]
    _inode_positions: Integers

    def attributes(self, indexes: list[int]) -> Rows:
        """The inode operations at ``indexes`` as a whole (OP_INODE_DTYPE)."""
        first = (self._inode_positions[indexes] + _HEADER_BYTES) >> 3
        words = self._words[first[:, None] + np.arange(layout.OP_INODE_DTYPE.itemsize // 8)]
        rows: Rows = words.view(layout.OP_INODE_DTYPE).reshape(len(indexes))
        return rows


class _Finder:
    """Where the operations of each record begin; ``bad``: which records they do not fill."""

    def __init__(
        self,
        words: npt.NDArray[np.uint64],
        starts: Integers,
        ends: Integers,
        counts: Integers,
    ) -> None:
        self._words = words
        self._ends = ends
        self._counts = counts
        self._next = starts.copy()
        self.bad = np.zeros(len(starts), dtype=np.bool_)

    def find(self) -> Integers:
        """Positions of all operation headers, in order; those of bad records are incomplete."""
        parts: list[Integers] = []
        active = np.flatnonzero(self._counts > 0)
        for step in range(_STEPS_TOGETHER):
            active = self._step(active, parts)
            active = active[self._counts[active] > step + 1]
            if not len(active):
                break
        parts.extend(self._rest(record) for record in active.tolist())
        self.bad |= self._next != self._ends
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    def _step(self, active: Integers, parts: list[Integers]) -> Integers:
        """The next operation of each of these records; returns those that have a good one."""
        position, end = self._next[active], self._ends[active]
        fits = position + _HEADER_BYTES <= end
        headers = self._words[np.where(fits, position, 0) >> 3]
        length = (headers >> np.uint64(32)).astype(np.int64)
        fits &= (length & 7) == 0
        fits &= length >= _LEAST_BYTES[(headers & np.uint64(_KIND_COUNT - 1)).astype(np.int64)]
        fits &= position + length <= end
        self.bad[active[~fits]] = True
        active = active[fits]
        parts.append(position[fits])
        self._next[active] += length[fits]
        return active

    def _rest(self, record: int) -> Integers:
        """What :meth:`_step` does, for a record with many operations."""
        position, end = int(self._next[record]), int(self._ends[record])
        found: list[int] = []
        for _ in range(int(self._counts[record]) - _STEPS_TOGETHER):
            if position + _HEADER_BYTES > end:
                break
            header = int(self._words[position >> 3])
            kind, length = header & (_KIND_COUNT - 1), header >> 32
            if length & 7 or not _LEAST_BYTES[kind] <= length <= end - position:
                break
            found.append(position)
            position += length
        else:
            self._next[record] = position
            return np.array(found, dtype=np.int64)
        self.bad[record] = True
        return np.empty(0, dtype=np.int64)


def words_of(data: Buffer) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, dtype="<u8", count=len(data) // 8)


def _offset(dtype: np.dtype[np.void], name: str) -> int:
    fields = dtype.fields
    if fields is None:
        raise InvariantError("a structure has fields")
    return int(fields[name][1])


class _Operations:
    """All operations, in order; ``good``: records before the first malformed one found so far."""

    def __init__(
        self, data: Buffer, starts: Integers, payload_bytes: Integers, counts: Integers
    ) -> None:
        self._data = memoryview(data)
        self._halves = np.frombuffer(data, dtype="<u4", count=len(data) // 4)
        self.words = words_of(data)
        finder = _Finder(self.words, starts, starts + payload_bytes, counts)
        positions = finder.find()
        self.good = int(np.argmax(finder.bad)) if finder.bad.any() else len(starts)
        self.record = np.repeat(np.arange(self.good), counts[: self.good])
        self.position = positions[: len(self.record)]
        headers = self.words[self.position >> 3]
        self.kind = (headers & np.uint64(_KIND_COUNT - 1)).astype(np.int64)
        self.flags = ((headers >> np.uint64(16)) & np.uint64(0xFFFF)).astype(np.int64)
        self.end = self.position + (headers >> np.uint64(32)).astype(np.int64)
        self.refuse(np.arange(len(self.kind)), (self.flags & _FLAGS_UNKNOWN[self.kind]) != 0)

    def column(self, at: Integers, dtype: np.dtype[np.void], name: str) -> npt.NDArray[np.uint64]:
        """One field of the bodies of the operations ``at``."""
        place = self.position[at] + (_HEADER_BYTES + _offset(dtype, name))
        found: npt.NDArray[np.uint64] = (
            self.words[place >> 3]
            if dtype[name].itemsize == 8
            else self._halves[place >> 2].astype(np.uint64)
        )
        return found

    def slices(self, starts: Integers, ends: Integers) -> list[bytes]:
        """Bytes of the data."""
        data = bytes(self._data)
        return [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]

    def refuse(self, at: Integers, wrong: npt.NDArray[np.bool_]) -> None:
        """The records of those that are wrong are malformed."""
        if wrong.any():
            self.good = min(self.good, int(self.record[at[np.argmax(wrong)]]))

    def decode_one_by_one(self, at: Integers) -> list[operations.Operation]:
        """Operations up to the first one that is malformed."""
        found: list[operations.Operation] = []
        columns = (self.record, self.position, self.kind, self.flags, self.end)
        for record, position, kind, flags, end in zip(
            *(column[at].tolist() for column in columns), strict=True
        ):
            if record >= self.good:
                break
            try:
                found.append(operations.decode_one(bytes(self._data[position:end]), kind, flags))
            except CorruptionError:
                self.good = record
                break
        return found


def _inos_and_modes(
    ops: _Operations, at: Integers
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
    dtype = layout.OP_INODE_DTYPE
    inos = ops.column(at, dtype, "ino")
    wrong = (inos == 0) | (inos >= layout.NUMBER_LIMIT)
    flags = ops.column(at, dtype, "flags")
    ops.refuse(at, wrong | ((flags & ~np.uint64(layout.INODE_FLAGS_KNOWN)) != 0))
    return inos, ops.column(at, dtype, "mode").astype(np.uint32)


def _names(ops: _Operations, at: Integers) -> list[bytes]:
    """Of links and unlinks; those of records that are refused may be impossible, or be missing."""
    lengths = ops.column(at, layout.OP_NAME_DTYPE, "name_bytes").astype(np.int64)
    starts = ops.position[at] + operations.LEAST_BYTES[layout.OP_LINK]  # as of an unlink
    ends = starts + lengths
    wrong = (lengths == 0) | (lengths > layout.NAME_BYTES_MAX) | (ends > ops.end[at])
    ops.refuse(at, wrong)
    end = int(np.argmax(wrong)) if wrong.any() else len(at)
    names = ops.slices(starts[:end], ends[:end])
    # One look at all of them finds what none may hold.
    together = b"".join(names)
    if b"/" in together or b"\0" in together or b"." in names or b".." in names:
        bad = [not operations.is_name(name) for name in names]
        ops.refuse(at[:end], np.array(bad, dtype=np.bool_))
    return names


def _strings(ops: _Operations, at: Integers) -> tuple[list[bytes], list[bytes]]:
    """Names and values of what is in _STRINGS; those of records that are refused may be impossible,
    or be missing.
    """
    kinds = ops.kind[at]
    name_bytes, value_bytes = (
        ops.column(at, layout.OP_XATTR_DTYPE, name).astype(np.int64)
        for name in ("name_bytes", "value_bytes")
    )
    starts = ops.position[at] + operations.LEAST_BYTES[layout.OP_XATTR_SET]  # as of the others
    middles = starts + name_bytes
    ends = middles + value_bytes
    is_link, is_set = kinds == layout.OP_SYMLINK, kinds == layout.OP_XATTR_SET
    wrong = ends > ops.end[at]
    wrong |= is_link & ((value_bytes == 0) | (value_bytes > layout.SYMLINK_BYTES_MAX))
    wrong |= is_set & ((name_bytes == 0) | (name_bytes > layout.XATTR_NAME_BYTES_MAX))
    ops.refuse(at, wrong)
    end = int(np.argmax(wrong)) if wrong.any() else len(at)
    names, values = ops.slices(starts[:end], middles[:end]), ops.slices(middles[:end], ends[:end])
    if b"\0" in b"".join(names):
        bad = [b"\0" in name for name in names]
        ops.refuse(at[:end], np.array(bad, dtype=np.bool_) & is_set[:end])
    return names, values


def _extents(ops: _Operations, at: Integers) -> Rows:
    dtype = layout.OP_EXTENT_DTYPE
    infos: Rows = np.empty(len(at), dtype=EXTENT_INFO_DTYPE)
    for name in dtype.names or ():
        infos[name] = ops.column(at, dtype, name)
    crcs = ops.position[at] + operations.LEAST_BYTES[layout.OP_EXTENT]
    counts = infos["crc_count"].astype(np.int64)
    wrong = (infos["id"] >= layout.NUMBER_LIMIT) | (counts > operations.CHUNKS_MAX)
    ops.refuse(at, wrong | (crcs + 4 * counts > ops.end[at]))
    infos["crc_index"] = crcs // 4
    return infos


def _changes(ops: _Operations, at: Integers) -> Rows:
    dtype = layout.OP_CONTENT_DTYPE
    changes: Rows = np.empty(len(at), dtype=CHANGE_DTYPE)
    for name in ("cut", "size", "ref_count"):
        changes[name] = ops.column(at, dtype, name)
    refs = ops.position[at] + operations.LEAST_BYTES[layout.OP_CONTENT]
    room = (ops.end[at] - refs) // layout.REF_DTYPE.itemsize
    wrong = changes["size"] > layout.FILE_SIZE_MAX
    ops.refuse(at, wrong | (changes["ref_count"] > room.astype(np.uint64)))
    changes["refs_offset"] = refs
    return changes


def decode(
    data: Buffer, starts: Integers, payload_bytes: Integers, counts: Integers
) -> OperationColumns:
    """The operations of payloads at ``starts`` (ascending multiples of 8, all inside ``data``)."""
    ops = _Operations(data, starts, payload_bytes, counts)
    columns = (layout.OP_INODE, layout.OP_EXTENT, layout.OP_CONTENT)
    of_names = (layout.OP_LINK, layout.OP_UNLINK)
    at_inode, at_extent, at_change = (np.flatnonzero(ops.kind == kind) for kind in columns)
    at_name = np.flatnonzero(np.isin(ops.kind, of_names))
    at_string = np.flatnonzero(np.isin(ops.kind, _STRINGS))
    at_other = np.flatnonzero(~np.isin(ops.kind, columns + of_names + _STRINGS))
    inos, modes = _inos_and_modes(ops, at_inode)
    names = _names(ops, at_name)
    extents = _extents(ops, at_extent)
    changes = _changes(ops, at_change)
    string_names, string_values = _strings(ops, at_string)
    others = ops.decode_one_by_one(at_other)
    index = np.empty(len(ops.kind), dtype=np.int64)
    for at in (at_inode, at_name, at_extent, at_change, at_string, at_other):
        index[at] = np.arange(len(at))
    definitions = np.cumsum(ops.kind == layout.OP_EXTENT)
    changes["definitions"] = definitions[at_change]
    good = int(np.searchsorted(ops.record, ops.good))
    listed = np.flatnonzero(ops.kind[:good] != layout.OP_EXTENT)
    at_inode, at_name, at_extent, at_change, at_string = (
        at[: np.searchsorted(at, good)]
        for at in (at_inode, at_name, at_extent, at_change, at_string)
    )
    return OperationColumns(
        good_records=ops.good,
        kinds=ops.kind[listed],
        records=ops.record[listed],
        indexes=index[listed],
        inos=inos[: len(at_inode)],
        modes=modes[: len(at_inode)],
        names=names[: len(at_name)],
        parents=ops.column(at_name, layout.OP_NAME_DTYPE, "parent"),
        meant=ops.column(at_name, layout.OP_NAME_DTYPE, "ino"),
        extents=extents[: len(at_extent)],
        extent_records=ops.record[at_extent],
        changes=changes[: len(at_change)],
        change_records=ops.record[at_change],
        change_inos=ops.column(at_change, layout.OP_CONTENT_DTYPE, "ino"),
        asides=(ops.flags[at_change] & layout.OP_FLAG_ASIDE) != 0,
        string_inos=ops.column(at_string, layout.OP_XATTR_DTYPE, "ino"),
        string_names=string_names[: len(at_string)],
        string_values=string_values[: len(at_string)],
        others=others,
        other_definitions=definitions[at_other].tolist(),
        _words=ops.words,
        _inode_positions=ops.position[at_inode],
    )

"""The metadata image in the making: the committed state as of one moment, taken down in slices.

Never here: its header and checksums (``format.image``), where it goes and when (``rollover``),
loading one (``loading``).

Invariants
- An image holds the committed state only: no uncommitted inode, no unpublished byte of a file.
- It holds that state as it was when the export began, whatever is committed between two slices.
- A slice looks at a bounded number of inodes, names and references, however many there are; only
  the names of one directory are copied (not looked at) all at once, 10^5 of them in 2 ms, and the
  leaves of one content are noted (127 references each).

Why the state is that of one moment. What an image says of an inode are its committed attributes,
names, targets, extended attributes and references, committed and kept aside. All of them change in
DRAM only when the operations of a record are applied, after that record was stored
(``Volume.commit``). Each operation names the inodes that it changes, but for one that loses a name,
which the name leads to; ``Export.keep`` takes down every one of them that is not taken down yet,
with everything about it, before the record is stored. What changes without a record belongs to
inodes that no image holds: those not committed yet (known when the export begins, or younger) and
those without a name. What the journal knows of extents is remembered by the engine, where it
changes, in the same way (csrc/extents/snapshot.c); so are the references of a content that has many
of them, from when its inode is taken down on (csrc/extents/reference_snapshot.c).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from cxlfs.errors import InvariantError
from cxlfs.format import image, layout, operations
from cxlfs.format.packing import packer
from cxlfs.native.snapshot import LEFT_OUT, ExtentSnapshot, ReferenceSnapshot, references_of
from cxlfs.store.namespace import FileKind, Inode, Namespace, entries_of, stored_named_lsn

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.operations import Operation
    from cxlfs.native.extents import Engine
    from cxlfs.native.maps import FileMap

INODES_PER_SLICE = 512
NAMES_PER_SLICE = 4096
EXTENTS_PER_SLICE = 8192
REFERENCES_PER_SLICE = 65_536
"""A slice takes some 2 ms: 30 ns for each."""
REFERENCES_AT_ONCE = 1024
"""More than that of one content are a snapshot of their own, taken down in slices."""
_WEIGHT_PER_SLICE = 65_536
"""References that are copied, and names."""
_NAME_DTYPE = layout.IMAGE_NAME_DTYPE
_INODE = packer(layout.IMAGE_INODE_DTYPE)
_XATTR = packer(layout.IMAGE_XATTR_DTYPE)


class _OfOneInode(Protocol):
    @property
    def ino(self) -> int: ...


def _inode_of(op: _OfOneInode) -> tuple[int, ...]:
    return (op.ino,)


def _inodes_of_link(op: operations.LinkOperation) -> tuple[int, ...]:
    return (op.parent, op.ino)


def _inodes_of_unlink(op: operations.UnlinkOperation) -> tuple[int, ...]:
    return (op.parent,)


def _inodes_of_move(op: operations.MoveOperation) -> tuple[int, ...]:
    return op.inos


def _none(_op: operations.ExtentOperation) -> tuple[int, ...]:
    return ()  # the engine sees it


NAMED_BY: dict[type, Callable[..., tuple[int, ...]]] = {
    operations.InodeOperation: _inode_of,
    operations.LinkOperation: _inodes_of_link,
    operations.UnlinkOperation: _inodes_of_unlink,
    operations.SymlinkOperation: _inode_of,
    operations.XattrSetOperation: _inode_of,
    operations.XattrRemoveOperation: _inode_of,
    operations.ExtentOperation: _none,
    operations.ContentOperation: _inode_of,
    operations.PromoteOperation: _inode_of,
    operations.AsideDropOperation: _inode_of,
    operations.MoveOperation: _inodes_of_move,
}
"""The inodes that an operation names; a name that it gives or takes leads to one more."""


class Export:
    """The committed state as it is when this is made: by :meth:`step` until that returns False,
    while every record is shown to :meth:`keep` before it is stored; then :meth:`assemble`. One at a
    time, but for ``whole`` ones, which take everything at once by :meth:`take_all`.
    """

    def __init__(
        self,
        namespace: Namespace,
        engine: Engine,
        *,
        uuid: bytes,
        lsn: int,
        next_extent_id: int,
        whole: bool = False,
    ) -> None:
        self.longest_slice = 0
        """Inodes and names that were looked at in the longest slice so far."""
        self._namespace = namespace
        self._engine = engine
        self._uuid = uuid
        self._info = image.ImageInfo(lsn, namespace.next_ino, next_extent_id, 0)
        self._uncommitted = np.array(sorted(namespace.uncommitted), dtype=np.uint64)
        self._inodes = [] if whole else list(namespace.inodes.values())
        self._position = 0
        self._slice_inodes = INODES_PER_SLICE
        self._copied: list[tuple[int, list[bytes], list[int]]] = []
        """Directories whose names have no rows yet: inode, names, what they mean."""
        self._references: list[ReferenceSnapshot] = []
        """Whose rows are part of the image, and not all there yet."""
        self._names: list[npt.NDArray[np.void]] = []
        self._extents: tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]] | None = None
        self._sections = {kind: image.Section() for kind in layout.SECTION_ITEM_BYTES}
        self._snapshot: ExtentSnapshot | None = None
        self._number = 0
        if not whole:
            self._snapshot = ExtentSnapshot(engine)
            namespace.exports += 1
            self._number = namespace.exports

    # --- slices -----------------------------------------------------------------------------

    def step(self) -> bool:
        """One slice; False when there is nothing more to take. Raises OutOfMemoryError."""
        if self._references:
            self._step_references()
        elif self._copied:
            self._take_names()
        elif self._position < len(self._inodes):
            first = self._position
            self._position += self._slice_inodes
            inodes = self._inodes[first : self._position]
            self._take([inode for inode in inodes if inode.exported != self._number])
            if self._position >= len(self._inodes):
                self._inodes.clear()
                self._position = 0
        elif self._snapshot is not None and not self._snapshot.step(EXTENTS_PER_SLICE):
            self._extents = self._snapshot.take()
            return False
        return True

    def keep(self, ops: Sequence[Operation]) -> None:
        """A record of ``ops`` is about to be stored: take down what it changes.

        Raises OutOfMemoryError.
        """
        known, found = self._namespace.inodes, dict[int, Inode]()
        for op in ops:
            inos = NAMED_BY[type(op)](op)
            if isinstance(op, operations.LinkOperation | operations.UnlinkOperation):
                inos = (*inos, (known[op.parent].entries or {}).get(op.name, 0))
            for ino in inos:
                inode = known.get(ino)
                if inode is not None and inode.exported != self._number:
                    found[ino] = inode
        if found:
            self._take(list(found.values()))

    def take_all(self) -> None:
        """Everything at once. Nothing is marked: another export may be under way."""
        self._take(list(self._namespace.inodes.values()))
        while self._copied:
            self._take_names()
        _, _, infos, crcs = self._engine.export_maps([])
        self._extents = infos, crcs

    def cancel(self) -> None:
        """Forget it."""
        if self._snapshot is not None:
            self._snapshot.cancel()
        while self._references:
            self._references.pop().cancel()

    def _take(self, inodes: list[Inode]) -> None:
        """Take down what the image has of them."""
        self.longest_slice = max(self.longest_slice, len(inodes))
        if self._number:
            for inode in inodes:
                inode.exported = self._number
        next_ino, uncommitted = self._info.next_ino, frozenset(self._uncommitted.tolist())
        present = [
            inode
            for inode in inodes
            if inode.links and inode.ino < next_ino and inode.ino not in uncommitted
        ]
        refs = self._take_rows(present)
        names = self._copy_names([inode for inode in present if inode.entries])
        self._fit_slices(len(inodes), refs + names)
        for inode in present:
            for name, value in (inode.xattrs or {}).items():
                self._take_string(layout.SECTION_XATTRS, inode.ino, name, value)
            if inode.kind is FileKind.SYMLINK:
                self._take_string(layout.SECTION_SYMLINKS, inode.ino, b"", inode.target)

    def _fit_slices(self, inodes: int, weight: int) -> None:
        """Fewer inodes next time, where they have many references or names."""
        fitting = inodes * _WEIGHT_PER_SLICE // max(weight, 1)
        self._slice_inodes = max(1, min(INODES_PER_SLICE, fitting))

    def _take_rows(self, present: list[Inode]) -> int:
        maps: list[FileMap] = []
        for inode in present:
            if inode.live is not None:
                maps.append(inode.committed or inode.live)
                if inode.aside is not None:
                    maps.append(inode.aside)
        sizes, counts, refs = references_of(maps, REFERENCES_AT_ONCE if self._number else LEFT_OUT)
        self._add_references(maps, sizes, counts, refs)
        contents = zip(sizes.tolist(), counts.tolist(), strict=True)
        since = self._namespace.named_since
        rows = [_row(inode, since(inode), contents) for inode in present]
        self._sections[layout.SECTION_INODES].add(b"".join(rows), len(rows))
        return len(refs)

    def _add_references(
        self,
        maps: list[FileMap],
        sizes: npt.NDArray[np.uint64],
        counts: npt.NDArray[np.uint64],
        refs: npt.NDArray[np.void],
    ) -> None:
        """``refs``, and between them the rows that will be those of contents that were left out,
        of which ``sizes`` and ``counts`` say from now on what the snapshot has.
        """
        section, first = self._sections[layout.SECTION_REFS], 0
        left_out = np.flatnonzero(counts == LEFT_OUT).tolist()
        counts[left_out] = 0
        ends = np.cumsum(counts).tolist()
        for index in left_out:
            snapshot = ReferenceSnapshot(maps[index])
            self._references.append(snapshot)
            section.add(_bytes_of(refs[first : ends[index]]), ends[index] - first)
            section.add(_bytes_of(snapshot.rows), len(snapshot.rows))
            sizes[index], counts[index] = snapshot.size, len(snapshot.rows)
            first = ends[index]
        section.add(_bytes_of(refs[first:]), len(refs) - first)

    def _step_references(self) -> None:
        """As many references as a slice takes."""
        left = REFERENCES_PER_SLICE
        while self._references and left > 0:
            snapshot = self._references[-1]
            if snapshot.step(left):
                return
            left -= len(snapshot.rows)
            self._references.pop()

    def _copy_names(self, directories: list[Inode]) -> int:
        """Their names as they are now, to be looked at later; returns how many."""
        copied = 0
        for directory in directories:
            entries = entries_of(directory)
            self._copied.append((directory.ino, list(entries), list(entries.values())))
            copied += len(entries)
        return copied

    def _take_names(self) -> None:
        """Rows for as many of the copied names as a slice takes."""
        parents, names, inos = list[int](), list[bytes](), list[int]()
        while self._copied and len(names) < NAMES_PER_SLICE:
            parent, left, meant = self._copied.pop()
            room = NAMES_PER_SLICE - len(names)
            names.extend(left[:room])
            inos.extend(meant[:room])
            parents.extend([parent] * min(room, len(left)))
            if len(left) > room:
                self._copied.append((parent, left[room:], meant[room:]))
        self.longest_slice = max(self.longest_slice, len(names))
        children = np.array(inos, dtype=np.uint64)
        known = children < self._info.next_ino
        known &= ~np.isin(children, self._uncommitted)
        if not known.all():
            names = list(itertools.compress(names, known.tolist()))
        strings = self._sections[layout.SECTION_STRINGS]
        lengths = np.fromiter(map(len, names), dtype=np.uint64, count=len(names))
        rows = np.zeros(len(names), dtype=_NAME_DTYPE)
        rows["parent"] = np.array(parents, dtype=np.uint64)[known]
        rows["ino"] = children[known]
        rows["name_offset"] = np.cumsum(lengths) - lengths + np.uint64(strings.length)
        rows["name_bytes"] = lengths
        self._names.append(rows)
        strings.add(b"".join(names), 0)

    def _take_string(self, kind: int, ino: int, name: bytes, value: bytes) -> None:
        strings = self._sections[layout.SECTION_STRINGS]
        self._sections[kind].add(_XATTR.pack(ino, strings.length, len(name), len(value)), 1)
        strings.add(name + value, 0)

    # --- putting together -------------------------------------------------------------------

    def assemble(self) -> image.Image:
        """The image, once everything is taken; uses nothing that anybody changes."""
        if self._extents is None:
            raise InvariantError("an image is assembled before all of it is taken")
        infos, crcs = _by_id(*self._extents)
        names = np.concatenate(self._names) if self._names else np.zeros(0, _NAME_DTYPE)
        if (names["parent"][1:] < names["parent"][:-1]).any():
            names = names[np.argsort(names["parent"], kind="stable")]
        sections = self._sections
        sections[layout.SECTION_NAMES].add(_bytes_of(names), len(names))
        sections[layout.SECTION_EXTENTS].add(_bytes_of(infos), len(infos))
        sections[layout.SECTION_CRCS].add(_bytes_of(crcs), len(crcs))
        sections[layout.SECTION_STRINGS].count = sections[layout.SECTION_STRINGS].length
        return image.assemble(sections, self._info, uuid=self._uuid)


def build(
    namespace: Namespace, engine: Engine, *, uuid: bytes, lsn: int, next_extent_id: int
) -> tuple[bytes, image.ImageInfo]:
    """The committed state up to ``lsn`` as bytes, all at once."""
    export = Export(
        namespace, engine, uuid=uuid, lsn=lsn, next_extent_id=next_extent_id, whole=True
    )
    export.take_all()
    made = export.assemble()
    return made.read(0, len(made)), made.info


def _row(inode: Inode, named_lsn: int, contents: Iterator[tuple[int, int]]) -> bytes:
    """``contents``: size and number of references of this inode's contents come next."""
    size = ref_count = aside_size = aside_ref_count = 0
    flags = inode.flags
    if inode.live is not None:
        size, ref_count = next(contents)
        if inode.aside is not None:
            flags |= layout.INODE_ASIDE
            aside_size, aside_ref_count = next(contents)
    return _INODE.pack(
        inode.ino,
        inode.mode,
        inode.uid,
        inode.gid,
        inode.rdev,
        flags,
        stored_named_lsn(named_lsn),
        inode.atime_ns,
        inode.committed_mtime_ns,
        inode.committed_ctime_ns,
        inode.birth_ns,
        inode.commit_lsn,
        inode.commit_ns,
        size,
        ref_count,
        aside_size,
        aside_ref_count,
    )


def _by_id(
    infos: npt.NDArray[np.void], crcs: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.uint32]]:
    """Extents and their checksums in the order of their numbers: equal states, equal images."""
    if not (infos["id"][1:] < infos["id"][:-1]).any():
        return infos, crcs
    infos = infos[np.argsort(infos["id"], kind="stable")]
    counts = infos["crc_count"].astype(np.int64)
    starts = np.cumsum(counts) - counts
    moved = infos["crc_index"].astype(np.int64) - starts
    crcs = crcs[np.repeat(moved, counts) + np.arange(len(crcs))]
    infos["crc_index"] = starts
    return infos, crcs


def _bytes_of(rows: npt.NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(rows).view(np.uint8).data

"""Loading a metadata image: the whole committed namespace and every file map, out of its columns.

Never here: what an image looks like and whether its numbers can be (``format.image_columns``),
where it lies on the media (``recovery``), making one (``export``).

Invariants
- Loading an image and building one again gives the same state (not necessarily the same bytes).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.format import image_columns, layout
from cxlfs.format.image import require
from cxlfs.store.namespace import Inode, Namespace, entries_of, kind_of
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.image import ImageInfo
    from cxlfs.format.image_columns import ContentColumns, ImageColumns
    from cxlfs.native.extents import Engine
    from cxlfs.native.maps import FileMap

_TYPE_BITS = 0o170000
_INODE_COLUMNS = (
    *("ino", "mode", "uid", "gid", "rdev", "flags"),
    *("atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "commit_lsn", "commit_ns"),
)
"""What an Inode is made of, in its order."""


def load(
    data: bytes | bytearray, engine: Engine, *, uuid: bytes, header_crc: int
) -> tuple[Namespace, ImageInfo]:
    """Fill an empty engine and make the namespace; raises CorruptionError."""
    columns = image_columns.decode(data, uuid=uuid, header_crc=header_crc)
    engine.define(columns.extents, columns.checksums)
    contents = columns.contents
    maps = _objects(
        engine.import_maps(contents.owners, contents.sizes, contents.firsts, contents.references)
    )
    namespace = Namespace()
    _load_inodes(namespace, columns, maps)
    _load_asides(namespace, columns, maps)
    _load_names(namespace, columns)
    for ino, name, value in columns.xattrs:
        namespace.set_xattr(namespace.inodes[ino], name, value)
    for ino, target in columns.targets:
        namespace.set_target(namespace.inodes[ino], target)
    root = namespace.inodes[ROOT_INO]
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = columns.info.next_ino
    return namespace, columns.info


def _objects(values: list[bytes] | list[FileMap]) -> npt.NDArray[np.object_]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _column(values: npt.NDArray[np.generic]) -> Iterable[int]:
    """As Python's numbers; one alone where all are equal, which saves time and memory."""
    if len(values) and (values == values[0]).all():
        return itertools.repeat(int(values[0]), len(values))
    numbers: list[int] = values.tolist()
    return numbers


def _load_inodes(
    namespace: Namespace, columns: ImageColumns, maps: npt.NDArray[np.object_]
) -> None:
    rows, contents, names = columns.inodes, columns.contents, columns.names
    live = np.full(len(rows), None, dtype=object)
    live[contents.live_places] = maps[contents.live]
    last_names = np.full(len(rows), b"", dtype=object)
    last_names[names.meant] = _objects(names.names)
    fields = {name: _column(rows[name]) for name in _INODE_COLUMNS}
    fields["flags"] = _column(rows["flags"] & ~np.uint32(layout.INODE_ASIDE))
    made = map(
        Inode,
        *fields.values(),
        _column(columns.links),
        _column(columns.parents),
        last_names.tolist(),
        live.tolist(),
        _column(columns.subdirectories),
    )
    namespace.inodes.update(zip(rows["ino"].tolist(), made, strict=True))
    types, counts = np.unique(rows["mode"] & _TYPE_BITS, return_counts=True)
    for mode, count in zip(types.tolist(), counts.tolist(), strict=True):
        kind = kind_of(mode)
        if kind is not None:
            namespace.kind_counts[kind] += count


def _load_asides(
    namespace: Namespace, columns: ImageColumns, maps: npt.NDArray[np.object_]
) -> None:
    """What inodes keep aside."""
    contents: ContentColumns = columns.contents
    owners = contents.owners[contents.asides].tolist()
    for ino, aside in zip(owners, maps[contents.asides].tolist(), strict=True):
        namespace.inodes[ino].aside = aside


def _load_names(namespace: Namespace, columns: ImageColumns) -> None:
    """Into their directories; what they say of their inodes is told already."""
    rows, names, inodes = columns.names.rows, columns.names.names, namespace.inodes
    parents, children = rows["parent"], rows["ino"].tolist()
    borders = np.flatnonzero(parents[1:] != parents[:-1]) + 1
    for first, end in itertools.pairwise([0, *borders.tolist(), len(rows)]):
        if first == end:
            break
        entries = entries_of(inodes[int(parents[first])])
        before = len(entries)
        entries.update(zip(names[first:end], children[first:end], strict=True))
        require(len(entries) == before + end - first, "a name appears twice")
    namespace.name_bytes += int(rows["name_bytes"].sum())
    namespace.string_items += len(rows)

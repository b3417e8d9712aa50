"""Loading a metadata image: the whole committed namespace and every file map, out of its columns.

Never here: what an image looks like and whether its numbers can be (``format.image_columns``),
where it lies on the media (``recovery``), making one (``export``).

Invariants
- Inodes stay asleep (``sleepers``), but for directories, which get their names, and whatever else
  is more than a plain file.
- Loading an image and building one again gives the same state (not necessarily the same bytes).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.format import image_columns
from cxlfs.format.image import require
from cxlfs.native.maps import FileMap
from cxlfs.store.namespace import FileKind, Namespace, entries_of, kind_of
from cxlfs.store.sleepers import REFERENCES_MAX, SleeperColumns, Sleepers
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.image import ImageInfo
    from cxlfs.format.image_columns import ImageColumns
    from cxlfs.native.extents import Engine

_TYPE_BITS = 0o170000


def load(
    data: bytes | bytearray, engine: Engine, *, uuid: bytes, header_crc: int
) -> tuple[Namespace, ImageInfo]:
    """Fill an empty engine and make the namespace; raises CorruptionError."""
    columns = image_columns.decode(data, uuid=uuid, header_crc=header_crc)
    engine.define(columns.extents, columns.checksums)
    contents = columns.contents
    maps = engine.import_contents(
        contents.owners, contents.sizes, contents.firsts, contents.references
    )
    namespace = Namespace()
    namespace.inodes.put_to_sleep(Sleepers(engine, _sleepers(columns, maps)))
    _wake(namespace, columns)
    asides = zip(contents.owners[contents.asides].tolist(), maps[contents.asides], strict=True)
    for ino, address in asides:
        namespace.inodes[ino].aside = FileMap.at(engine, ino, int(address))
    _load_names(namespace, columns)
    for ino, name, value in columns.xattrs:
        namespace.set_xattr(namespace.inodes[ino], name, value)
    for ino, target in columns.targets:
        namespace.set_target(namespace.inodes[ino], target)
    root = namespace.inodes[ROOT_INO]
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = columns.info.next_ino
    return namespace, columns.info


def _sleepers(columns: ImageColumns, maps: npt.NDArray[np.uintp]) -> SleeperColumns:
    """All inodes of the image; nothing of this keeps the bytes of the image."""
    inodes, contents, names = columns.inodes, columns.contents, columns.names
    name_indexes = np.full(len(inodes), -1, dtype=np.int64)
    name_indexes[names.meant] = np.arange(len(names.meant))
    addresses = np.zeros(len(inodes), dtype=np.uintp)
    addresses[contents.live_places] = maps[contents.live]
    order = np.argsort(inodes["ino"], kind="stable")
    return SleeperColumns(
        rows=inodes[order],
        links=columns.links[order],
        subdirectories=columns.subdirectories[order],
        parents=columns.parents[order],
        name_indexes=name_indexes[order],
        names=names.names,
        contents=addresses[order],
    )


def _wake(namespace: Namespace, columns: ImageColumns) -> None:
    """Whatever others expect to be awake; and count all kinds."""
    inodes = columns.inodes
    types, which, counts = np.unique(
        inodes["mode"] & _TYPE_BITS, return_inverse=True, return_counts=True
    )
    kinds = [kind_of(mode) for mode in types.tolist()]
    for kind, count in zip(kinds, counts.tolist(), strict=True):
        if kind is not None:
            namespace.kind_counts[kind] += count
    is_special = np.array([kind in (FileKind.DIRECTORY, FileKind.SYMLINK) for kind in kinds])
    awake = is_special[which] | (inodes["ref_count"] > REFERENCES_MAX)
    for ino in inodes["ino"][awake].tolist():
        namespace.inodes.get(ino)


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

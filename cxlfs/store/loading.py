"""Loading a metadata image: the whole committed namespace and every file map, out of its columns.

Never here: what an image looks like and whether its numbers can be (``format.image_columns``),
where it lies on the media (``recovery``), making one (``export``).

Invariants
- Every inode is an object afterwards: a million of them take 2 s and 600 MB.
- Loading an image and building one again gives the same state (not necessarily the same bytes).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.format import image_columns, layout
from cxlfs.format.image import require
from cxlfs.native.extents import Engine
from cxlfs.native.maps import FileMap
from cxlfs.store.namespace import Inode, Namespace, entries_of
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.image import ImageInfo
    from cxlfs.format.image_columns import DataColumns, ImageColumns, NameColumns
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media

_FIELDS = (
    *("mode", "uid", "gid", "rdev", "flags"),
    *("atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "commit_lsn", "commit_ns"),
)
"""Of a row, as ``Inode`` takes them behind the number."""
ALONE_BYTES_MAX = 256 << 10
"""Of an image; a thread for half of a smaller one costs more than it saves: of 3 kB 0.3 of 0.8 ms,
nothing of 180 kB, and with 1.8 MB it takes 8.2 ms instead of 10.5."""


def empty_engine(media: Media, block: Superblock) -> Engine:
    """For the segments of a store, to be filled."""
    return Engine(
        media.handle,
        first=block.first_segment_offset,
        segment_size=block.segment_size_bytes,
        segment_count=block.segment_count,
        chunk=block.chunk_bytes,
    )


def load(
    data: bytes | bytearray, engine: Engine, *, uuid: bytes, header_crc: int
) -> tuple[Namespace, ImageInfo]:
    """Fill an empty engine and make the namespace; raises CorruptionError."""
    data_columns = image_columns.decode_data(data, uuid=uuid, header_crc=header_crc)
    namespace = Namespace()
    with _filling(engine, data_columns, beside=len(data) > ALONE_BYTES_MAX) as filled:
        columns = image_columns.decode_rest(data_columns)
        _add_inodes(namespace, columns)
        _add_names(namespace, columns.names)
        maps = filled()
    contents, inos = data_columns.contents, data_columns.inodes["ino"]
    inodes = namespace.inodes
    for ino, address in _owned(inos, contents.live_places, maps[contents.live]):
        inodes[ino].live = FileMap.at(engine, ino, address)
    for ino, address in _owned(inos, contents.aside_places, maps[contents.asides]):
        inodes[ino].aside = FileMap.at(engine, ino, address)
    for ino, name, value in columns.xattrs:
        namespace.set_xattr(inodes[ino], name, value)
    for ino, target in columns.targets:
        namespace.set_target(inodes[ino], target)
    root = inodes[ROOT_INO]
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = data_columns.info.next_ino
    return namespace, data_columns.info


@contextlib.contextmanager
def _filling(
    engine: Engine, columns: DataColumns, *, beside: bool
) -> Iterator[Callable[[], npt.NDArray[np.uintp]]]:
    """What :func:`_fill` returns, to be asked for in the end; ``beside``: a thread is at it."""
    if not beside:
        yield lambda: _fill(engine, columns)
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cxlfs-open") as pool:
        yield pool.submit(_fill, engine, columns).result


def _fill(engine: Engine, columns: DataColumns) -> npt.NDArray[np.uintp]:
    """Extents and contents into the engine, and where each content is now. Python waits for
    nothing of it: it is the longer half of loading.
    """
    engine.define(columns.extents, columns.checksums)
    contents = columns.contents
    return engine.import_contents(
        contents.owners, contents.sizes, contents.firsts, contents.references
    )


def _owned(
    inos: npt.NDArray[np.uint64], places: npt.NDArray[np.int64], maps: npt.NDArray[np.uintp]
) -> Iterator[tuple[int, int]]:
    """The inode of each content, and its address."""
    return zip(inos[places].tolist(), maps.tolist(), strict=True)


def _add_inodes(namespace: Namespace, columns: ImageColumns) -> None:
    """All inodes of the image, by number, whose contents are not there yet."""
    order = np.argsort(columns.data.inodes["ino"], kind="stable")
    rows = columns.data.inodes.take(order)  # an index does it a field at a time: 8 times as long
    rows["flags"] &= np.uint32(~layout.INODE_ASIDE & 0xFFFF_FFFF)
    last_names = np.full(len(rows), -1, dtype=np.int64)
    last_names[columns.names.meant] = np.arange(len(columns.names.meant))
    names = columns.names.names
    inos = rows["ino"].tolist()
    made = map(  # a column for each argument: a call in Python would take as long again
        Inode,
        inos,
        *(rows[name].tolist() for name in _FIELDS),
        *(columns.links[order].tolist(), columns.parents[order].tolist()),
        [b"" if index < 0 else names[index] for index in last_names[order].tolist()],
        itertools.repeat(None),
        columns.subdirectories[order].tolist(),
    )
    namespace.inodes.update(zip(inos, made, strict=True))
    for inode, named_lsn in zip(namespace.inodes.values(), rows["named_lsn"].tolist(), strict=True):
        inode.named_lsn = named_lsn
        namespace.kind_counts[inode.kind] += 1


def _add_names(namespace: Namespace, names: NameColumns) -> None:
    """What each directory holds; what names say of their inodes is told already."""
    parents, children = names.rows["parent"], names.rows["ino"].tolist()
    borders = (np.flatnonzero(parents[1:] != parents[:-1]) + 1).tolist()
    for first, end in itertools.pairwise([0, *borders, len(names.rows)]):
        if first == end:
            break
        entries = entries_of(namespace.inodes[int(parents[first])])
        before = len(entries)
        entries.update(zip(names.names[first:end], children[first:end], strict=True))
        require(len(entries) == before + end - first, "a name appears twice")
    namespace.name_bytes += int(names.rows["name_bytes"].sum())
    namespace.string_items += len(names.rows)

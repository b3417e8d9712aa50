"""Loading a metadata image: the whole committed namespace and every file map, out of its columns.

Never here: what an image looks like and whether its numbers can be (``format.image_columns``),
where it lies on the media (``recovery``), making one (``export``).

Invariants
- Inodes stay asleep (``sleepers``), but for directories, which get their names, and whatever else
  is more than a plain file.
- Loading an image and building one again gives the same state (not necessarily the same bytes).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.format import image_columns
from cxlfs.format.image import require
from cxlfs.native.extents import Engine
from cxlfs.native.maps import FileMap
from cxlfs.store.namespace import FileKind, Namespace, kind_of
from cxlfs.store.sleepers import REFERENCES_MAX, SleeperColumns, Sleepers, put_xattr
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.image import ImageInfo
    from cxlfs.format.image_columns import DataColumns, ImageColumns, NameColumns
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media
    from cxlfs.native.extents import Rows

_TYPE_BITS = 0o170000
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
        entries = _entries(columns.names)
        order = np.argsort(data_columns.inodes["ino"], kind="stable")
        asleep = _sleepers(columns, order)
        sleeping = Sleepers(engine, asleep)
        namespace.inodes.put_to_sleep(sleeping)
        _wake_special(namespace, sleeping, asleep.rows)
        maps = filled()
    info, contents = data_columns.info, data_columns.contents
    addresses = np.zeros(len(order), dtype=np.uintp)
    addresses[contents.live_places] = maps[contents.live]
    asleep.contents[:] = addresses[order]
    large = np.flatnonzero(asleep.rows["ref_count"] > REFERENCES_MAX)
    namespace.inodes.add_awake(sleeping.wake_rows(large))
    asides = zip(contents.owners[contents.asides].tolist(), maps[contents.asides], strict=True)
    for ino, address in asides:
        namespace.inodes[ino].aside = FileMap.at(engine, ino, int(address))
    for ino, names in entries:
        namespace.inodes[ino].entries = names
    namespace.name_bytes += int(columns.names.rows["name_bytes"].sum())
    namespace.string_items += len(columns.names.rows)
    for ino, name, value in columns.xattrs:
        put_xattr(namespace, sleeping, ino, name, value)
    for ino, target in columns.targets:
        namespace.set_target(namespace.inodes[ino], target)
    root = namespace.inodes[ROOT_INO]
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = info.next_ino
    return namespace, info


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


def _sleepers(columns: ImageColumns, order: npt.NDArray[np.int64]) -> SleeperColumns:
    """All inodes of the image, whose contents are not there yet; nothing of this keeps the bytes of
    it.
    """
    inodes, names = columns.data.inodes, columns.names
    name_indexes = np.full(len(inodes), -1, dtype=np.int64)
    name_indexes[names.meant] = np.arange(len(names.meant))
    return SleeperColumns(
        rows=inodes.take(order),  # an index would do it a field at a time: 8 times as long
        links=columns.links[order],
        subdirectories=columns.subdirectories[order],
        parents=columns.parents[order],
        name_indexes=name_indexes[order],
        names=names.names,
        contents=np.zeros(len(inodes), dtype=np.uintp),
    )


def _wake_special(namespace: Namespace, sleeping: Sleepers, inodes: Rows) -> None:
    """What has no content and is expected to be awake, of all that sleep now; count all kinds."""
    types, which, counts = np.unique(
        inodes["mode"] & _TYPE_BITS, return_inverse=True, return_counts=True
    )
    kinds = [kind_of(mode) for mode in types.tolist()]
    for kind, count in zip(kinds, counts.tolist(), strict=True):
        if kind is not None:
            namespace.kind_counts[kind] += count
    is_special = np.array([kind in (FileKind.DIRECTORY, FileKind.SYMLINK) for kind in kinds])
    namespace.inodes.add_awake(sleeping.wake_rows(np.flatnonzero(is_special[which])))


def _entries(names: NameColumns) -> list[tuple[int, dict[bytes, int]]]:
    """Each directory and its names; what they say of their inodes is told already."""
    parents, children = names.rows["parent"], names.rows["ino"].tolist()
    borders = np.flatnonzero(parents[1:] != parents[:-1]) + 1
    found: dict[int, dict[bytes, int]] = {}
    for first, end in itertools.pairwise([0, *borders.tolist(), len(names.rows)]):
        if first == end:
            break
        entries = found.setdefault(int(parents[first]), {})
        before = len(entries)
        entries.update(zip(names.names[first:end], children[first:end], strict=True))
        require(len(entries) == before + end - first, "a name appears twice")
    return list(found.items())

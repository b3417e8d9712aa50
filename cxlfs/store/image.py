"""Loading a metadata image: the whole committed namespace and every file map, as columns.

Never here: making one (``export``), where it lies on the media (``recovery``).

Invariants
- Loading checks every section's checksum, then every number that is used as an index, a size or a
  reference, before it is used; memory is proportional to the image's own length.
- Loading an image and building one again gives the same state (not necessarily the same bytes).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError
from cxlfs.format import layout
from cxlfs.native import crc32c
from cxlfs.store.namespace import FileKind, Inode, Namespace, kind_of
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.extents import Engine
    from cxlfs.native.maps import FileMap

_TYPE_BITS = 0o170000
Sections = dict[int, bytes | memoryview]
"""Bytes of each section of an image."""
SUMMED_BYTES = layout.IMAGE_DTYPE.itemsize - 4
_INODE_COLUMNS = (
    *("ino", "mode", "uid", "gid", "rdev", "flags"),
    *("atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "commit_lsn", "commit_ns"),
)
"""What an Inode is made of, in its order."""


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInfo:
    """What the header says: last LSN included, counters, and checksum for the root."""

    lsn: int
    next_ino: int
    next_extent_id: int
    header_crc: int


# --- loading --------------------------------------------------------------------------------


def _damage(message: str) -> CorruptionError:
    return CorruptionError(message, structure="metadata image")


def _require(condition: object, message: str) -> None:
    if not condition:
        raise _damage(message)


def check(data: bytes | bytearray, *, uuid: bytes, header_crc: int) -> tuple[ImageInfo, Sections]:
    """Check header and sections; returns each section's bytes. Raises CorruptionError."""
    _require(len(data) >= layout.IMAGE_DTYPE.itemsize, "the metadata image is cut short")
    head = np.frombuffer(data, dtype=layout.IMAGE_DTYPE, count=1)[0]
    _require(head["magic"] == layout.IMAGE_MAGIC, "the metadata image has no magic")
    actual = crc32c(bytes(data[:SUMMED_BYTES]))
    _require(int(head["crc"]) == actual == header_crc, "metadata image header checksum mismatch")
    _require(head["uuid"].tobytes() == uuid, "the metadata image belongs to another store")
    sections: Sections = {}
    view = memoryview(data)
    for row in head["sections"]:
        kind, offset, length, count = (
            int(row[name]) for name in ("kind", "offset", "length", "item_count")
        )
        item = layout.SECTION_ITEM_BYTES.get(kind)
        if item is None or kind in sections:
            raise _damage("unknown or doubled image section")
        _require(
            offset % layout.SECTION_ALIGN == 0
            and offset + length <= len(data)
            and count * item == length,
            f"image section {kind} does not fit the image",
        )
        section = view[offset : offset + length]
        _require(int(row["crc"]) == crc32c(section), f"image section {kind} checksum mismatch")
        sections[kind] = section
    info = ImageInfo(
        int(head["lsn"]), int(head["next_ino"]), int(head["next_extent_id"]), header_crc
    )
    counters = (info.lsn, info.next_ino, info.next_extent_id)
    _require(max(counters) <= layout.NUMBER_LIMIT, "a counter beyond the limit")
    _require(info.next_ino > ROOT_INO and info.next_extent_id > 0, "a counter begins at zero")
    return info, sections


def load(
    data: bytes | bytearray, engine: Engine, *, uuid: bytes, header_crc: int
) -> tuple[Namespace, ImageInfo]:
    """Fill an empty engine and make the namespace; raises CorruptionError."""
    info, sections = check(data, uuid=uuid, header_crc=header_crc)
    rows = np.frombuffer(sections[layout.SECTION_INODES], dtype=layout.IMAGE_INODE_DTYPE)
    extents = np.frombuffer(sections[layout.SECTION_EXTENTS], dtype=layout.IMAGE_EXTENT_DTYPE)
    crcs = np.frombuffer(sections[layout.SECTION_CRCS], dtype="<u4")
    refs = np.frombuffer(sections[layout.SECTION_REFS], dtype=layout.REF_DTYPE)
    if len(extents):
        _require(int(extents["id"].max()) < info.next_extent_id, "extent id beyond the counter")
        _require(not extents["first_chunk"].any(), "an extent without its first chunks")
    engine.define(extents, crcs)
    namespace = Namespace()
    names = _Names(rows["ino"], sections)
    live, asides = _load_content(engine, rows, refs)
    _load_inodes(namespace, rows, info, names, live)
    for ino, aside in asides:
        namespace.inodes[ino].aside = aside
    _load_names(namespace, names, (rows["mode"] & _TYPE_BITS) == 0o040000)
    links = int(((rows["mode"] & _TYPE_BITS) == 0o120000).sum())
    _load_strings(namespace, sections, links)
    root = namespace.inodes.get(ROOT_INO)
    if root is None or root.entries is None:
        raise _damage("there is no root directory")
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = info.next_ino
    return namespace, info


def strings_of(sections: Sections) -> bytes:
    """The section that names, targets and attributes point into."""
    return bytes(sections[layout.SECTION_STRINGS])


class _Names:
    """The names, and what they say of the inodes that they mean, row by row of the inodes.

    All at once: 10^6 names that were looked at one by one cost half a second.
    """

    def __init__(self, inos: npt.NDArray[np.uint64], sections: Sections) -> None:
        self.rows = np.frombuffer(sections[layout.SECTION_NAMES], dtype=layout.IMAGE_NAME_DTYPE)
        self.names = _names(self.rows, strings_of(sections))
        order = np.argsort(inos, kind="stable")
        ordered = inos[order]
        _require(not (ordered[1:] == ordered[:-1]).any(), "an inode number appears twice")
        places = np.minimum(np.searchsorted(ordered, self.rows["ino"]), max(len(inos) - 1, 0))
        found = len(inos) > 0 and (ordered[places] == self.rows["ino"]).all()
        _require(found or not len(self.rows), "a name without its inode")
        self.meant = order[places] if len(inos) else np.zeros(0, dtype=np.int64)
        """The row of the inode that each name means."""
        self.links = np.bincount(self.meant, minlength=len(inos))
        self.parents = np.zeros(len(inos), dtype=np.uint64)
        self.parents[self.meant] = self.rows["parent"]
        self.last = np.full(len(inos), b"", dtype=object)
        self.last[self.meant] = _objects(self.names)


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
    namespace: Namespace,
    rows: npt.NDArray[np.void],
    info: ImageInfo,
    names: _Names,
    live: npt.NDArray[np.object_],
) -> None:
    flags_known = layout.INODE_FLAGS_KNOWN | layout.INODE_ASIDE
    _require(not (rows["flags"] & ~np.uint32(flags_known)).any(), "unknown inode flags")
    _require(rows["ino"].all(), "an inode without a number")
    _require(not (rows["ino"] >= info.next_ino).any(), "inode number beyond the counter")
    columns = {name: _column(rows[name]) for name in _INODE_COLUMNS}
    columns["flags"] = _column(rows["flags"] & ~np.uint32(layout.INODE_ASIDE))
    made = map(
        Inode,
        *columns.values(),
        _column(names.links),
        _column(names.parents),
        names.last.tolist(),
        live.tolist(),
    )
    namespace.inodes.update(zip(rows["ino"].tolist(), made, strict=True))
    types, counts = np.unique(rows["mode"] & _TYPE_BITS, return_counts=True)
    for mode, count in zip(types.tolist(), counts.tolist(), strict=True):
        kind = kind_of(mode)
        if kind is not None:
            namespace.kind_counts[kind] += count


def _load_content(
    engine: Engine, rows: npt.NDArray[np.void], refs: npt.NDArray[np.void]
) -> tuple[npt.NDArray[np.object_], list[tuple[int, FileMap]]]:
    """The content of each row, or None; inodes with one kept aside, and that."""
    is_file = (rows["mode"] & _TYPE_BITS) == 0o100000
    others = rows[~is_file]
    _require(
        not (others["ref_count"].any() or others["aside_ref_count"].any() or others["size"].any()),
        "something that is not a file has content",
    )
    files = rows[is_file]
    aside = (files["flags"] & layout.INODE_ASIDE) != 0
    _require(not files["aside_ref_count"][~aside].any(), "references of no version")
    limit = layout.FILE_SIZE_MAX
    _require(
        not (files["size"] > limit).any() and not (files["aside_size"] > limit).any(),
        "a file is larger than the limit",
    )
    per_file = 1 + aside.astype(np.int64)
    owners = np.repeat(files["ino"], per_file)
    positions = np.cumsum(per_file) - per_file
    sizes = np.zeros(len(owners), dtype=np.uint64)
    counts = np.zeros(len(owners), dtype=np.uint64)
    sizes[positions], counts[positions] = files["size"], files["ref_count"]
    sizes[positions[aside] + 1] = files["aside_size"][aside]
    counts[positions[aside] + 1] = files["aside_ref_count"][aside]
    _require(not (counts > len(refs)).any(), "reference counts beyond the section")
    first = np.zeros(len(owners) + 1, dtype=np.uint64)
    np.cumsum(counts, out=first[1:])
    _require(int(first[-1]) == len(refs), "reference counts do not fill the section")
    maps = _objects(engine.import_maps(owners, sizes, first, refs))
    live = np.full(len(rows), None, dtype=object)
    live[is_file] = maps[positions]
    kept = maps[positions[aside] + 1].tolist()
    return live, list(zip(files["ino"][aside].tolist(), kept, strict=True))


def _load_names(namespace: Namespace, found: _Names, is_directory: npt.NDArray[np.bool_]) -> None:
    """Into their directories; what they say of their inodes is told already."""
    rows, names, inodes = found.rows, found.names, namespace.inodes
    nameless = int((found.links == 0).sum())
    _require(nameless <= 1, "an inode has no name")
    parents, children = rows["parent"], rows["ino"].tolist()
    borders = np.flatnonzero(parents[1:] != parents[:-1]) + 1
    for first, end in itertools.pairwise([0, *borders.tolist(), len(rows)]):
        if first == end:
            break
        directory = inodes.get(int(parents[first]))
        if directory is None or directory.entries is None:
            raise _damage("a name without its directory")
        before = len(directory.entries)
        directory.entries.update(zip(names[first:end], children[first:end], strict=True))
        _require(len(directory.entries) == before + end - first, "a name appears twice")
    _require(not (found.links[is_directory] > 1).any(), "a directory has two names")
    directories: list[Inode] = []
    for row in np.flatnonzero(is_directory[found.meant]).tolist():
        directory = inodes[children[row]]
        _require(directory.ino != ROOT_INO, "a directory has two names")
        inodes[int(parents[row])].subdirectories += 1
        directories.append(directory)
    namespace.name_bytes += int(rows["name_bytes"].sum())
    namespace.string_items += len(rows)
    _check_tree(namespace, directories)


def _names(rows: npt.NDArray[np.void], strings: bytes) -> list[bytes]:
    """The name of each row; raises CorruptionError when one is impossible."""
    starts, lengths = rows["name_offset"], rows["name_bytes"]
    ends = starts + lengths
    _require(
        not (starts > len(strings)).any() and not (ends > len(strings)).any(),
        "a name lies outside the string section",
    )
    possible = (lengths > 0) & (lengths <= layout.NAME_BYTES_MAX)
    _require(possible.all(), "an impossible name")
    names = [strings[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    # One look at all of them finds what none may hold.
    together = b"".join(names)
    wrong = b"/" in together or b"\0" in together or b"." in names or b".." in names
    _require(not wrong, "an impossible name")
    return names


def _check_tree(namespace: Namespace, directories: list[Inode]) -> None:
    """Every directory, which has one name, lies below the root directory: none above itself.

    No verb makes a loop, and none would hang on one, but what hangs on it could never be reached.
    """
    inodes = namespace.inodes
    reached: set[int] = {ROOT_INO}
    for directory in directories:
        way: set[int] = set()
        ino: int = directory.ino
        while ino not in reached:
            _require(ino not in way, "the directories form a loop")
            way.add(ino)
            ino = inodes[ino].parent
        reached |= way


def _load_strings(namespace: Namespace, sections: Sections, link_count: int) -> None:
    strings = strings_of(sections)
    for kind in (layout.SECTION_XATTRS, layout.SECTION_SYMLINKS):
        rows = np.frombuffer(sections[kind], dtype=layout.IMAGE_XATTR_DTYPE)
        for ino, start, name_bytes, value_bytes in rows.tolist():
            inode = namespace.inodes.get(ino)
            middle = start + name_bytes
            if inode is None or middle + value_bytes > len(strings):
                raise _damage("an attribute without its inode or its string")
            value = strings[middle : middle + value_bytes]
            if kind == layout.SECTION_SYMLINKS:
                is_link = inode.kind is FileKind.SYMLINK and not inode.target and not name_bytes
                _require(is_link and 0 < len(value) <= layout.SYMLINK_BYTES_MAX, "a bad symlink")
                namespace.set_target(inode, value)
            else:
                name = strings[start:middle]
                _require(0 < len(name) <= layout.XATTR_NAME_BYTES_MAX, "a bad attribute name")
                namespace.set_xattr(inode, name, value)
    # Each of them is of another symbolic link.
    _require(len(rows) == link_count, "a symbolic link without target")

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
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError
from cxlfs.format import layout
from cxlfs.native import crc32c
from cxlfs.store.namespace import FileKind, Inode, Namespace
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.extents import Engine

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


def check(data: bytes, *, uuid: bytes, header_crc: int) -> tuple[ImageInfo, dict[int, bytes]]:
    """Check header and sections; returns each section's bytes. Raises CorruptionError."""
    _require(len(data) >= layout.IMAGE_DTYPE.itemsize, "the metadata image is cut short")
    head = np.frombuffer(data, dtype=layout.IMAGE_DTYPE, count=1)[0]
    _require(head["magic"] == layout.IMAGE_MAGIC, "the metadata image has no magic")
    actual = crc32c(data[:SUMMED_BYTES])
    _require(int(head["crc"]) == actual == header_crc, "metadata image header checksum mismatch")
    _require(head["uuid"].tobytes() == uuid, "the metadata image belongs to another store")
    sections: dict[int, bytes] = {}
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
        section = data[offset : offset + length]
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
    data: bytes, engine: Engine, *, uuid: bytes, header_crc: int
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
    _load_inodes(namespace, rows, info)
    _load_content(namespace, engine, rows, refs)
    _load_names(namespace, sections)
    links = int(((rows["mode"] & 0o170000) == 0o120000).sum())
    _load_strings(namespace, sections, links)
    root = namespace.inodes.get(ROOT_INO)
    if root is None or root.entries is None:
        raise _damage("there is no root directory")
    root.links, root.parent = 1, ROOT_INO
    namespace.next_ino = info.next_ino
    return namespace, info


def _load_inodes(namespace: Namespace, rows: npt.NDArray[np.void], info: ImageInfo) -> None:
    flags_known = layout.INODE_FLAGS_KNOWN | layout.INODE_ASIDE
    _require(not (rows["flags"] & ~np.uint32(flags_known)).any(), "unknown inode flags")
    columns = {name: rows[name].tolist() for name in _INODE_COLUMNS}
    columns["flags"] = (rows["flags"] & ~np.uint32(layout.INODE_ASIDE)).tolist()
    inos = columns["ino"]
    inodes = namespace.inodes
    inodes.update(zip(inos, map(Inode, *columns.values()), strict=True))
    namespace.kind_counts.update(inode.kind for inode in inodes.values())
    _require(len(inodes) == len(rows) and 0 not in inodes, "an inode number appears twice")
    _require(max(inos, default=0) < info.next_ino, "inode number beyond the counter")


def _load_content(
    namespace: Namespace,
    engine: Engine,
    rows: npt.NDArray[np.void],
    refs: npt.NDArray[np.void],
) -> None:
    is_file = (rows["mode"] & 0o170000) == 0o100000
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
    maps = engine.import_maps(owners, sizes, first, refs)
    inodes = namespace.inodes
    for ino, position, has_aside in zip(
        files["ino"].tolist(), positions.tolist(), aside.tolist(), strict=True
    ):
        inode = inodes[ino]
        inode.live = maps[position]
        if has_aside:
            inode.aside = maps[position + 1]


def _load_names(namespace: Namespace, sections: dict[int, bytes]) -> None:
    rows = np.frombuffer(sections[layout.SECTION_NAMES], dtype=layout.IMAGE_NAME_DTYPE)
    names = _names(rows, sections[layout.SECTION_STRINGS])
    inodes = namespace.inodes
    parents, children = rows["parent"], rows["ino"].tolist()
    borders = np.flatnonzero(parents[1:] != parents[:-1]) + 1
    directories: list[Inode] = []
    for first, end in itertools.pairwise([0, *borders.tolist(), len(rows)]):
        if first == end:
            break
        directory = inodes.get(int(parents[first]))
        if directory is None or directory.entries is None:
            raise _damage("a name without its directory")
        before = len(directory.entries)
        directory.entries.update(zip(names[first:end], children[first:end], strict=True))
        _require(len(directory.entries) == before + end - first, "a name appears twice")
        parent = directory.ino
        for ino, name in zip(children[first:end], names[first:end], strict=True):
            inode = inodes.get(ino)
            if inode is None:
                raise _damage("a name without its inode")
            inode.links += 1
            inode.parent, inode.name = parent, name
            if inode.entries is not None:
                directory.subdirectories += 1
                directories.append(inode)
                _require(inode.links == 1 and ino != ROOT_INO, "a directory has two names")
    namespace.name_bytes += int(rows["name_bytes"].sum())
    namespace.string_items += len(rows)
    nameless = sum(1 for inode in inodes.values() if not inode.links)
    _require(nameless <= 1, "an inode has no name")
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


def _load_strings(namespace: Namespace, sections: dict[int, bytes], link_count: int) -> None:
    strings = sections[layout.SECTION_STRINGS]
    for kind in (layout.SECTION_XATTRS, layout.SECTION_SYMLINKS):
        rows = np.frombuffer(sections[kind], dtype=layout.IMAGE_XATTR_DTYPE)
        for ino, start, name_bytes, value_bytes in rows.tolist():
            inode = namespace.inodes.get(ino)
            middle = start + name_bytes
            if inode is None or middle + value_bytes > len(strings):
                raise _damage("an attribute without its inode or its string")
            value = strings[middle : middle + value_bytes]
            if kind == layout.SECTION_SYMLINKS:
                is_link = inode.kind is FileKind.SYMLINK and not inode.target
                _require(is_link and 0 < len(value) <= layout.SYMLINK_BYTES_MAX, "a bad symlink")
                namespace.set_target(inode, value)
            else:
                name = strings[start:middle]
                _require(0 < len(name) <= layout.XATTR_NAME_BYTES_MAX, "a bad attribute name")
                namespace.set_xattr(inode, name, value)
    # Each of them is of another symbolic link.
    _require(len(rows) == link_count, "a symbolic link without target")

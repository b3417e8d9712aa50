"""What a metadata image says, as columns, every number of them checked: inodes, names, contents,
extents, strings.

Never here: a namespace or an extent map (``store.loading`` makes those), checksums (``image``).

Invariants
- Nothing is trusted: every number that is used as an index, a size or a reference was compared with
  what it points into; extents and references are checked once more by the engine that takes them.
- Memory is proportional to the image's own length.
- What is told of inodes (names, links, directories) is found for all of them at once: 10^6 names
  that were looked at one by one cost half a second.
"""

from __future__ import annotations

import dataclasses
import stat
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs.format import image, layout
from cxlfs.format.image import ImageInfo, Sections, require
from cxlfs.types import ROOT_INO

Rows: TypeAlias = npt.NDArray[np.void]
Integers: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[np.uint64]

_TYPE_BITS = 0o170000
_TYPES = np.array(
    [
        *(stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK),
        *(stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK),
    ],
    dtype=np.uint32,
)


@dataclasses.dataclass(frozen=True, slots=True)
class NameColumns:
    """``rows`` (IMAGE_NAME_DTYPE, those of a directory behind each other), the ``names`` of each,
    and the place of the inode that it means among the inodes.
    """

    rows: Rows
    names: list[bytes]
    meant: Integers


@dataclasses.dataclass(frozen=True, slots=True)
class ContentColumns:
    """Contents in the order of the references: ``firsts[i]`` to ``firsts[i + 1]`` of them are of
    content i, which has ``sizes[i]`` bytes and belongs to inode ``owners[i]``. ``live`` and
    ``asides`` are the indexes of those that are seen and those kept aside; ``live_places`` and
    ``aside_places`` the places of their inodes among all.
    """

    owners: Numbers
    sizes: Numbers
    firsts: Numbers
    references: Rows
    live: Integers
    live_places: Integers
    asides: Integers
    aside_places: Integers


@dataclasses.dataclass(frozen=True, slots=True)
class DataColumns:
    """What an image says of the data of files."""

    info: ImageInfo
    sections: Sections
    inodes: Rows
    types: npt.NDArray[np.uint32]
    contents: ContentColumns
    extents: Rows
    checksums: npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True)
class ImageColumns:
    """All else that an image says. ``links`` (names), ``subdirectories``, ``parents`` (the
    directory of the last name, 0: none) have an entry for each inode.
    """

    data: DataColumns
    names: NameColumns
    links: Integers
    subdirectories: Integers
    parents: Numbers
    xattrs: list[tuple[int, bytes, bytes]]
    """Inode number, name, value."""
    targets: list[tuple[int, bytes]]
    """Of each symbolic link its inode number and where it leads."""


def decode_data(data: bytes | bytearray, *, uuid: bytes, header_crc: int) -> DataColumns:
    """Take an image apart, as far as the engine needs it. Raises CorruptionError."""
    info, sections = image.check(data, uuid=uuid, header_crc=header_crc)
    inodes = np.frombuffer(sections[layout.SECTION_INODES], dtype=layout.IMAGE_INODE_DTYPE)
    extents = np.frombuffer(sections[layout.SECTION_EXTENTS], dtype=layout.IMAGE_EXTENT_DTYPE)
    if len(extents):
        require(int(extents["id"].max()) < info.next_extent_id, "extent id beyond the counter")
        require(not extents["first_chunk"].any(), "an extent without its first chunks")
    types = inodes["mode"] & np.uint32(_TYPE_BITS)
    _check_inodes(inodes, types, info)
    checksums = np.frombuffer(sections[layout.SECTION_CRCS], dtype="<u4")
    contents = _contents(inodes, types, sections)
    return DataColumns(info, sections, inodes, types, contents, extents, checksums)


def decode_rest(data: DataColumns) -> ImageColumns:
    """Take the rest of it apart. Raises CorruptionError."""
    inodes, types, sections = data.inodes, data.types, data.sections
    places = _Places(inodes["ino"])
    strings = bytes(sections[layout.SECTION_STRINGS])
    name_rows = np.frombuffer(sections[layout.SECTION_NAMES], dtype=layout.IMAGE_NAME_DTYPE)
    meant = places.of(name_rows["ino"], "a name without its inode")
    names = NameColumns(name_rows, _names(name_rows, strings), meant)
    parents = np.zeros(len(inodes), dtype=np.uint64)
    parents[meant] = name_rows["parent"]
    return ImageColumns(
        data,
        names,
        links=np.bincount(meant, minlength=len(inodes)),
        subdirectories=_check_tree(inodes["ino"], types == stat.S_IFDIR, places, names),
        parents=parents,
        xattrs=_xattrs(sections, places, strings),
        targets=_targets(sections, places, strings, types == stat.S_IFLNK),
    )


class _Places:
    """Which row an inode number stands in."""

    def __init__(self, inos: Numbers) -> None:
        self._order = np.argsort(inos, kind="stable")
        self._ordered = inos[self._order]
        twice = self._ordered[1:] == self._ordered[:-1]
        require(not twice.any(), "an inode number appears twice")

    def of(self, inos: Numbers, message: str) -> Integers:
        """The row of each; raises CorruptionError with ``message`` for a number in no row."""
        places = np.searchsorted(self._ordered, inos)
        found = places < len(self._ordered)
        require(found.all() and (self._ordered[places] == inos).all(), message)
        return self._order[places]


def _check_inodes(inodes: Rows, types: npt.NDArray[np.uint32], info: ImageInfo) -> None:
    flags_known = layout.INODE_FLAGS_KNOWN | layout.INODE_ASIDE
    require(np.isin(types, _TYPES).all(), "no such file type")
    require(not (inodes["flags"] & ~np.uint32(flags_known)).any(), "unknown inode flags")
    require(inodes["ino"].all(), "an inode without a number")
    require(not (inodes["ino"] >= info.next_ino).any(), "inode number beyond the counter")


def _contents(inodes: Rows, types: npt.NDArray[np.uint32], sections: Sections) -> ContentColumns:
    references = np.frombuffer(sections[layout.SECTION_REFS], dtype=layout.REF_DTYPE)
    is_file = types == stat.S_IFREG
    others = inodes.compress(~is_file)  # whole rows: a mask in brackets goes by fields
    require(
        not (others["ref_count"].any() or others["aside_ref_count"].any() or others["size"].any()),
        "something that is not a file has content",
    )
    files = inodes.compress(is_file)
    aside = (files["flags"] & layout.INODE_ASIDE) != 0
    require(not files["aside_ref_count"][~aside].any(), "references of no version")
    limit = layout.FILE_SIZE_MAX
    require(
        not (files["size"] > limit).any() and not (files["aside_size"] > limit).any(),
        "a file is larger than the limit",
    )
    per_file = 1 + aside.astype(np.int64)
    live = np.cumsum(per_file) - per_file
    asides = live[aside] + 1
    count = len(files) + len(asides)
    sizes = np.zeros(count, dtype=np.uint64)
    counts = np.zeros(count, dtype=np.uint64)
    sizes[live], counts[live] = files["size"], files["ref_count"]
    sizes[asides], counts[asides] = files["aside_size"][aside], files["aside_ref_count"][aside]
    require(not (counts > len(references)).any(), "reference counts beyond the section")
    firsts = np.zeros(count + 1, dtype=np.uint64)
    np.cumsum(counts, out=firsts[1:])
    require(int(firsts[-1]) == len(references), "reference counts do not fill the section")
    places = np.flatnonzero(is_file)
    owners = np.repeat(files["ino"], per_file)
    return ContentColumns(owners, sizes, firsts, references, live, places, asides, places[aside])


def _names(rows: Rows, strings: bytes) -> list[bytes]:
    """The name of each row; raises CorruptionError when one is impossible."""
    starts, lengths = rows["name_offset"], rows["name_bytes"]
    ends = starts + lengths
    require(
        not (starts > len(strings)).any() and not (ends > len(strings)).any(),
        "a name lies outside the string section",
    )
    possible = (lengths > 0) & (lengths <= layout.NAME_BYTES_MAX)
    require(possible.all(), "an impossible name")
    names = [strings[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    # One look at all of them finds what none may hold, if one at all strings does not tell.
    if b"/" in strings or b"\0" in strings:
        together = b"".join(names)
        require(b"/" not in together and b"\0" not in together, "an impossible name")
    short = {names[index] for index in np.flatnonzero(lengths <= 2).tolist()}
    require(short.isdisjoint((b".", b"..")), "an impossible name")
    return names


def _check_tree(
    inos: Numbers, is_directory: npt.NDArray[np.bool_], places: _Places, names: NameColumns
) -> Integers:
    """Everything lies below the root directory; how many directories each inode has in it.

    No verb makes a loop of directories, and none would hang on one, but what hangs on it could
    never be reached.
    """
    root = places.of(np.array([ROOT_INO], dtype=np.uint64), "there is no root directory")
    require(is_directory[root].all(), "there is no root directory")
    parents = places.of(names.rows["parent"], "a name without its directory")
    require(is_directory[parents].all(), "a name without its directory")
    named = np.bincount(names.meant, minlength=len(inos))
    require(not (named[is_directory] > 1).any() and not named[root].any(), _TWO_NAMES)
    require(np.count_nonzero(named == 0) == 1, "an inode has no name")
    of_directories = is_directory[names.meant]
    above = np.arange(len(inos))
    above[names.meant[of_directories]] = parents[of_directories]
    # Twice as far up each time, as far as the deepest way can lead.
    for _ in range(int(is_directory.sum()).bit_length()):
        above = above[above]
    require((above[is_directory] == root).all(), "the directories form a loop")
    return np.bincount(parents[of_directories], minlength=len(inos))


_TWO_NAMES = "a directory has two names"


def _strings(
    sections: Sections, kind: int, places: _Places, strings: bytes
) -> tuple[Integers, list[tuple[int, bytes, bytes]]]:
    """The place of the inode of each row of ``kind``; its inode number, name and value."""
    rows = np.frombuffer(sections[kind], dtype=layout.IMAGE_XATTR_DTYPE)
    message = "an attribute without its inode or its string"
    found = places.of(rows["ino"], message)
    starts = rows["string_offset"]
    require(not (starts > len(strings)).any(), message)
    middles = starts + rows["name_bytes"]
    ends = middles + rows["value_bytes"]
    require(not (ends > len(strings)).any(), message)
    return found, [
        (ino, strings[a:b], strings[b:c])
        for ino, a, b, c in zip(
            rows["ino"].tolist(), starts.tolist(), middles.tolist(), ends.tolist(), strict=True
        )
    ]


def _xattrs(sections: Sections, places: _Places, strings: bytes) -> list[tuple[int, bytes, bytes]]:
    _, found = _strings(sections, layout.SECTION_XATTRS, places, strings)
    for _, name, _ in found:
        require(0 < len(name) <= layout.XATTR_NAME_BYTES_MAX, "a bad attribute name")
    return found


def _targets(
    sections: Sections, places: _Places, strings: bytes, is_link: npt.NDArray[np.bool_]
) -> list[tuple[int, bytes]]:
    meant, found = _strings(sections, layout.SECTION_SYMLINKS, places, strings)
    for _, name, target in found:
        require(not name and 0 < len(target) <= layout.SYMLINK_BYTES_MAX, "a bad symlink")
    targets = np.bincount(meant, minlength=len(is_link))
    require((targets == is_link).all(), "a symbolic link without its one target")
    return [(ino, target) for ino, _, target in found]

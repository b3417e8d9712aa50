"""Orbax: a directory for each step, committed by renaming it, with items that are trees of arrays.

Source: orbax/checkpoint (0.12), tensorstore/kvstore/ocdbt/format (0.1.86). Complete: the directory
has no temporary name, ``_CHECKPOINT_METADATA`` has a time of commit, every item that it names is
there, and each item's manifest of OCDBT has its checksum. Files of OCDBT's data hold values and
nodes of its tree; a node that is cut is seen, and the checksum of one is compared with the content.
The tree itself is compressed and not followed: a file of data that is missing is not seen.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats.files import take_rest
from cxlfs.checkpoint.jsons import json_of, mapping, number_or_none, sequence, shape, text
from cxlfs.checkpoint.model import (
    Algorithm,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
    Region,
    Tensor,
)
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.native import crc32c

METADATA = "_CHECKPOINT_METADATA"
TEMPORARY = re.compile(r"(.+)\.orbax-checkpoint-tmp(?:-\d{1,30})?")
COMMITTED = "commit_success.txt"
_ITEM = "_METADATA"
_MANIFEST = "manifest.ocdbt"
_PROCESS = re.compile(r"ocdbt\.process_\d{1,9}")
_STEP = re.compile(r"(?:.*_)?(\d{1,18})")
_MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
_NODE_MAGIC = bytes.fromhex("0cdb20de")
_NODE_HEAD_BYTES = 12
_NODE_SEARCH_BYTES = 1 << 20
_NODE_BYTES_MAX = 128 << 20
_CHECKSUM_BYTES = 4


class Orbax:
    kind = "orbax"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = place.names()
        return (
            TEMPORARY.fullmatch(place.name) is not None
            or METADATA in names
            or _MANIFEST in names
            or any(place.is_file(f"{name}/{_MANIFEST}") for name in names[:64])
        )

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        temporary = TEMPORARY.fullmatch(place.name)
        match = _STEP.fullmatch(temporary[1] if temporary else place.name)
        contents.step = int(match[1]) if match is not None else None
        if temporary:
            contents.problems.append(IncompleteError("it has the name of an unfinished save"))
        items = self._items(place, contents)
        for name in items:
            if not place.is_directory(name):
                contents.problems.append(IncompleteError(f"the item {name} is missing"))
            else:
                _take_item(place.below(name), contents)
        if place.is_file(_ITEM) or place.is_file(_MANIFEST):
            _take_item(place, contents)
        take_rest(place, contents)
        return contents

    @staticmethod
    def _items(place: Place, contents: Contents) -> list[str]:
        """Names of items; what is wrong with the metadata becomes a problem."""
        contents.files.append(File(METADATA, place.size_of(METADATA)))
        found = [n for n in place.names() if place.is_file(f"{n}/{_ITEM}")]
        try:
            metadata = json_of(place, METADATA)
            if number_or_none(metadata.get("commit_timestamp_nsecs")) is None:
                raise IncompleteError(f"{METADATA} has no time of commit")
            handlers = metadata.get("item_handlers")
            if isinstance(handlers, dict):
                found += [text(n, "an item") for n in handlers if n not in found]
        except ProblemError as error:
            contents.problems.append(error)
        return found


def _take_item(place: Place, contents: Contents) -> None:
    try:
        if not place.names():
            raise IncompleteError(f"nothing is in {place.prefix.rstrip('/')}")
        if not place.is_file(_ITEM) and not place.is_file(_MANIFEST):
            return  # an item that is no tree: what is in it is files of its own
        metadata = json_of(place, _ITEM)
        contents.files.append(File(place.full_name(_ITEM), place.size_of(_ITEM)))
        if metadata.get("use_ocdbt", True):
            _take_database(place, contents)
        _take_tensors(metadata, contents)
    except ProblemError as error:
        contents.problems.append(error)


def _take_database(place: Place, contents: Contents) -> None:
    """The manifest that reads everything, and those of the processes that wrote."""
    for name in ("", *(n for n in place.names() if _PROCESS.fullmatch(n))):
        inside = place.below(name) if name else place
        full_name = inside.full_name(_MANIFEST)
        contents.files.append(File(full_name, inside.size_of(_MANIFEST)))
        with inside.open(_MANIFEST) as reader:
            _check_manifest(reader, full_name)
        data = inside.below("d")
        for file in data.names():
            if data.is_file(file):
                _take_data(data, file, contents)
        if name and not data.names():
            raise IncompleteError(f"{inside.full_name('d')} holds no data")


def _check_manifest(reader: Reader, name: str) -> None:
    size = reader.size_bytes
    data = reader.head(size)
    if size < _NODE_HEAD_BYTES + _CHECKSUM_BYTES or not data.startswith(_MANIFEST_MAGIC):
        raise IncompleteError(f"{name} was not written to its end")
    length = int.from_bytes(data[4:_NODE_HEAD_BYTES], "little")
    if length > size:
        raise IncompleteError(f"{name} was not written to its end")
    expected = int.from_bytes(data[-_CHECKSUM_BYTES:], "little")
    if length < size or crc32c(data[:-_CHECKSUM_BYTES]) != expected:
        raise DamagedError(f"the checksum of {name} differs")


def _take_data(place: Place, name: str, contents: Contents) -> None:
    """A file of values and nodes. The nodes near its end: one that is cut is an unfinished save."""
    full_name = place.full_name(name)
    with place.open(name) as reader:
        size = reader.size_bytes
        contents.files.append(File(full_name, size))
        if not size:
            raise IncompleteError(f"{full_name} is empty")
        tail = reader.tail(_NODE_SEARCH_BYTES)
    begin = size - len(tail)
    at = tail.find(_NODE_MAGIC)
    while at >= 0:
        length = int.from_bytes(tail[at + 4 : at + _NODE_HEAD_BYTES], "little")
        # Four bytes may be anything; four bytes and a small number are a node.
        if _NODE_HEAD_BYTES + _CHECKSUM_BYTES < length <= _NODE_BYTES_MAX:
            if at + length > len(tail):
                raise IncompleteError(f"{full_name} was not written to its end")
            last = at + length - _CHECKSUM_BYTES
            contents.regions.append(
                Region(
                    full_name,
                    begin + at,
                    last - at,
                    Algorithm.CRC32C,
                    int.from_bytes(tail[last : at + length], "little"),
                    f"a node of {full_name}",
                )
            )
            at += length - 1
        at = tail.find(_NODE_MAGIC, at + 1)


def _take_tensors(metadata: dict[str, object], contents: Contents) -> None:
    """Names and shapes; where a tensor lies, the compressed tree says."""
    tree = metadata.get("tree_metadata")
    for claim in mapping(tree, "its tree").values() if tree is not None else ():
        fields = mapping(claim, "its tree")
        keys = sequence(fields.get("key_metadata", []), "its tree")
        parts = [str(mapping(key, "its tree").get("key")) for key in keys]
        value = mapping(fields.get("value_metadata", {}), "its tree")
        name = ".".join(parts)[: limits.NAME_CHARACTERS_MAX]
        dimensions = shape(value.get("write_shape") or [], name)
        if value.get("value_type") != "None":
            contents.tensors.append(Tensor(name, "", dimensions, "", None, None))

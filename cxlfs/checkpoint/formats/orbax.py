"""Orbax: a directory for each step, committed by renaming it, with items that are trees of arrays.

Source: orbax/checkpoint (0.12), tensorstore/kvstore/ocdbt/format (0.1.86). Complete: the directory
has no temporary name, ``_CHECKPOINT_METADATA`` has a time of commit, every item that it names is
there, each item's manifest of OCDBT and the root that it names have their checksums, and every
file and value that these name is there (``ocdbt``); compressed values are whole frames. What a
process wrote on the way, and the manifest does not lead to, nobody reads again. Without its
metadata nobody knows which items there were.
"""

from __future__ import annotations

import re

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats import ocdbt
from cxlfs.checkpoint.formats.files import take_rest
from cxlfs.checkpoint.jsons import (
    json_of,
    mapping,
    number,
    number_or_none,
    parse_json,
    sequence,
    shape,
    text,
)
from cxlfs.checkpoint.model import (
    Algorithm,
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
    Region,
    Tensor,
)
from cxlfs.checkpoint.place import Place

METADATA = "_CHECKPOINT_METADATA"
TEMPORARY = re.compile(r"(.+)\.orbax-checkpoint-tmp(?:-\d{1,30})?")
COMMITTED = "commit_success.txt"
_ITEM = "_METADATA"
_SHARDING = "_sharding"
_ARRAYS = "array_metadatas"
_JSON_HANDLER = "JsonCheckpointHandler"
_PROCESS = re.compile(r"ocdbt\.process_\d{1,9}")
_STEP = re.compile(r"(?:.*_)?(\d{1,18})")
_ZARRAY = ".zarray"
_NODE_SEARCH_BYTES = 32 << 10
_NODE_BYTES_MAX = 128 << 20


class Orbax:
    kind = "orbax"

    def recognises(self, place: Place) -> bool:
        if not place.is_directory():
            return False
        names = place.names()
        return (
            TEMPORARY.fullmatch(place.name) is not None
            or METADATA in names
            or ocdbt.MANIFEST in names
            or any(place.is_file(f"{name}/{ocdbt.MANIFEST}") for name in names[:64])
        )

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        temporary = TEMPORARY.fullmatch(place.name)
        match = _STEP.fullmatch(temporary[1] if temporary else place.name)
        contents.named_step = int(match[1]) if match is not None else None
        if temporary:
            contents.problems.append(IncompleteError("it has the name of an unfinished save"))
        items = self._items(place, contents)
        for name, handler in items.items():
            if not place.is_directory(name):
                contents.problems.append(IncompleteError(f"the item {name} is missing"))
            else:
                _take_item(place.below(name), contents, handler)
        if place.is_file(_ITEM) or place.is_file(ocdbt.MANIFEST):
            _take_item(place, contents, "")
        take_rest(place, contents)
        return contents

    @staticmethod
    def _items(place: Place, contents: Contents) -> dict[str, str]:
        """Names of items and what handles them; what is wrong with the metadata is a problem."""
        contents.files.append(File(METADATA, place.size_of(METADATA)))
        found = {n: "" for n in place.names() if place.is_file(f"{n}/{_ITEM}")}
        try:
            metadata = json_of(place, METADATA)
            contents.committed_ns = number_or_none(metadata.get("commit_timestamp_nsecs"))
            if contents.committed_ns is None:
                raise IncompleteError(f"{METADATA} has no time of commit")
            handlers = metadata.get("item_handlers")
            if isinstance(handlers, dict):
                found |= {text(n, "an item"): str(handler) for n, handler in handlers.items()}
        except ProblemError as error:
            contents.doubt(f"its items are not known: {error}")
        return found


def _take_item(place: Place, contents: Contents, handler: str) -> None:
    try:
        if not set(place.names()) - {COMMITTED}:
            raise IncompleteError(f"nothing is in {place.prefix.rstrip('/')}")
        if handler.endswith(_JSON_HANDLER):
            for name in place.names():
                if name != COMMITTED:
                    json_of(place, name)
        if not place.is_file(_ITEM) and not place.is_file(ocdbt.MANIFEST):
            return  # an item that is no tree: what is in it is files of its own
        metadata = json_of(place, _ITEM)
        contents.files.append(File(place.full_name(_ITEM), place.size_of(_ITEM)))
        _check_descriptions(place)
        values = _take_database(place, contents) if metadata.get("use_ocdbt", True) else {}
        _take_tensors(place, metadata, values, contents)
    except ProblemError as error:
        contents.problems.append(error)


def _take_database(place: Place, contents: Contents) -> dict[str, list[ocdbt.Value]]:
    """Everything that the manifest leads to.

    Returns where the values are, by the parts of their keys before the last slash.
    """
    full_name = place.full_name(ocdbt.MANIFEST)
    contents.files.append(File(full_name, place.size_of(ocdbt.MANIFEST)))
    with place.open(ocdbt.MANIFEST) as reader:
        ocdbt.unframed(reader.head(reader.size_bytes), ocdbt.MANIFEST_MAGIC, full_name)
    processes = [place.below(n) for n in place.names() if _PROCESS.fullmatch(n)]
    try:
        found = ocdbt.read_contents(place)
    except BeyondLimitsError as error:
        contents.notes.append(f"{full_name}: {error}")
        _take_files(place, processes, None, contents)
        return {}
    _take_files(place, processes, set(found.files), contents)
    missing = [name for name in found.files if place.size_of(name) is None]
    for name in missing[:1]:
        contents.files.append(File(place.full_name(name), None))
        raise IncompleteError(f"{place.full_name(name)} is missing")
    values: dict[str, list[ocdbt.Value]] = {}
    ends: dict[str, int] = {}
    for value in found.values or ():
        values.setdefault(value.key.rpartition("/")[0], []).append(value)
        ends[value.file] = max(ends.get(value.file, 0), value.offset + value.length)
    for name, end in ends.items():
        if end > (place.size_of(name) or 0):
            raise IncompleteError(f"{place.full_name(name)} was not written to its end")
    contents.regions += _frames(place, found)
    return values


def _take_files(
    place: Place, processes: list[Place], needed: set[str] | None, contents: Contents
) -> None:
    """Files of values and nodes. ``needed``: those that the manifest leads to; None: not known."""
    begin = len(place.prefix)
    for inside in (place, *processes):
        if inside is not place and inside.is_file(ocdbt.MANIFEST):
            name = inside.full_name(ocdbt.MANIFEST)
            contents.files.append(File(name, inside.size_of(ocdbt.MANIFEST), is_needed=False))
        data = inside.below("d")
        for file in filter(data.is_file, data.names()):
            name = data.full_name(file)
            if needed is None or name[begin:] in needed:
                _take_data(data, file, contents)
            else:
                contents.files.append(File(name, data.size_of(file), is_needed=False))


def _check_descriptions(place: Place) -> None:
    """What Orbax parses beside the tree, where it is there: of shardings, and of arrays."""
    if place.is_file(_SHARDING):
        json_of(place, _SHARDING)
    arrays = place.below(_ARRAYS)
    for name in arrays.names():
        what = arrays.full_name(name)
        for claim in sequence(json_of(arrays, name).get("array_metadatas"), what):
            array = mapping(mapping(claim, what).get("array_metadata"), what)
            text(array.get("param_name"), what)
            for key in ("write_shape", "chunk_shape"):
                shape(array.get(key), what)


def _frames(place: Place, found: ocdbt.Contents) -> list[Region]:
    """The values of arrays that their metadata (``.zarray``) calls compressed with Zstandard."""
    compressed = set()
    for key, data in found.texts.items():
        array, _, name = key.rpartition("/")
        if name != _ZARRAY:
            continue
        metadata = mapping(parse_json(data, f"the metadata of {array[:200]}"), "it")
        compressor = metadata.get("compressor")
        if isinstance(compressor, dict) and compressor.get("id") == "zstd":
            compressed.add(array)
    return [
        Region(
            place.full_name(each.file),
            each.offset,
            each.length,
            Algorithm.ZSTD,
            0,
            each.key,
        )
        for each in found.values or ()
        if each.key.rpartition("/")[0] in compressed
    ]


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
    at = tail.find(ocdbt.NODE_MAGIC)
    while at >= 0:
        length = int.from_bytes(tail[at + 4 : at + ocdbt.HEAD_BYTES], "little")
        # Four bytes may be anything; four bytes and a small number are a node.
        if ocdbt.HEAD_BYTES + ocdbt.CHECKSUM_BYTES < length <= _NODE_BYTES_MAX:
            if at + length > len(tail):
                raise IncompleteError(f"{full_name} was not written to its end")
            last = at + length - ocdbt.CHECKSUM_BYTES
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
        at = tail.find(ocdbt.NODE_MAGIC, at + 1)


def _take_tensors(
    place: Place,
    metadata: dict[str, object],
    values: dict[str, list[ocdbt.Value]],
    contents: Contents,
) -> None:
    """Names and shapes from the metadata; places from the tree, of arrays that are one piece."""
    tree = metadata.get("tree_metadata")
    for claim in mapping(tree, "its tree").values() if tree is not None else ():
        fields = mapping(claim, "its tree")
        keys = sequence(fields.get("key_metadata", []), "its tree")
        parts = [str(mapping(key, "its tree").get("key")) for key in keys]
        value = mapping(fields.get("value_metadata", {}), "its tree")
        _check_keys(keys, value)
        name = ".".join(parts)[: limits.NAME_CHARACTERS_MAX]
        dimensions = shape(value.get("write_shape") or [], name)
        if value.get("value_type") == "None":
            continue
        pieces = values.get(name, [])
        for piece in pieces:
            chunk = piece.key.rpartition("/")[2]
            label = name if len(pieces) == 1 else f"{name}[{chunk}]"
            file = place.full_name(piece.file)
            contents.tensors.append(Tensor(label, "", dimensions, file, piece.offset, piece.length))
        if not pieces:  # small: it lies in the tree itself
            contents.tensors.append(Tensor(name, "", dimensions, "", None, None))


def _check_keys(keys: list[object] | tuple[object, ...], value: dict[str, object]) -> None:
    """What Orbax cannot do without."""
    for key in keys:
        number(mapping(key, "its tree").get("key_type"), "the type of a key of its tree")
    if not isinstance(value.get("value_type"), str):
        raise DamagedError("a value of its tree has no type")
    if not isinstance(value.get("skip_deserialize"), bool):
        raise DamagedError("a value of its tree is not said to be read or not")

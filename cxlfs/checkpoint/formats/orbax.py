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

import msgspec

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats import ocdbt, zarr
from cxlfs.checkpoint.formats.files import take_rest
from cxlfs.checkpoint.jsons import (
    Name,
    Number,
    Shape,
    checked,
    json_of,
    number_or_none,
    parse_json,
    prepared,
)
from cxlfs.checkpoint.model import (
    Algorithm,
    BeyondLimitsError,
    Contents,
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
_TREE = "_METADATA"
_SHARDING = "_sharding"
_ARRAYS = "array_metadatas"
_STRINGS = "_strings.json"
_JSON_HANDLER = "JsonCheckpointHandler"
_TREE_HANDLERS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler")
_NO_ARRAYS = ("None", "string")
_PROCESS = re.compile(r"ocdbt\.process_\d{1,9}")
_STEP = re.compile(r"(?:.*_)?(\d{1,18})")
_ZARRAY = ".zarray"
_NODE_SEARCH_BYTES = 32 << 10
_NODE_BYTES_MAX = 128 << 20


@prepared
class _Metadata(msgspec.Struct):
    """Of a checkpoint. ``item_handlers``: by the names of its items, or none of use."""

    commit_timestamp_nsecs: object = None
    item_handlers: object = None


@prepared
class _Key(msgspec.Struct):
    key_type: Number
    key: object = None


@prepared
class _Value(msgspec.Struct):
    value_type: str
    skip_deserialize: bool
    write_shape: Shape | None = None


@prepared
class _Parameter(msgspec.Struct):
    value_metadata: _Value
    key_metadata: tuple[_Key, ...] = ()

    @property
    def name(self) -> str:
        return ".".join(str(key.key) for key in self.key_metadata)[: limits.NAME_CHARACTERS_MAX]


@prepared
class _Item(msgspec.Struct):
    use_ocdbt: object = True
    store_array_data_equal_to_fill_value: object = False
    tree_metadata: dict[str, _Parameter] | None = None


@prepared
class _Array(msgspec.Struct):
    param_name: Name
    write_shape: Shape
    chunk_shape: Shape


@prepared
class _ArrayMetadata(msgspec.Struct):
    array_metadata: _Array


@prepared
class _Arrays(msgspec.Struct):
    array_metadatas: list[_ArrayMetadata]


@prepared
class _Zarray(msgspec.Struct):
    compressor: object = None


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
        own_handler = items.pop("", "")
        for name, handler in items.items():
            if not place.is_directory(name):
                contents.problems.append(IncompleteError(f"the item {name} is missing"))
            else:
                _take_item(place.below(name), contents, handler)
        if own_handler or place.is_file(_TREE) or place.is_file(ocdbt.MANIFEST):
            _take_item(place, contents, own_handler)
        take_rest(place, contents)
        return contents

    @staticmethod
    def _items(place: Place, contents: Contents) -> dict[str, str]:
        """Names of items ("" is all of it) and what handles them; what is wrong with the metadata
        is a problem.
        """
        contents.files.append(File(METADATA, place.size_of(METADATA)))
        found = {n: "" for n in place.names() if place.is_file(f"{n}/{_TREE}")}
        try:
            metadata = json_of(place, METADATA, _Metadata)
            contents.committed_ns = number_or_none(metadata.commit_timestamp_nsecs)
            if contents.committed_ns is None:
                raise IncompleteError(f"{METADATA} has no time of commit")
            if isinstance(metadata.item_handlers, dict):
                handlers = checked(metadata.item_handlers, dict[Name, object], METADATA)
                found |= {name: str(handler) for name, handler in handlers.items()}
            elif isinstance(metadata.item_handlers, str):
                found[""] = metadata.item_handlers
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
                    json_of(place, name, dict[str, object])
        is_tree = handler.endswith(_TREE_HANDLERS) or _TREE in place.names()
        if not is_tree and not place.is_file(ocdbt.MANIFEST):
            return  # an item that is no tree: what is in it is files of its own
        metadata = json_of(place, _TREE, _Item)
        contents.files.append(File(place.full_name(_TREE), place.size_of(_TREE)))
        _check_descriptions(place)
        tree = metadata.tree_metadata or {}
        if metadata.use_ocdbt:
            _take_tensors(place, tree, _take_database(place, contents), contents)
        else:
            _take_arrays(place, metadata, tree, contents)
    except ProblemError as error:
        contents.problems.append(error)


def _take_arrays(
    place: Place, metadata: _Item, tree: dict[str, _Parameter], contents: Contents
) -> None:
    """Of zarr; older releases left out chunks that are all zeros."""
    for parameter in tree.values():
        value = parameter.value_metadata
        if value.value_type == "string":
            json_of(place, _STRINGS, dict[str, object])
        if value.skip_deserialize or value.value_type in _NO_ARRAYS:
            continue
        if not metadata.store_array_data_equal_to_fill_value:
            contents.notes.append("chunks that are all zeros may be left out: none was looked for")
            return
        name = parameter.name
        zarr.take_array(place.below(name), name, contents)


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
        json_of(place, _SHARDING, dict[str, object])
    arrays = place.below(_ARRAYS)
    for name in arrays.names():
        json_of(arrays, name, _Arrays)


def _frames(place: Place, found: ocdbt.Contents) -> list[Region]:
    """The values of arrays that their metadata (``.zarray``) calls compressed with Zstandard."""
    compressed = set()
    for key, data in found.texts.items():
        array, _, name = key.rpartition("/")
        if name != _ZARRAY:
            continue
        what = f"the metadata of {array[:200]}"
        compressor = checked(parse_json(data, what), _Zarray, what).compressor
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
    tree: dict[str, _Parameter],
    values: dict[str, list[ocdbt.Value]],
    contents: Contents,
) -> None:
    """Names and shapes from the metadata; places from the tree, of arrays that are one piece."""
    for parameter in tree.values():
        name = parameter.name
        dimensions = parameter.value_metadata.write_shape or ()
        if parameter.value_metadata.value_type == "None":
            continue
        pieces = values.get(name, [])
        for piece in pieces:
            chunk = piece.key.rpartition("/")[2]
            label = name if len(pieces) == 1 else f"{name}[{chunk}]"
            file = place.full_name(piece.file)
            contents.tensors.append(Tensor(label, "", dimensions, file, piece.offset, piece.length))
        if not pieces:  # small: it lies in the tree itself
            contents.tensors.append(Tensor(name, "", dimensions, "", None, None))

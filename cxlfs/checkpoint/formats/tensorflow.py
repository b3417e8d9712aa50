"""TensorFlow's checkpoints: ``PREFIX.index`` and ``PREFIX.data-00000-of-00001``.

Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc, tensorflow/core/protobuf/
tensor_bundle.proto (2.21). Complete: the index has its end and its
blocks their checksums, every file of data that it counts is there, and every tensor lies inside.
The index has a masked CRC32C of each tensor. While it is saved the data lies in ``PREFIX_temp``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats import protobuf
from cxlfs.checkpoint.formats.sstable import Table
from cxlfs.checkpoint.jsons import number_or_none
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
from cxlfs.checkpoint.place import Place

INDEX_SUFFIX = ".index"
PART = re.compile(r"(?P<prefix>.+)\.(?:index|data-\d{5}-of-\d{5})")
STEP = re.compile(r".*-(\d{1,18})")
TEMPORARY_SUFFIX = "_temp"
_SHARDS_MAX = 100_000
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_STEPS = ("global_step", f"step{_VALUE}")
_SAVES = f"save_counter{_VALUE}"
_INT64 = 9
_STRING, _RESOURCE, _VARIANT = 7, 20, 21
_REFERENCE = 100
_TYPES = {
    1: ("float32", 4),
    2: ("float64", 8),
    3: ("int32", 4),
    4: ("uint8", 1),
    5: ("int16", 2),
    6: ("int8", 1),
    _STRING: ("string", 0),
    8: ("complex64", 8),
    9: ("int64", 8),
    10: ("bool", 1),
    11: ("qint8", 1),
    12: ("quint8", 1),
    13: ("qint32", 4),
    14: ("bfloat16", 2),
    15: ("qint16", 2),
    16: ("quint16", 2),
    17: ("uint16", 2),
    18: ("complex128", 16),
    19: ("float16", 2),
    _RESOURCE: ("resource", 0),
    _VARIANT: ("variant", 0),
    22: ("uint32", 4),
    23: ("uint64", 8),
    24: ("float8_e5m2", 1),
    25: ("float8_e4m3fn", 1),
    26: ("float8_e4m3fnuz", 1),
    27: ("float8_e4m3b11fnuz", 1),
    28: ("float8_e5m2fnuz", 1),
    29: ("int4", 1),
    30: ("uint4", 1),
    31: ("int2", 1),
    32: ("uint2", 1),
}


class Bundle:
    """A prefix that files share; the path of such a checkpoint is no file."""

    kind = "tensorflow"

    def recognises(self, place: Place) -> bool:
        if place.status() is not None:
            return False
        beside = Place(place.path.parent)
        prefix = place.name + "."
        return any(n.startswith(prefix) and PART.fullmatch(n) for n in beside.names())

    def examine(self, place: Place) -> Contents:
        contents = Contents(beside=True)
        match = STEP.fullmatch(place.name)
        contents.named_step = int(match[1]) if match is not None else None
        take_bundle(Place(place.path.parent, place.budget), place.name, contents)
        return contents


@dataclasses.dataclass(slots=True)
class _SoFar:
    """``cut``: files of which it was said that they end too early; once is enough. ``strings``: how
    many there were; each takes a step of its own to verify.
    """

    cut: set[str] = dataclasses.field(default_factory=set)
    strings: int = 0


# --- a bundle -------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One tensor as the index has it."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    crc32c: int | None
    sliced: bool


def take_bundle(place: Place, prefix: str, contents: Contents) -> None:
    """Add the files that begin with ``prefix`` (relative to ``place``)."""
    index = prefix + INDEX_SUFFIX
    contents.files.append(File(place.full_name(index), place.size_of(index)))
    try:
        with place.open(index) as reader:
            shards, entries = _read_index(Table(reader), place.full_name(index))
    except ProblemError as error:
        text = str(error)
        named = text if index in text else f"{place.full_name(index)}: {text}"
        contents.problems.append(type(error)(named))
        return
    names = [f"{prefix}.data-{number:05d}-of-{shards:05d}" for number in range(shards)]
    sizes = _take_data(place, names, contents)
    so_far = _SoFar()
    for entry in entries:
        _take_tensor(entry, place, names, sizes, contents, so_far)
        value = _number_of(entry, place, names, sizes)
        contents.step = value if entry.name in _STEPS else contents.step
        contents.epoch = value if entry.name == _SAVES else contents.epoch


def _number_of(
    entry: _Entry, place: Place, names: list[str], sizes: list[int | None]
) -> int | None:
    """How far training had come: a whole number of eight bytes."""
    if entry.name not in (*_STEPS, _SAVES) or entry.dtype != _INT64 or entry.shape:
        return None
    if entry.offset + 8 > (sizes[entry.shard] or 0):
        return None
    try:
        with place.open(names[entry.shard]) as reader:
            return number_or_none(int.from_bytes(reader.read(entry.offset, 8), "little"))
    except ProblemError:
        return None


def _read_index(table: Table, name: str) -> tuple[int, list[_Entry]]:
    """Number of files of data, and the tensors."""
    shards = 0
    entries = []
    for key, value in table.entries():
        if not key:
            shards = _shards_of(value)
            continue
        entries.append(_entry(key, value))
    if not shards:
        raise DamagedError(f"{name} has no header")
    return shards, entries


def _shards_of(header: bytes) -> int:
    found = {field: value for field, value in protobuf.fields(header) if isinstance(value, int)}
    shards = found.get(1, 0)
    if not 1 <= shards <= _SHARDS_MAX:
        raise DamagedError("the number of its files cannot be")
    return shards


def _entry(key: bytes, value: bytes) -> _Entry:
    numbers: dict[int, int] = {}
    shape: tuple[int, ...] = ()
    sliced = False
    for field, found in protobuf.fields(value):
        if isinstance(found, int):
            numbers[field] = found
        elif field == 2:
            shape = _shape(found)
        elif field == 7:
            sliced = True
    name = key.decode("utf-8", "backslashreplace")
    return _Entry(
        name,
        numbers.get(1, 0) % _REFERENCE,
        shape,
        numbers.get(3, 0),
        numbers.get(4, 0),
        numbers.get(5, 0),
        numbers.get(6),
        sliced,
    )


def _shape(data: bytes) -> tuple[int, ...]:
    found = []
    for field, dimension in protobuf.fields(data):
        if field == 2 and isinstance(dimension, bytes):
            sizes = [value for number, value in protobuf.fields(dimension) if number == 1]
            found.append(sizes[0] if sizes and isinstance(sizes[0], int) else 0)
    if len(found) > 254:
        raise DamagedError("a tensor has more dimensions than there can be")
    return tuple(found)


def _take_data(place: Place, names: list[str], contents: Contents) -> list[int | None]:
    sizes = []
    missing = False
    for number, name in enumerate(names, 1):
        size = place.size_of(name)
        sizes.append(size)
        if size is not None or not missing:
            contents.files.append(File(place.full_name(name), size))
        if size is None and not missing:
            words = f"shard {number} of {len(names)} ({place.full_name(name)}) is missing"
            contents.problems.append(IncompleteError(words))
            missing = True
    return sizes


def _take_tensor(
    entry: _Entry,
    place: Place,
    names: list[str],
    sizes: list[int | None],
    contents: Contents,
    so_far: _SoFar,
) -> None:
    dtype, item_bytes = _TYPES.get(entry.dtype, (f"type {entry.dtype}", 0))
    short = entry.name.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
    if entry.sliced:  # its parts are entries of their own
        contents.tensors.append(Tensor(short, dtype, entry.shape, "", None, None))
        return
    if entry.shard >= len(names):
        raise DamagedError(f"tensor {short[:200]} is in a file that there cannot be")
    if item_bytes and _product(entry.shape) * item_bytes != entry.size:
        contents.problems.append(
            DamagedError(f"the size of tensor {short[:200]} does not fit its shape")
        )
    file, size = place.full_name(names[entry.shard]), sizes[entry.shard]
    contents.tensors.append(Tensor(short, dtype, entry.shape, file, entry.offset, entry.size))
    if size is None:
        return
    if entry.offset + entry.size > size:
        if file not in so_far.cut:
            so_far.cut.add(file)
            words = f"{file} ends before tensor {short[:200]} does"
            contents.problems.append(IncompleteError(words))
    elif entry.crc32c is not None and entry.dtype == _STRING:
        items = _product(entry.shape)
        so_far.strings += items
        if so_far.strings > limits.TENSORS_MAX:
            return
        contents.regions.append(
            Region(
                file,
                entry.offset,
                entry.size,
                Algorithm.STRINGS,
                entry.crc32c,
                entry.name,
                items=items,
            )
        )
    elif entry.crc32c is not None and entry.dtype not in (_RESOURCE, _VARIANT) and entry.size:
        contents.regions.append(
            Region(
                file, entry.offset, entry.size, Algorithm.CRC32C_MASKED, entry.crc32c, entry.name
            )
        )


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for dimension in shape:
        size = min(size * dimension, limits.NUMBER_MAX)
    return size

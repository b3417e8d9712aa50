"""Arrays of zarr as Orbax writes them without OCDBT: a directory for each, with a file for each
chunk.

Source: zarr specifications 2 and 3 (regular grids), orbax/checkpoint (0.12), ``use_ocdbt=False``.
Complete: the description can be read, each chunk has its file, one that is not compressed has its
size, and one that is compressed with Zstandard is one frame (of version 2; chunks of version 3 are
looked for alone).

Never here: groups of other programs, where a chunk that is missing stands for fill values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import numpy as np

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.jsons import Shape, checked, parse_json, prepared
from cxlfs.checkpoint.model import (
    Algorithm,
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Region,
    Tensor,
)
from cxlfs.checkpoint.place import Place

_Kind = TypeVar("_Kind")
_OLD, _NEW = ".zarray", "zarr.json"


@prepared
class _Array(msgspec.Struct):
    """``.zarray``."""

    shape: Shape
    chunks: Shape
    dtype: str
    compressor: dict[str, object] | None
    dimension_separator: str = "."


@prepared
class _Regular(msgspec.Struct):
    chunk_shape: Shape


@prepared
class _Grid(msgspec.Struct):
    configuration: _Regular


@prepared
class _LaterArray(msgspec.Struct):
    """``zarr.json``."""

    shape: Shape
    chunk_grid: _Grid
    codecs: list[dict[str, object]]


def take_array(place: Place, name: str, contents: Contents) -> None:
    """Add the array in a directory, which is the tensor ``name``. Raises ProblemError."""
    description = _NEW if place.is_file(_NEW) else _OLD
    contents.files.append(File(place.full_name(description), place.size_of(description)))
    if description == _OLD:
        array = _read(place, _OLD, _Array)
        names = _chunk_names(array.shape, array.chunks, "", array.dimension_separator)
        _take_chunks(place, names, array, contents)
        shape = array.shape
    else:
        later = _read(place, _NEW, _LaterArray)
        shape = later.shape
        names = _chunk_names(shape, later.chunk_grid.configuration.chunk_shape, "c/", "/")
        _take_chunks(place, names, None, contents)
    contents.tensors.append(Tensor(name, "", shape, place.full_name(description), None, None))


def _read(place: Place, name: str, kind: type[_Kind]) -> _Kind:
    """TensorStore passes over zeros behind it."""
    full_name = place.full_name(name)
    with place.open(name) as reader:
        data = reader.read(0, reader.size_bytes).rstrip(b"\0")
    if not data:
        raise IncompleteError(f"{full_name} is empty")
    return checked(parse_json(data, full_name), kind, full_name)


def _chunk_names(
    shape: tuple[int, ...], chunks: tuple[int, ...], prefix: str, separator: str
) -> Iterator[str]:
    if len(shape) != len(chunks) or 0 in chunks:
        raise DamagedError("its chunks do not fit its shape")
    counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    if math.prod(counts) > limits.FILES_MAX:
        raise BeyondLimitsError("it has more chunks than are read")
    if not shape:
        return iter([prefix.rstrip("/") or "0"])
    places = itertools.product(*map(range, counts))
    return (prefix + separator.join(map(str, each)) for each in places)


def _take_chunks(
    place: Place, names: Iterator[str], array: _Array | None, contents: Contents
) -> None:
    """``array``: the description that says how they are stored; None: it does not."""
    whole = None if array is None or array.compressor is not None else _chunk_bytes(array)
    is_zstd = array is not None and (array.compressor or {}).get("id") == "zstd"
    for name in names:
        full_name, size = place.full_name(name), place.size_of(name)
        contents.files.append(File(full_name, size))
        if not size:
            raise IncompleteError(f"{full_name} is {'missing' if size is None else 'empty'}")
        if whole is not None and size != whole:
            raise IncompleteError(f"{full_name} has {size} bytes, {whole} are needed")
        if is_zstd:
            region = Region(full_name, 0, size, Algorithm.ZSTD, 0, full_name)
            contents.regions.append(region)


def _chunk_bytes(array: _Array) -> int | None:
    """Of one that is not compressed; None: the type is not NumPy's own."""
    try:
        return math.prod(array.chunks) * np.dtype(array.dtype).itemsize
    except (TypeError, ValueError):
        return None

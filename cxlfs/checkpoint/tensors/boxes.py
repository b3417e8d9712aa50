"""Tensors that a format cuts into boxes: those of torch DCP and of Orbax.

torch DCP stores each box as an archive of ``torch.save``, so that the items are in a record of an
archive inside a file. Orbax stores arrays as zarr, one value of its tree for each chunk.

Other modules find the files (``formats``) and read the items.

Invariants
- Nothing is read but metadata: the pickles of archives, the index of the tree.
- Chunks at the edge of a zarr array are as large as the others: what lies outside of the array
  is in no part.
"""

from __future__ import annotations

import math
import re

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.formats import dcp, ocdbt
from cxlfs.checkpoint.model import BeyondLimitsError, Contents, DamagedError, ProblemError, Tensor
from cxlfs.checkpoint.pickles import read_pickle
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.checkpoint.tensors.model import Codec, Part, StoredTensor, dense_strides
from cxlfs.checkpoint.torch_values import TensorWalk, TorchTensor
from cxlfs.checkpoint.zips import MAGIC, STORED, Archive
from cxlfs.plain import PlainError, number, parse, row, text

_DISTCP = ".distcp"
_OCDBT_FILE = re.compile(r"(?P<home>(?:.*/)?)(?:ocdbt\.process_\d{1,9}/)?d/[0-9a-f]{8,64}")
_ZARRAY = "/.zarray"
_PICKLE = "/data.pkl"
_BOXES_MAX = 20_000
"""Archives of one directory that are looked into, as many as ``dcp`` compares."""


def home_of(tensor: Tensor) -> str | None:
    """The directory whose metadata says how the tensor is cut, with a slash at its end or empty;
    None: it is not cut.
    """
    if tensor.file.endswith(_DISTCP):
        return tensor.file.rpartition("/")[0] + "/" * ("/" in tensor.file)
    match = _OCDBT_FILE.fullmatch(tensor.file)
    return match["home"] if match is not None else None


def tensors_in(home: Place, name: str, contents: Contents) -> list[StoredTensor]:
    """All of the directory ``name`` (as :func:`home_of` says it). Raises ProblemError."""
    place = home.below(name.rstrip("/")) if name else home
    if place.is_file(dcp.METADATA):
        return _distributed(place)
    return _zarr(place, [each for each in contents.tensors if home_of(each) == name])


# --- torch DCP ------------------------------------------------------------------------------


def _distributed(place: Place) -> list[StoredTensor]:
    pieces, states = dcp.read_metadata(place)
    by_name: dict[str, list[dcp.Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    left = _BOXES_MAX
    found = []
    for name, inside in by_name.items():
        state = states.get(name)
        if state is None or state.chunks is None:
            found.append(StoredTensor(name, "object", (), (), "it is an object, not a tensor"))
            continue
        left -= len(inside)
        if left < 0:
            found.append(StoredTensor(name, state.dtype, state.shape, (), "it has many boxes"))
            continue
        found.append(_of_pieces(place, name, state, inside))
    return found


def _of_pieces(place: Place, name: str, state: dcp.State, pieces: list[dcp.Piece]) -> StoredTensor:
    parts = []
    dtype = state.dtype
    sizes = dict(state.chunks or ())
    try:
        for piece in pieces:
            with place.open(piece.file) as reader:
                part, dtype = _of_archive(reader, piece)
            start = piece.chunk if piece.chunk is not None else (0,) * len(state.shape)
            if sizes.get(start, part.shape) != part.shape or len(start) != len(state.shape):
                raise DamagedError("the shape of a box differs from what the metadata says")
            parts.append(part)
    except ProblemError as error:
        return StoredTensor(name, dtype, state.shape, (), str(error))
    return StoredTensor(name, dtype, state.shape, tuple(parts))


def _of_archive(reader: Reader, piece: dcp.Piece) -> tuple[Part, str]:
    """The box that an archive of ``torch.save`` holds, and its item type."""
    if piece.offset + piece.length > reader.size_bytes:
        raise DamagedError("a box ends behind its file")
    if reader.read(piece.offset, min(len(MAGIC), piece.length)) != MAGIC:
        raise BeyondLimitsError("its boxes are not archives of torch.save")
    archive = Archive(reader, piece.offset, piece.length)
    root = next((n for n in archive.records if n.endswith(_PICKLE) and n.count("/") == 1), None)
    if root is None:
        raise DamagedError("a box has no pickle")
    walk = TensorWalk()
    walk.walk(read_pickle(archive.read(archive.records[root])).value)
    if len(walk.tensors) != 1:
        raise BeyondLimitsError("a box is not one plain tensor")
    tensor = walk.tensors[0]
    record = archive.records.get(f"{root.removesuffix(_PICKLE)}/data/{tensor.storage.key}")
    if record is None or record.method != STORED or record.size_bytes != tensor.storage.size_bytes:
        raise DamagedError("the data of a box is not in its archive")
    begin = piece.offset + record.offset + tensor.offset
    return _part(reader.name, begin, piece, tensor), tensor.dtype


def _part(file: str, begin: int, piece: dcp.Piece, tensor: TorchTensor) -> Part:
    start = piece.chunk if piece.chunk is not None else (0,) * len(tensor.shape)
    return Part(file, begin, tensor.size_bytes, start, tensor.shape, tensor.strides)


# --- Orbax ----------------------------------------------------------------------------------


def _zarr(place: Place, tensors: list[Tensor]) -> list[StoredTensor]:
    """Arrays whose metadata and places the tree has; ``tensors``: what Orbax' own metadata names,
    one for each value of the tree.
    """
    tree = ocdbt.read_contents(place)
    values: dict[str, list[ocdbt.Value]] = {}
    for value in tree.values or ():
        values.setdefault(value.key.rpartition("/")[0], []).append(value)
    names = dict.fromkeys(_without_chunk(tensor.name) for tensor in tensors)
    shapes = {_without_chunk(tensor.name): tensor.shape for tensor in tensors}
    found = []
    for name in names:
        about = tree.texts.get(name + _ZARRAY)
        if about is None:
            reason = "the metadata of its array is not in the tree"
            found.append(StoredTensor(name, "", shapes[name], (), reason))
            continue
        try:
            found.append(_array(place, name, about, values.get(name, [])))
        except ProblemError as error:
            found.append(StoredTensor(name, "", shapes[name], (), str(error)))
    return found


def _without_chunk(name: str) -> str:
    return re.sub(r"\[[\d.]{1,200}\]$", "", name)


def _array(place: Place, name: str, about: bytes, values: list[ocdbt.Value]) -> StoredTensor:
    """Of version 2 of zarr. Raises ProblemError."""
    try:
        fields = parse(about, limits.TEXT_BYTES_MAX)
        if not isinstance(fields, dict):
            raise DamagedError("the metadata of its array is no object")
        dtype = text(fields.get("dtype"))
        sizes, chunk = (
            row(fields.get(name), number, limits.DIMENSIONS_MAX) for name in ("shape", "chunks")
        )
    except PlainError as error:
        raise DamagedError(f"the metadata of its array: {error}") from error
    if len(sizes) != len(chunk) or not all(chunk):
        raise DamagedError("the chunks of its array cannot be")
    compressor = fields.get("compressor")
    codec, reason = _codec_of(compressor)
    if fields.get("filters"):
        reason = "its chunks go through a filter"
    strides = dense_strides(chunk)
    if fields.get("order") == "F":
        strides = tuple(reversed(dense_strides(tuple(reversed(chunk)))))
    separator = "/" if fields.get("dimension_separator") == "/" else "."
    parts = []
    for value in values:
        key = value.key.removeprefix(f"{name}/")
        start = _start_of(key, separator, chunk, sizes)
        inside = [min(step, size - at) for at, step, size in zip(start, chunk, sizes, strict=True)]
        file = place.full_name(value.file)
        place_of = file, value.offset, value.length
        parts.append(Part(*place_of, start, tuple(inside), strides, codec))
    if reason is None and sum(part.items for part in parts) != math.prod(sizes):
        reason = "some of its chunks lie in the tree itself, or were never written"
    return StoredTensor(name, dtype, sizes, tuple(parts), reason)


def _codec_of(compressor: object) -> tuple[Codec | None, str | None]:
    """The codec, and why it cannot be read."""
    if compressor is None:
        return None, None
    kind = compressor.get("id") if isinstance(compressor, dict) else None
    if kind != "zstd":
        return None, f"its chunks are compressed ({str(kind)[:40]})"
    return Codec.ZSTD, None


def _start_of(
    key: str, separator: str, chunk: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...]:
    numbers = key.split(separator) if sizes else []
    if len(numbers) != len(sizes) or not all(n.isdecimal() and len(n) < 20 for n in numbers):
        raise DamagedError("a chunk of its array has a name that cannot be")
    start = tuple(int(n) * step for n, step in zip(numbers, chunk, strict=True))
    if any(at >= size for at, size in zip(start, sizes, strict=True)):
        raise DamagedError("a chunk of its array lies outside of it")
    return start

"""PyTorch's distributed checkpoint: ``.metadata``, a pickle, and ``__RANK_N.distcp`` files.

Source: torch/distributed/checkpoint/filesystem.py, metadata.py (torch 2.13). ``.metadata`` is
written last. Complete: it can be read, the chunks of each tensor cover it, for each there is a
piece, and every piece lies in its file. A piece of ``torch.save`` is an archive of its own with
CRC-32s, which the content is compared with. A file that it does not name is left over, from an
attempt of more ranks perhaps.

Saving over such a directory rewrites its files while the old ``.metadata`` is there, and nothing
in them says which save they are of. A file that was there before ``.metadata`` and was written to
after it is how that is seen (``ages``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import msgspec

from cxlfs.checkpoint import limits, zips
from cxlfs.checkpoint.ages import written_after
from cxlfs.checkpoint.formats.files import take_files, take_stray
from cxlfs.checkpoint.jsons import Name, Number, Shape, checked, number_or_none, prepared
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    ProblemError,
    Tensor,
)
from cxlfs.checkpoint.pickles import Applied, Global, Pairs, read_pickle
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.checkpoint.torch_values import EPOCH_KEYS, STEP_KEYS
from cxlfs.checkpoint.zips import Archive

METADATA = ".metadata"
_SHARD = re.compile(r"__(\d{1,9})_(\d{1,9})\.distcp")
_ARCHIVES_MAX = 20_000
"""Pieces whose archives are looked into; the rest are compared in size alone."""


_Shape = tuple[int, ...]
_CHUNKS_MAX = 1_000
"""Of one tensor, that are compared with each other; of more the volumes are added up alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What ``.metadata`` says of one item: ``[offset, offset + length)`` of ``file``."""

    name: str
    chunk: tuple[int, ...] | None
    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What ``.metadata`` says of one value: a tensor in ``chunks`` (where each begins, and its
    size), or (``chunks`` None) bytes.
    """

    dtype: str
    shape: _Shape
    chunks: tuple[tuple[_Shape, _Shape], ...] | None


@prepared
class _Index(msgspec.Struct):
    fqn: Name


@prepared
class _Storage(msgspec.Struct):
    relative_path: Name
    offset: Number
    length: Number


@prepared
class _Dimensions(msgspec.Struct):
    value: Shape


class Distributed:
    kind = "dcp"

    def recognises(self, place: Place) -> bool:
        return place.is_directory() and is_distributed(place)

    def examine(self, place: Place) -> Contents:
        contents = Contents()
        take_distributed(place, contents)
        take_files(place, contents, place.names())
        return contents


def is_distributed(place: Place) -> bool:
    return any(n in (METADATA, METADATA + ".tmp") or _SHARD.fullmatch(n) for n in place.names())


def take_distributed(place: Place, contents: Contents) -> None:
    """Add the distributed checkpoint in a directory."""
    shards = [name for name in place.names() if _SHARD.fullmatch(name)]
    size = place.size_of(METADATA)
    contents.files.append(File(place.full_name(METADATA), size))
    try:
        if size is None:
            raise IncompleteError(f"{place.full_name(METADATA)} is missing")
        pieces, states = read_metadata(place)
        _check_metadata(pieces, states)
        _take_pieces(place, pieces, states, contents)
        named = {piece.file for piece in pieces}
        late = written_after(place, METADATA, sorted(named))
        if late is not None:
            contents.problems.append(
                IncompleteError(
                    f"{place.full_name(late)} was written after {METADATA}: "
                    "it may be of another save"
                )
            )
    except ProblemError as error:
        contents.problems.append(error)
        named = set(shards)
    known = {file.name for file in contents.files}
    for name in shards:
        if name not in named:
            take_stray(place, name, contents)
        elif place.full_name(name) not in known:
            contents.files.append(File(place.full_name(name), place.size_of(name)))


# --- .metadata ------------------------------------------------------------------------------


def read_metadata(place: Place) -> tuple[list[Piece], dict[str, State]]:
    """The pieces, and what each value is. Raises ProblemError."""
    with place.open(METADATA) as reader:
        if not reader.size_bytes:
            raise IncompleteError(f"{place.full_name(METADATA)} is empty")
        found = read_pickle(reader.read(0, reader.size_bytes))
    fields = _fields(found.value, "its metadata")
    storage, states = fields.get("storage_data"), fields.get("state_dict_metadata")
    if not isinstance(storage, Pairs) or not isinstance(states, Pairs):
        raise DamagedError("its metadata names no tensors")
    if not storage.items:
        raise DamagedError("its metadata names no tensors")
    if len(storage.items) > limits.TENSORS_MAX:
        raise BeyondLimitsError("its metadata names more pieces than are read")
    return [_piece(key, value) for key, value in storage.items], _states(states)


def _fields(value: object, what: str) -> dict[str, object]:
    """The attributes of an object as it was pickled: a state, or arguments by name."""
    state = value.state if isinstance(value, Applied) else None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], Pairs | None):
        state = state[0] or state[1]  # (__dict__, slots)
    if not isinstance(state, Pairs):
        raise DamagedError(f"{what} is damaged")
    return state.named


def _piece(key: object, value: object) -> Piece:
    index, info = _fields(key, "an index of its metadata"), _fields(value, "its metadata")
    name = checked(index, _Index, "an index of its metadata").fqn
    what = f"tensor {name[:200]}"
    offset = index.get("offset")
    chunk = None if offset is None else _dimensions(offset, what)
    place = checked(info, _Storage, f"the place of {what}")
    return Piece(name, chunk, place.relative_path, place.offset, place.length)


def _dimensions(value: object, what: str) -> tuple[int, ...]:
    if isinstance(value, Applied) and value.called == "torch.Size":
        arguments = value.arguments
        value = arguments[0] if isinstance(arguments, tuple) and arguments else ()
    return checked({"value": value}, _Dimensions, f"the shape of {what}").value


def _sequence(value: object, what: str) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DamagedError(f"the chunks of {what} are no list")
    return value


def _states(states: Pairs) -> dict[str, State]:
    found = {}
    for name, value in states.items:
        if not isinstance(name, str) or not isinstance(value, Applied):
            raise DamagedError("its metadata is damaged")
        if not isinstance(value.state, Pairs) or not value.state.has("size"):
            found[name] = State("bytes", (), None)  # an object that is no tensor
            continue
        what = f"tensor {name[:200]}"
        size = _dimensions(value.state.get("size"), what)
        chunks = [_fields(each, what) for each in _sequence(value.state.get("chunks"), what)]
        places = tuple(
            (_dimensions(each.get("offsets"), what), _dimensions(each.get("sizes"), what))
            for each in chunks
        )
        found[name] = State(_dtype(value.state.get("properties")), size, places)
    return found


def _check_metadata(pieces: list[Piece], states: dict[str, State]) -> None:
    """Each value has its pieces, and the chunks of each tensor make it up. Raises ProblemError."""
    there = {(piece.name, piece.chunk) for piece in pieces}
    for name, state in states.items():
        chunks = state.chunks
        wanted = [None] if chunks is None else [at for at, sizes in chunks if 0 not in sizes]
        for chunk in wanted:
            if (name, chunk) not in there:
                at = f"[{', '.join(map(str, chunk))}]" if chunk and any(chunk) else ""
                raise IncompleteError(f"nothing was stored of tensor {name[:200]}{at}")
        if chunks is not None and not _covers(state.shape, chunks):
            raise DamagedError(f"the chunks of tensor {name[:200]} do not make it up")


def _covers(shape: _Shape, chunks: tuple[tuple[_Shape, _Shape], ...]) -> bool:
    """All lie inside, no two overlap, and together they have as many items as the tensor."""
    boxes = [
        [(first, first + size) for first, size in zip(offsets, sizes, strict=True)]
        for offsets, sizes in chunks
        if len(offsets) == len(sizes) == len(shape) and 0 not in sizes
    ]
    for box in boxes:
        if any(end > size for (_, end), size in zip(box, shape, strict=True)):
            return False
    volume = sum(math.prod(end - first for first, end in box) for box in boxes)
    if len(boxes) <= _CHUNKS_MAX:
        for one, other in itertools.combinations(boxes, 2):
            pairs = zip(one, other, strict=True)
            if all(a < d and c < b for (a, b), (c, d) in pairs):
                return False
    return volume == math.prod(shape)


def _dtype(properties: object) -> str:
    state = properties.state if isinstance(properties, Applied) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if isinstance(state, Pairs):
        first = state.get("dtype")
    return first.name if isinstance(first, Global) else ""


# --- the files ------------------------------------------------------------------------------


def _take_pieces(
    place: Place, pieces: list[Piece], states: dict[str, State], contents: Contents
) -> None:
    by_file: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    if len(by_file) > limits.FILES_MAX:
        raise BeyondLimitsError("its metadata names more files than are read")
    left = _ARCHIVES_MAX
    for number_of_file, (file, inside) in enumerate(sorted(by_file.items(), key=_rank), 1):
        size = place.size_of(file)
        contents.files.append(File(place.full_name(file), size))
        words = f"shard {number_of_file} of {len(by_file)} ({place.full_name(file)})"
        if size is None:
            contents.problems.append(IncompleteError(f"{words} is missing"))
            continue
        # Of a tensor without items nothing is ever read.
        looked_into = [e for e in inside if e.name not in states or 0 not in states[e.name].shape]
        end = max((piece.offset + piece.length for piece in looked_into), default=0)
        if end > size:
            contents.problems.append(
                IncompleteError(f"{words} ends at byte {size}, {end} are needed")
            )
            continue
        looked_into = looked_into[:left]
        left -= len(looked_into)
        try:
            with place.open(file) as reader:
                _take_archives(reader, looked_into, contents)
        except BeyondLimitsError as error:
            contents.notes.append(f"{place.full_name(file)}: {error}")
            left = 0
        except ProblemError as error:
            contents.problems.append(error)
        for piece in inside:
            contents.tensors.append(_tensor(place, piece, states))


def _rank(item: tuple[str, list[Piece]]) -> tuple[int, int, str]:
    match = _SHARD.fullmatch(item[0])
    return (int(match[1]), int(match[2]), "") if match else (1 << 30, 0, item[0])


def _take_archives(reader: Reader, pieces: list[Piece], contents: Contents) -> None:
    """Each piece that begins as an archive of torch.save must be one; all are, or none is."""
    other: Piece | None = None
    before = len(contents.regions)
    for piece in sorted(pieces, key=lambda each: each.offset):
        head = reader.read(piece.offset, min(4, piece.length))
        if head != zips.MAGIC:  # safetensors, a compressed stream, or a plugin's own
            if piece.length >= len(zips.MAGIC) and not head.strip(b"\0"):
                raise IncompleteError(f"tensor {piece.name[:200]} was not written")
            other = other or piece if piece.length and piece.chunk is not None else other
            continue
        try:
            archive = Archive(reader, piece.offset, piece.length)
        except BeyondLimitsError as error:
            contents.doubt(f"tensor {piece.name[:200]}: {error}")
        except ProblemError as error:
            contents.problems.append(DamagedError(f"tensor {piece.name[:200]}: {error}"))
        else:
            contents.regions += archive.regions(reader.name)
            _take_step(piece, archive, contents)
    if other is not None and len(contents.regions) > before:
        raise DamagedError(f"tensor {other.name[:200]} is not where it should be")


def _take_step(piece: Piece, archive: Archive, contents: Contents) -> None:
    """A number that was saved under one of the usual names."""
    name = piece.name.rpartition(".")[2]
    record = next((r for n, r in archive.records.items() if n.endswith("/data.pkl")), None)
    if piece.chunk is not None or record is None or name not in (*STEP_KEYS, *EPOCH_KEYS):
        return
    value = number_or_none(read_pickle(archive.read(record, limits.TEXT_BYTES_MAX)).value)
    if name in STEP_KEYS and (contents.step is None or name == STEP_KEYS[0]):
        contents.step = value
    elif name in EPOCH_KEYS:
        contents.epoch = value


def _tensor(place: Place, piece: Piece, states: dict[str, State]) -> Tensor:
    """A piece as a tensor: of a chunk the name says where it begins."""
    state = states.get(piece.name)
    dtype, shape = ("bytes", ()) if state is None else (state.dtype, state.shape)
    name = piece.name
    if piece.chunk is not None and any(piece.chunk):
        name = f"{name}[{', '.join(map(str, piece.chunk))}]"
    return Tensor(name, dtype, shape, place.full_name(piece.file), piece.offset, piece.length)

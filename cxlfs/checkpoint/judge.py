"""Is a file torn? Its bytes say so, compared with those of the version before. Of a new file that
is another file of its series.

The formats are those of single files (``formats.files``), and JSON. Other modules read the bytes
(whoever makes the ``Source``), know how the writer ended, and decide what follows.

Invariants
- Content of a format that nobody knows, or that a reader does not understand, is never torn.
- Content that is whole and has every name of the version before is never torn.
- Nothing is compared with a version before that is not whole itself.
- HDF5's library reads HDF5 files in this process: it is one that may fail, with limits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Protocol

from cxlfs.checkpoint import hdf5_child, limits, zips
from cxlfs.checkpoint.formats import hdf5, npy
from cxlfs.checkpoint.formats.base import HEAD_BYTES, FileFormat
from cxlfs.checkpoint.formats.files import FILE_FORMATS
from cxlfs.checkpoint.formats.hdf5 import Hdf5
from cxlfs.checkpoint.formats.npy import NumpyArchive
from cxlfs.checkpoint.formats.other import SUFFIXES, Other
from cxlfs.checkpoint.formats.torch_legacy import MAGIC as TORCH_LEGACY
from cxlfs.checkpoint.hdf5_apart import take_listed
from cxlfs.checkpoint.jsons import ends_early, read_json
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    Hdf5Part,
    IncompleteError,
    ProblemError,
    State,
)
from cxlfs.checkpoint.place import Budget, Reader
from cxlfs.units import KIB, MIB

_METADATA_BYTES_MAX = 64 * MIB
"""Of structure that is read of one file: what has more is not judged."""
_BLOCK_BYTES = 4 * KIB
_BLOCKS_MAX = 4096
_PIECE_BYTES = MIB
_NAME_WORDS_MAX = 200
_JSON = ".json"
_HAVE_DIRECTORIES = (hdf5.MAGIC, zips.MAGIC)
_MARKS = (hdf5.MAGIC, zips.MAGIC, npy.MAGIC, TORCH_LEGACY)
"""No pickle: a log of pickles begins like one, and so does other data."""
_SWMR = 4
"""A flag of HDF5: readers may open the file while it grows, and it is good at any end."""
_WHOLE_AT_ANY_END = (NumpyArchive, Hdf5)
"""Formats that take tensors one by one: wherever a saver ends, the file is whole by itself."""


class Evidence(enum.StrEnum):
    """What the bytes say of the new content."""

    NONE = "none"
    """It is whole, and has every name of the version before."""
    WEAK = "weak"
    """It is whole by itself, and lacks names."""
    BEGINNING = "beginning"
    """It is whole by itself, and holds only the first tensors of the version before."""
    STRONG = "strong"
    """It is empty, cut, incomplete or damaged by its own format."""
    UNKNOWN = "unknown"
    """It cannot be judged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``reason``: one line for people; empty where nothing is wrong."""

    evidence: Evidence
    reason: str = ""


class Source(Protocol):
    """Bytes of one content, wherever they are."""

    size_bytes: int

    def fetch(self, offset: int, length: int) -> bytes:
        """At most 1 MiB, all of it inside. Raises OSError: it cannot be read."""
        ...


def is_judged_new(name: bytes, head: bytes) -> bool:
    """Whether a new file is: ``head`` is that of the file of its series before, whose format its
    first bytes show. Text never is. Of model files that nobody reads here the name is enough: they
    count where their writer had not closed them.
    """
    text = name.decode("utf-8", "replace")
    return _shown(text, head) is not None or is_unread(name)


def is_unread(name: bytes) -> bool:
    """Whether it is the name of a model file that nobody reads here."""
    return name.decode("utf-8", "replace").endswith(SUFFIXES)


def shows_format(name: bytes) -> bool:
    """Whether the name alone says what a file should hold."""
    text = name.decode("utf-8", "replace")
    found = next((each for each in FILE_FORMATS if each.recognises(text, b"")), None)
    return found is not None and not isinstance(found, Other)


def looks_alike(name: bytes, new: bytes, old: bytes) -> bool:
    """Whether the first bytes of two files show the same format."""
    text = name.decode("utf-8", "replace")
    shown = _shown(text, old)
    return shown is not None and _shown(text, new) == shown


def _shown(name: str, head: bytes) -> bytes | None:
    """The mark of a format of tensors that a file begins with."""
    if name.endswith(".safetensors") and head[8:9] == b"{":
        return b"{"
    return next((mark for mark in _MARKS if head.startswith(mark)), None)


def is_judged(name: bytes, head: bytes) -> bool:
    """Whether a file of this name can be judged, from the first bytes of the version before."""
    return _reading_of(name.decode("utf-8", "replace"), head[:HEAD_BYTES]) is not None


def changes_as_one(head: bytes) -> bool:
    """Whether half of a change in place leaves a file of this beginning torn: the format has one
    structure that leads to all of it, and its writers change that and the rest in any order.
    """
    return head.startswith(_HAVE_DIRECTORIES)


def judge(name: str, new: Source, old: Source) -> Verdict:
    """Compare a file's content with the version before. Raises nothing for what bytes may hold."""
    try:
        return _judge(name, new, old)
    except (ProblemError, OSError, RecursionError, MemoryError) as error:
        return Verdict(Evidence.UNKNOWN, str(error)[:_NAME_WORDS_MAX])


def _judge(name: str, new: Source, old: Source) -> Verdict:
    known = _reading_of(name, _head(old))
    if known is None:
        return Verdict(Evidence.UNKNOWN, "its format is not known")
    before = known(_SourceReader(old, name))
    if before is None:
        return Verdict(Evidence.UNKNOWN, "the version before is not whole")
    if not new.size_bytes:
        return Verdict(Evidence.STRONG, "it is empty")
    if _is_open_for_readers(_head(new)):
        return Verdict(Evidence.UNKNOWN, "readers may open it while it grows")
    # What is too short to be known by its first bytes is cut, if it is anything.
    reading = _reading_of(name, _head(new)) or known
    try:
        after = reading(_SourceReader(new, name))
    except (IncompleteError, DamagedError) as error:
        return Verdict(Evidence.STRONG, str(error))
    if after is None:
        return Verdict(Evidence.UNKNOWN, "whether it is whole is not known")
    return _compared(before, after)


def _compared(before: _Names, after: _Names) -> Verdict:
    """Both are whole by themselves."""
    if before.names is None or after.names is None or not after.names < before.names:
        return Verdict(Evidence.NONE)
    missing = before.names - after.names
    first = min(missing)[:_NAME_WORDS_MAX]
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    # An interrupted saver leaves the tensors that it has written, in the order of every save.
    is_beginning = bool(before.parts) and before.parts[: len(after.parts)] == after.parts
    return Verdict(
        Evidence.BEGINNING if is_beginning else Evidence.WEAK,
        f"{before.what} {first}{more} of the version before is missing",
    )


_Part = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Names:
    """What a whole content has names for; None where they are not listed. ``parts``: the
    tensors in the order in which they were written, if the format takes them one by one.
    """

    what: str
    names: frozenset[str] | None
    parts: tuple[_Part, ...] = ()


_Reading = Callable[[Reader], _Names | None]
"""Raises IncompleteError, DamagedError; None: whether the content is whole is not known."""


def _reading_of(name: str, head: bytes) -> _Reading | None:
    """How a file of that name and beginning is read; None: its format is not known."""
    if name.endswith(_JSON):
        return _read_json
    found = next((each for each in FILE_FORMATS if each.recognises(name, head)), None)
    return None if found is None else functools.partial(_examine, found)


def _examine(found: FileFormat, reader: Reader) -> _Names | None:
    contents = found.examine(reader)
    for part in contents.hdf5:
        _list_hdf5(reader, part, contents)
    state, reason = contents.state()
    if state is State.INCOMPLETE:
        raise IncompleteError(reason or "it is incomplete")
    if state is State.DAMAGED:
        raise DamagedError(reason or "it is damaged")
    if state is not State.COMPLETE:
        return None
    if contents.notes and not isinstance(found, NumpyArchive):
        return _Names("tensor", None)
    listed = contents.tensors
    parts: tuple[_Part, ...] = ()
    if isinstance(found, _WHOLE_AT_ANY_END):
        if all(tensor.offset is not None for tensor in listed):
            listed = sorted(listed, key=lambda tensor: tensor.offset or 0)
        parts = tuple((tensor.name, tensor.dtype, tensor.shape) for tensor in listed)
    names = frozenset(tensor.name for tensor in listed).union(contents.attributes)
    return _Names("tensor", names, parts)


def _list_hdf5(reader: Reader, part: Hdf5Part, contents: Contents) -> None:
    failed: list[Exception] = []

    def read(offset: int, length: int) -> bytes:
        try:
            return reader.read_data(offset, length)
        except Exception as error:
            failed.append(error)  # HDF5's library would make another one of it
            raise

    said = hdf5_child.listed(hdf5_child.Window(read, part.base, part.length), part.length)
    if failed:
        raise failed[0]
    take_listed(part, said, contents)


def _is_open_for_readers(head: bytes) -> bool:
    return head.startswith(hdf5.MAGIC) and head[8:9] in (b"\2", b"\3") and bool(head[11] & _SWMR)


def _read_json(reader: Reader) -> _Names | None:
    """Its keys are not compared: programs drop some, and end with an error for other reasons."""
    try:
        read_json(reader, "it")
    except DamagedError as error:
        if ends_early(error.__cause__):
            raise
        return None  # lines of JSON, comments, another encoding
    return _Names("key", None)


def _head(source: Source) -> bytes:
    return source.fetch(0, min(HEAD_BYTES, source.size_bytes))


class _SourceReader(Reader):
    """Reads a source in blocks, and remembers some: headers lie beside each other."""

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(-1, name, source.size_bytes, Budget(_METADATA_BYTES_MAX))
        self._source = source
        self._blocks: dict[int, bytes] = {}

    def read_data(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise IncompleteError(
                f"it ends at byte {self.size_bytes}, {offset + length} are needed"
            )
        if length > _BLOCK_BYTES:
            pieces = range(offset, offset + length, _PIECE_BYTES)
            return b"".join(
                self._fetch(at, min(_PIECE_BYTES, offset + length - at)) for at in pieces
            )
        first = offset // _BLOCK_BYTES
        last = max(offset + length - 1, offset) // _BLOCK_BYTES
        data = b"".join(self._block(number) for number in range(first, last + 1))
        begin = offset - first * _BLOCK_BYTES
        return data[begin : begin + length]

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            at = number * _BLOCK_BYTES
            block = self._fetch(at, min(_BLOCK_BYTES, self.size_bytes - at))
            if len(self._blocks) >= _BLOCKS_MAX:
                self._blocks.clear()
            self._blocks[number] = block
        return block

    def _fetch(self, offset: int, length: int) -> bytes:
        if length > limits.READ_BYTES:
            raise BeyondLimitsError("a piece is larger than what is read")
        data = self._source.fetch(offset, length)
        if len(data) != length:
            raise BeyondLimitsError("it changes while it is read")
        return data

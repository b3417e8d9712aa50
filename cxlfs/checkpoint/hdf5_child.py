"""What HDF5's library says of a file, and the program that asks it for ``hdf5_apart``.

The program (DESCRIPTOR BASE LENGTH) says one JSON object on descriptor 1: ``tensors`` (name, dtype,
shape, offset and size of those whose bytes lie in one piece), ``attributes`` (``OBJECT@NAME``),
``problem`` (what the library could not read), ``left_out``. The daemon's judge, a limited process
too, asks for the same in itself.

Never here: anything of this project, so that it starts with nothing but h5py; reading data.

Invariants
- Before the first byte of the file is read the program can open no file, write none, start no
  process that outlives it, and has limits of memory and of processor time.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from typing import Protocol

MEMORY_BYTES_MAX = 2 << 30
CPU_SECONDS_MAX = 20
OBJECTS_MAX = 50_000
MISSING = 3
"""Exit code: there is no h5py."""
_TEXT_MAX = 4096
_PLAIN_KINDS = "iufcbS"
"""Of NumPy's types: those whose items lie one behind the other."""


class _Chunk(Protocol):
    byte_offset: int
    size: int


class _Type(Protocol):
    kind: str
    itemsize: int
    str: str


class _DataSet(Protocol):
    """As HDF5's library knows it, below h5py's own objects: those take twice the time."""

    shape: tuple[int, ...] | None
    dtype: _Type

    def get_offset(self) -> int | None: ...

    def get_storage_size(self) -> int: ...

    def chunk_iter(self, visit: Callable[[_Chunk], bool | None]) -> None: ...


class _File(Protocol):
    """As h5py wants a file to be."""

    def seek(self, offset: int, whence: int = 0) -> int: ...

    def readinto(self, buffer: memoryview) -> int: ...


class _Lies(Exception):  # noqa: N818  it leaves this module as text
    """The structure can be read, and cannot be."""


class Window:
    """Part of a file. ``read``: bytes of it by offset and length, all of them inside."""

    def __init__(self, read: Callable[[int, int], bytes], base: int, length: int) -> None:
        self._read, self._base, self._length = read, base, length
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        left = max(self._length - self._at, 0)
        data = self._read(self._base + self._at, min(len(buffer), left))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read(self, length: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        data = self._read(self._base + self._at, left if length < 0 else min(length, left))
        self._at += len(data)
        return data

    def write(self, _data: bytes) -> int:
        raise OSError("it is open for reading")

    def truncate(self, _size: int | None = None) -> int:
        raise OSError("it is open for reading")

    def flush(self) -> None:
        """Nothing was written."""


def listed(file: _File, length: int) -> dict[str, object]:
    """What a file of ``length`` bytes holds. Raises MemoryError alone."""
    import h5py  # type: ignore[import-untyped]  # noqa: PLC0415  in limited processes alone

    tensors: list[dict[str, object]] = []
    attributes: list[str] = []
    said: dict[str, object] = {"tensors": tensors, "attributes": attributes}
    count = 0

    def visit(root: object, path: bytes) -> bool | None:
        nonlocal count
        count += 1
        found = h5py.h5o.open(root, path)
        name = "" if path == b"." else _text(path)
        if isinstance(found, h5py.h5d.DatasetID):
            is_chunked = found.get_create_plist().get_layout() == h5py.h5d.CHUNKED
            tensors.append(_described(name, found, length, is_chunked=is_chunked))
        if isinstance(found, h5py.h5d.DatasetID | h5py.h5g.GroupID) and h5py.h5a.get_num_attrs(
            found
        ):
            h5py.h5a.iterate(found, lambda each: attributes.append(f"{name}@{_text(each)}"))
        if count < OBJECTS_MAX and len(attributes) < OBJECTS_MAX:
            return None
        said["left_out"] = f"of more than {OBJECTS_MAX} data sets or attributes some are listed"
        return True

    try:
        with h5py.File(file, "r") as opened:
            h5py.h5o.visit(opened.id, lambda path: visit(opened.id, path))
    except _Lies as error:
        said["lies"] = str(error)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the library makes of it
        said["problem"] = str(error)[:_TEXT_MAX] or type(error).__name__
    return said


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")[:_TEXT_MAX]


def _described(name: str, found: _DataSet, length: int, *, is_chunked: bool) -> dict[str, object]:
    """Raises _Lies."""
    items = None
    try:
        dtype = {"|b1": "bool"}.get(found.dtype.str, found.dtype.str)
        if found.dtype.kind in _PLAIN_KINDS:
            items = found.dtype.itemsize
    except Exception:  # noqa: BLE001  a type that NumPy has none for
        dtype = "other"
    shape = found.shape or ()
    size = found.get_storage_size()
    offset = found.get_offset() if size and not is_chunked else None
    if offset is not None and offset + size > length:
        raise _Lies(f"tensor {name} lies behind the end")
    if offset is not None and items is not None and size != items * math.prod(shape):
        raise _Lies(f"the size of tensor {name} does not fit its shape")
    if is_chunked and size:
        found.chunk_iter(lambda chunk: _check_chunk(name, chunk, length))
    return {
        "name": name,
        "dtype": dtype[:_TEXT_MAX],
        "shape": list(shape),
        "offset": offset,
        "size": None if offset is None else size,
    }


def _check_chunk(name: str, chunk: _Chunk, length: int) -> None:
    if not chunk.size or chunk.byte_offset + chunk.size > length:
        raise _Lies(f"tensor {name} lies behind the end")


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))


def main(arguments: list[str]) -> int:
    """Returns 0 where something can be said."""
    try:
        import h5py  # noqa: F401, PLC0415  before descriptors are refused
    except ImportError:
        return MISSING
    descriptor, base, length = map(int, arguments)
    _limit()
    window = Window(lambda at, size: os.pread(descriptor, size, at), base, length)
    try:
        data = json.dumps(listed(window, length)).encode()
    except MemoryError:
        return 1
    while data:
        data = data[os.write(1, data) :]
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

"""The program that reads an HDF5 file with h5py for ``hdf5_apart``: DESCRIPTOR BASE LENGTH.

Says one JSON object on descriptor 1: ``tensors`` (name, dtype, shape, offset and size of those
whose bytes lie in one piece), ``problem`` (what HDF5's library could not read), ``left_out``.

Never here: anything of this project, so that it starts with nothing but h5py; reading data.

Invariants
- Before the first byte of the file is read it can open no file, write none, start no process that
  outlives it, and has limits of memory and of processor time.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Protocol

MEMORY_BYTES_MAX = 2 << 30
CPU_SECONDS_MAX = 20
DATA_SETS_MAX = 50_000
_TEXT_MAX = 4096


class _DataSetId(Protocol):
    def get_offset(self) -> int | None: ...

    def get_storage_size(self) -> int: ...


class _Type(Protocol):
    str: str


class _DataSet(Protocol):
    shape: tuple[int, ...] | None
    dtype: _Type
    chunks: object
    id: _DataSetId


class Window:
    """Part of a file, as h5py wants a file to be."""

    def __init__(self, descriptor: int, base: int, length: int) -> None:
        self._descriptor, self._base, self._length = descriptor, base, length
        self._at = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        left = max(self._length - self._at, 0)
        data = os.pread(self._descriptor, min(len(buffer), left), self._base + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read(self, length: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        wanted = left if length < 0 else min(length, left)
        data = os.pread(self._descriptor, wanted, self._base + self._at)
        self._at += len(data)
        return data

    def write(self, _data: bytes) -> int:
        raise OSError("it is open for reading")

    def truncate(self, _size: int | None = None) -> int:
        raise OSError("it is open for reading")

    def flush(self) -> None:
        """Nothing was written."""


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))


def _described(name: str, found: _DataSet) -> dict[str, object]:
    try:
        dtype = {"|b1": "bool"}.get(found.dtype.str, found.dtype.str)
    except Exception:  # noqa: BLE001  a type that NumPy has none for
        dtype = "other"
    size = found.id.get_storage_size()
    offset = found.id.get_offset() if found.chunks is None and size else None
    return {
        "name": name[:_TEXT_MAX],
        "dtype": dtype[:_TEXT_MAX],
        "shape": list(found.shape or ()),
        "offset": offset,
        "size": None if offset is None else size,
    }


def main(arguments: list[str]) -> int:
    """Returns 0 where something can be said."""
    import h5py  # type: ignore[import-untyped]  # noqa: PLC0415  in this process alone

    descriptor, base, length = map(int, arguments)
    tensors: list[dict[str, object]] = []
    said: dict[str, object] = {"tensors": tensors}
    _limit()

    def visit(name: str, found: object) -> bool | None:
        if isinstance(found, h5py.Dataset):
            tensors.append(_described(name, found))
        if len(tensors) < DATA_SETS_MAX:
            return None
        said["left_out"] = f"of more than {DATA_SETS_MAX} data sets the first are listed"
        return True

    try:
        with h5py.File(Window(descriptor, base, length), "r") as file:
            file.visititems(visit)
    except MemoryError:
        return 1
    except Exception as error:  # noqa: BLE001  whatever the library makes of it
        said["problem"] = str(error)[:_TEXT_MAX] or type(error).__name__
    data = json.dumps(said).encode()
    while data:
        data = data[os.write(1, data) :]
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

"""Archives of ``torch.save`` that were ended without what should be in them.

An exception that passes ``torch.save`` lets PyTorch end the zip archive in good order: it has its
directory and the records that the writer adds by itself, and lacks those that had not come yet. So
a file that looks whole is none. Sources: torch/serialization.py, ``_save`` and
``_open_zipfile_writer_file.__exit__``; caffe2/serialize/inline_container.cc, ``writeEndOfFile``
(torch 2.13): ``data.pkl`` comes first, the storages behind it in the order of their numbers.

Never here: whether an archive is damaged, or its values make sense (``cxlfs.checkpoint``).

Invariants
- A file is called hollow only where its own records show that something is missing; what is no such
  archive, larger than what is read, damaged, or written in another way is not.
- At most DIRECTORY_BYTES_MAX and PICKLE_BYTES_MAX are read, nothing is unpickled or inflated.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError
from cxlfs.units import KIB

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap

DIRECTORY_BYTES_MAX = 128 * KIB
"""Of some 2000 records: 20 ms, in which others wait."""
PICKLE_BYTES_MAX = 512 * KIB
_MAGIC = b"PK\x03\x04"
_OF_THE_WRITER = frozenset({"version", "byteorder", ".data/serialization_id"})
"""What it adds when an archive is ended."""
_PICKLE = "data.pkl"
_MEMO = rb"(?:q.|r.{4}|\x94)"
_STRING = rb"(?:X.\0\0\0|\x8c.)"
_KEY = _STRING + rb"(\d{1,9})" + _MEMO
"""Not in the pickle before."""
_DEVICE = rb"(?:h.|j.{4}|" + _STRING + rb"[\w:]{1,32}?" + _MEMO + rb")"
_ITEMS = rb"(?:K.|M..|J.{4}|\x8a.{2,9}?)"
_STORAGE = re.compile(_KEY + _DEVICE + _ITEMS + rb"t" + _MEMO + rb"Q", re.DOTALL)
"""A storage's persistent id, as a pickle of protocol 2 to 5 has it: ``("storage", type, key,
device, items)``."""


_NO_ARCHIVE = (zipfile.BadZipFile, ValueError, RuntimeError, EOFError, OSError, struct.error)
"""What ``zipfile`` raises where bytes are none, or encrypted, or compressed in an unknown way."""


class _TooMuchError(Exception):
    """More would have to be read than is."""


class _Content(io.RawIOBase):
    """A content as a file; raises _TooMuchError."""

    def __init__(self, content: FileMap) -> None:
        self._content = content
        self._at = 0
        self._left = DIRECTORY_BYTES_MAX + PICKLE_BYTES_MAX

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._content.size}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        length = max(self._content.size - self._at, 0)
        length = length if size < 0 else min(size, length)
        self._left -= length
        if self._left < 0:
            raise _TooMuchError
        data = bytes(self._content.read(self._at, length))
        self._at += len(data)
        return data


def is_hollow(content: FileMap) -> bool:
    """It is an archive of PyTorch whose writer ended it before all was in it."""
    try:
        if bytes(content.read(0, len(_MAGIC))) != _MAGIC:
            return False
        with zipfile.ZipFile(_Content(content)) as archive:
            return _lacks_something(archive)
    except (CxlfsError, _TooMuchError, *_NO_ARCHIVE):
        return False


def _lacks_something(archive: zipfile.ZipFile) -> bool:
    infos = archive.infolist()
    root = infos[0].filename.partition("/")[0] + "/" if infos else ""
    records = {info.filename.removeprefix(root): info for info in infos}
    if "version" not in records:
        return False
    if records.keys() <= _OF_THE_WRITER:
        return True
    pickle = records.get(_PICKLE)
    if pickle is None or pickle.compress_type or pickle.file_size > PICKLE_BYTES_MAX:
        return False
    keys = {match[1].decode() for match in _STORAGE.finditer(archive.read(pickle))}
    return any(f"data/{key}" not in records for key in keys)

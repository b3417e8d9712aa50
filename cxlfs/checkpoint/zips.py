"""The directory of a zip archive, read within limits and without trust.

Source: APPNOTE.TXT 6.3.10 (PKWARE), sections 4.3 and 4.5.3. Two methods are known, stored and
deflated: no framework writes another.

Never here: what the records mean. Nothing is inflated but single records that are asked for, up to
a limit.

Invariants
- An archive without its end record was not written to its end; one whose parts contradict each
  other is damaged.
- Every record that is returned lies inside the file, before the archive's directory.
- Where no record has a checksum (all are 0: PyTorch writes so when it is told to) none is compared.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import (
    Algorithm,
    BeyondLimitsError,
    DamagedError,
    IncompleteError,
    Region,
)
from cxlfs.checkpoint.place import Reader

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8

_END = struct.Struct("<4s4H2LH")
END_MAGIC = b"PK\x05\x06"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR = struct.Struct("<4sLQL")
_LOCATOR_MAGIC = b"PK\x06\x07"
_ENTRY = struct.Struct("<4s6H3L5H2L")
_ENTRY_MAGIC = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s5H3L2H")
_COMMENT_BYTES_MAX = 65_535
_ZIP64_EXTRA = 1
_ABSENT_32 = 0xFFFF_FFFF
_ABSENT_16 = 0xFFFF
_ENCRYPTED = 1
_VERSION_MAX = 63
"""6.3, of the specification; Python's zipfile reads no later one either."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One file in the archive; ``offset`` is that of its data."""

    name: str
    method: int
    crc32: int
    offset: int
    stored_bytes: int
    size_bytes: int

    def region(self, file: str, base: int = 0) -> Region:
        """Its bytes and their checksum; the archive begins at ``base`` of ``file``."""
        return Region(
            file,
            base + self.offset,
            self.stored_bytes,
            Algorithm.CRC32,
            self.crc32,
            self.name,
            deflated=self.method == DEFLATED,
        )


class Archive:
    """The records of the archive in ``[base, base + length)`` of a file, by name."""

    def __init__(self, reader: Reader, base: int = 0, length: int | None = None) -> None:
        self._reader = reader
        self._base = base
        self._length = reader.size_bytes - base if length is None else length
        self.records: dict[str, Record] = {}
        self._load()
        self._has_checksums = any(record.crc32 for record in self.records.values())

    def read(self, record: Record, limit: int = limits.INFLATE_BYTES_MAX) -> bytes:
        """The content of a record, its checksum compared. Raises DamagedError, ..."""
        if max(record.size_bytes, record.stored_bytes) > limit:
            raise BeyondLimitsError(f"{record.name} is larger than what is read")
        data = self._reader.read(self._base + record.offset, record.stored_bytes)
        if record.method == DEFLATED:
            data = inflate(data, record.size_bytes, record.name)
        if self._has_checksums and zlib.crc32(data) != record.crc32:
            raise DamagedError(f"the checksum of {record.name} differs")
        return data

    def regions(self, file: str) -> list[Region]:
        if not self._has_checksums:
            return []
        return [record.region(file, self._base) for record in self.records.values()]

    # --- the directory ----------------------------------------------------------------------

    def _load(self) -> None:
        count, size, offset = self._find_directory()
        if count > limits.ZIP_ENTRIES_MAX or size > limits.ZIP_DIRECTORY_BYTES_MAX:
            raise BeyondLimitsError("the archive has more records than are read")
        directory = self._reader.read(self._base + offset, size)
        at = 0
        for _ in range(count):
            at = self._take_entry(directory, at, offset)
        if at != len(directory):
            raise DamagedError("the archive's directory is longer than its records")

    def _find_directory(self) -> tuple[int, int, int]:
        """Number of records, size and offset of the directory."""
        # Without a comment, as frameworks write it; or with one, or followed by other bytes: what
        # the libraries take for the end record is the last one in so many bytes.
        for comment, is_end in (
            (0, self._is_end),
            (_COMMENT_BYTES_MAX, self._is_end),
            (_COMMENT_BYTES_MAX, self._is_behind_directory),
        ):
            length = min(self._length, comment + _END.size + _LOCATOR.size)
            tail_at = self._length - length
            tail = self._reader.read(self._base + tail_at, length)
            at = tail.rfind(END_MAGIC)
            while at >= 0 and not is_end(tail, at):
                at = tail.rfind(END_MAGIC, 0, at)
            if at >= 0:
                break
        else:
            raise IncompleteError("the archive has no end: it was cut off, or is still written")
        fields = _END.unpack_from(tail, at)
        count, size, offset = fields[4], fields[5], fields[6]
        end = tail_at + at
        if at >= _LOCATOR.size and tail[at - _LOCATOR.size :][:4] == _LOCATOR_MAGIC:
            count, size, offset, end = self._find_directory_64(tail, at)
        if offset + size > end:
            raise DamagedError("the archive's directory lies behind its end")
        return count, size, offset

    @staticmethod
    def _is_end(tail: bytes, at: int) -> bool:
        """Its comment reaches to the end of the archive."""
        if at + _END.size > len(tail):
            return False
        comment_bytes = int(_END.unpack_from(tail, at)[7])
        return at + _END.size + comment_bytes == len(tail)

    def _is_behind_directory(self, tail: bytes, at: int) -> bool:
        """The directory that it names ends where it, or the record of 64 bits before it, begins."""
        if at + _END.size > len(tail):
            return False
        fields = _END.unpack_from(tail, at)
        end = self._length - len(tail) + at
        extra = _LOCATOR.size + _END64.size
        is_64 = at >= extra and tail[at - _LOCATOR.size :][:4] == _LOCATOR_MAGIC
        return is_64 or int(fields[5]) + int(fields[6]) == end

    def _find_directory_64(self, tail: bytes, at: int) -> tuple[int, int, int, int]:
        _, _, end_offset, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
        if end_offset + _END64.size > self._length:
            raise DamagedError("the archive's end record lies behind its end")
        fields = _END64.unpack(self._reader.read(self._base + end_offset, _END64.size))
        if fields[0] != _END64_MAGIC:
            # PyTorch goes by the shorter one then, Python fails.
            raise BeyondLimitsError("the archive's end record is not one")
        return fields[7], fields[8], fields[9], end_offset

    def _take_entry(self, directory: bytes, at: int, limit: int) -> int:
        """One record of the directory; where the next one begins."""
        if at + _ENTRY.size > len(directory):
            raise DamagedError("the archive's directory is shorter than its records")
        fields = _ENTRY.unpack_from(directory, at)
        magic, needed, flags, method, crc32 = fields[0], fields[2], fields[3], fields[4], fields[7]
        stored, size, name_bytes, extra_bytes, comment_bytes = fields[8:13]
        local = fields[16]
        end: int = at + _ENTRY.size + name_bytes + extra_bytes + comment_bytes
        if magic != _ENTRY_MAGIC or end > len(directory):
            raise DamagedError("the archive's directory is damaged")
        name_at = at + _ENTRY.size
        raw_name = directory[name_at : name_at + name_bytes]
        extra = directory[name_at + name_bytes : name_at + name_bytes + extra_bytes]
        size, stored, local = _with_zip64(extra, size, stored, local)
        name = raw_name.decode("utf-8", "backslashreplace")
        if needed & 0xFF > _VERSION_MAX:
            raise BeyondLimitsError(f"{name[:80]} needs a later version of zip")
        if flags & _ENCRYPTED or method not in (STORED, DEFLATED):
            raise BeyondLimitsError(f"{name[:80]} is encrypted or compressed in a way not known")
        data = self._data_offset(local, stored, raw_name, limit)
        if name in self.records:
            raise BeyondLimitsError(f"the archive has {name[:80]} twice")
        if method == STORED and stored != size:
            raise DamagedError(f"the sizes of {name[:80]} contradict each other")
        self.records[name] = Record(name, method, crc32, data, stored, size)
        return end

    def _data_offset(self, local: int, stored: int, name: bytes, limit: int) -> int:
        """Behind the record's own header, which must agree; the data ends before ``limit``."""
        what = name[:80].decode("utf-8", "backslashreplace")
        if local + _LOCAL.size > limit:
            raise DamagedError(f"{what} lies behind the archive's end")
        header = self._reader.read(self._base + local, _LOCAL.size)
        fields = _LOCAL.unpack(header)
        offset = local + _LOCAL.size + int(fields[9]) + int(fields[10])
        if fields[0] != MAGIC or fields[9] != len(name):
            raise DamagedError(f"the header of {what} is damaged")
        if offset + stored > limit:
            raise DamagedError(f"{what} lies behind the archive's end")
        if self._reader.read(self._base + local + _LOCAL.size, len(name)) != name:
            raise BeyondLimitsError(f"the header of {what} has another name")
        return offset


def _with_zip64(extra: bytes, size: int, stored: int, local: int) -> tuple[int, int, int]:
    """What the 32-bit fields left out, in the order that the specification gives it."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        at += 4 + length
        if at > len(extra):
            raise DamagedError("the archive's directory is damaged")
        if tag != _ZIP64_EXTRA:
            continue
        numbers = [int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body) - 7, 8)]
        values = []
        for value in (size, stored, local):
            if value == _ABSENT_32:
                if not numbers:
                    raise DamagedError("the archive's directory lacks a size")
                value = numbers.pop(0)  # noqa: PLW2901  the 64-bit one in its place
            values.append(value)
        return values[0], values[1], values[2]
    return size, stored, local


def inflate(data: bytes, size_bytes: int, name: str) -> bytes:
    """The content of a deflated record of ``size_bytes``, never more. Raises DamagedError."""
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        found = machine.decompress(data, size_bytes + 1)
    except zlib.error as error:
        raise DamagedError(f"{name} cannot be inflated: {error}") from error
    if len(found) != size_bytes or not machine.eof:
        raise DamagedError(f"{name} does not inflate to its size")
    return found

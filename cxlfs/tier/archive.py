"""A checkpoint as a pax archive (POSIX.1-2008, pax interchange format), for pipes: its manifest,
then its directories and files in the manifest's order.

Each header follows from the manifest alone. So who reads compares what comes with what has to come,
byte by byte, and takes nothing from a header: no path, no type, no size but that of the manifest.

Never: opens a file; keeps more than one piece in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cxlfs.errors import StreamError
from cxlfs.tier.manifest import BYTES_MAX, File, Manifest

MANIFEST_NAME = ".cxlfs-manifest.json"
PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 512
_NAME_BYTES_MAX = 100
_OCTAL_11_MAX = 8**11 - 1
_SIZE_FIELD = slice(124, 136)
_TYPE_OFFSET = 156
_FILE, _DIRECTORY, _EXTENDED = b"0", b"5", b"x"
_END = bytes(2 * _BLOCK_BYTES)
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device"}
_NANOSECONDS = 1_000_000_000


class Readable(Protocol):
    """What a stream comes from."""

    def read(self, size: int, /) -> bytes: ...


# --- writing ------------------------------------------------------------------------------------


def beginning(manifest: Manifest) -> bytes:
    """The manifest as the first member, then the directories."""
    data = manifest.encode()
    parts = [_header(MANIFEST_NAME, len(data), 0, _FILE), data, padding(len(data))]
    return b"".join([*parts, _directories(manifest)])


def member(manifest: Manifest, file: File) -> bytes:
    """What comes before the bytes of a file; behind them comes ``padding``."""
    name = f"{manifest.name}/{file.name}" if manifest.is_directory else manifest.name
    return _header(name, file.size_bytes, file.mtime_ns // _NANOSECONDS, _FILE)


def padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % _BLOCK_BYTES)


def ending() -> bytes:
    return _END


def _directories(manifest: Manifest) -> bytes:
    if not manifest.is_directory:
        return b""
    names = (manifest.name, *(f"{manifest.name}/{name}" for name in manifest.directories))
    return b"".join(_header(f"{name}/", 0, 0, _DIRECTORY) for name in names)


def _header(name: str, size_bytes: int, mtime_s: int, kind: bytes) -> bytes:
    """One block, with an extended one before it for what the block has no room for."""
    raw = name.encode()
    records = []
    if len(raw) > _NAME_BYTES_MAX or not name.isascii():
        records.append(_record(b"path", raw))
    if size_bytes > _OCTAL_11_MAX:
        records.append(_record(b"size", b"%d" % size_bytes))
        size_bytes = 0
    if mtime_s > _OCTAL_11_MAX:
        records.append(_record(b"mtime", b"%d" % mtime_s))
        mtime_s = 0
    block = _block(raw[:_NAME_BYTES_MAX], size_bytes, mtime_s, kind)
    if not records:
        return block
    extended = b"".join(records)
    before = _block(b"././@PaxHeader", len(extended), 0, _EXTENDED)
    return before + extended + padding(len(extended)) + block


def _record(key: bytes, value: bytes) -> bytes:
    """``LENGTH key=value``, where the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    length = rest + len(str(length))
    return b"%d %s=%s\n" % (length, key, value)


def _block(name: bytes, size_bytes: int, mtime_s: int, kind: bytes) -> bytes:
    mode = 0o755 if kind == _DIRECTORY else 0o644
    head = b"%b%07o\0%07o\0%07o\0%011o\0%011o\0" % (
        name.ljust(_NAME_BYTES_MAX, b"\0"),
        *(mode, 0, 0, size_bytes, mtime_s),
    )
    tail = kind + bytes(100) + b"ustar\x0000"
    rest = bytes(_BLOCK_BYTES - len(head) - 8 - len(tail))
    total = sum(head) + 8 * ord(" ") + sum(tail)
    return head + b"%06o\0 " % total + tail + rest


# --- reading ------------------------------------------------------------------------------------


class Archive:
    """A stream that is read from front to back. Every method raises StreamError, OSError."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def manifest(self) -> bytes:
        """The first member; its size is all that is taken from a header."""
        block = self._read(_BLOCK_BYTES, "the manifest")
        try:
            size = int(block[_SIZE_FIELD].rstrip(b"\0 "), 8)
        except ValueError:
            size = -1
        if size < 0 or block != _header(MANIFEST_NAME, size, 0, _FILE):
            raise StreamError("this is no stream of cxlfs send")
        if size > BYTES_MAX:
            raise StreamError(f"a manifest of {size} bytes, more than {BYTES_MAX}")
        data = self._read(size, "the manifest")
        self._compare(padding(size), "the manifest")
        return data

    def directories(self, manifest: Manifest) -> None:
        self._compare(_directories(manifest), "the directories")

    def pieces(self, manifest: Manifest, file: File) -> Iterator[bytes]:
        """The bytes of the file that has to come next."""
        what = file.name or manifest.name
        self._compare(member(manifest, file), what)
        left = file.size_bytes
        while left:
            piece = self._stream.read(min(left, PIECE_BYTES))
            if not piece:
                raise StreamError(f"the stream ends in {what}, {left} bytes before its end")
            left -= len(piece)
            yield piece
        self._compare(padding(file.size_bytes), what)

    def end(self) -> None:
        self._compare(_END, "the end")

    def _read(self, size: int, what: str) -> bytes:
        pieces, left = [], size
        while left:
            piece = self._stream.read(min(left, PIECE_BYTES))
            if not piece:
                raise StreamError(f"the stream ends before {what}")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _compare(self, expected: bytes, what: str) -> None:
        for at in range(0, len(expected), _BLOCK_BYTES):
            wanted = expected[at : at + _BLOCK_BYTES]
            found = self._read(len(wanted), what)
            if found != wanted:
                kind = _KINDS.get(found[_TYPE_OFFSET : _TYPE_OFFSET + 1], "something else")
                raise StreamError(f"the stream has {kind} where {what} has to be")

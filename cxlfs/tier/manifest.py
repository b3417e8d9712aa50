"""What a checkpoint consists of, for whoever takes it elsewhere: names, sizes, checksums.

One manifest goes ahead of a stream, and lies behind the objects of a bucket: a checkpoint is there
when everything that its manifest names is.

Never: reads or writes a file; trusts a name or a number of a manifest that came from elsewhere.

Invariants
- A name is one component, a file's name a path below it that leads nowhere else, in UTF-8. None
  begins with ``.cxlfs-``: that is a place's own, and no part of a checkpoint.
- Each file lies in a directory that is named as well, and nothing is named twice.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import unicodedata
from pathlib import PurePosixPath

from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.errors import StreamError
from cxlfs.plain import (
    Plain,
    PlainError,
    constant,
    constant_text,
    fields,
    number,
    parse,
    row,
    text,
    truth,
)

FORMAT = 1
BYTES_MAX = 64 << 20
FILES_MAX = 1 << 18
_COMPONENT_BYTES_MAX = 255
_COMPONENTS_MAX = 100
"""Of a name below a checkpoint: what removes a tree goes down it with a frame for each."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """``name``: below the checkpoint's directory; "" is the checkpoint, when it is one file.
    ``sha256``: 64 digits, or "" where it was not asked for. ``base``: of a file that is not sent,
    the checkpoint on the other side that has it ("": a receive that broke off); None: it is sent.
    """

    name: str
    size_bytes: int
    crc32c: int
    mtime_ns: int
    sha256: str = ""
    base: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """``directories``: all below it, parents first; of one file: none."""

    name: str
    is_directory: bool
    directories: tuple[str, ...]
    files: tuple[File, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def content_id(self) -> str:
        """Alike for what has the same names, sizes and checksums; 64 digits."""
        content = [[file.name, file.size_bytes, file.crc32c] for file in self.files]
        plain = [self.name, self.is_directory, self.directories, content]
        return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()

    def encode(self) -> bytes:
        plain = {"format": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(plain, indent=1, sort_keys=True).encode() + b"\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Had:
    """A file that a side has, in a checkpoint; ``staged``: in what a broken-off receive of that
    checkpoint has kept.
    """

    checkpoint: str
    name: str
    size_bytes: int
    crc32c: int
    staged: bool = False


def why_not_a_name(name: str) -> str | None:
    """Of a checkpoint; None: it can be one."""
    if name in {"", ".", ".."} or "/" in name:
        return "it is no name"
    if any(unicodedata.category(character) == "Cc" for character in name):
        return "it has control characters"
    if name.startswith(OWN_PREFIX):
        return f"what begins with {OWN_PREFIX} is no part of a checkpoint"
    try:
        is_long = len(name.encode()) > _COMPONENT_BYTES_MAX
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return "it is too long" if is_long else None


def why_not_a_path(name: str) -> str | None:
    """Of a file or directory below a checkpoint's own; None: it can be one."""
    if name.count("/") >= _COMPONENTS_MAX:
        return f"it lies more than {_COMPONENTS_MAX - 1} directories deep"
    return next(filter(None, map(why_not_a_name, name.split("/"))), None)


def decode(data: bytes) -> Manifest:
    """Raises StreamError."""
    try:
        names = ("format", "name", "is_directory", "directories", "files")
        found = fields(parse(data, BYTES_MAX), names)
        constant(found["format"], FORMAT)
        manifest = Manifest(
            text(found["name"]),
            truth(found["is_directory"]),
            row(found["directories"], text, FILES_MAX),
            row(found["files"], _file, FILES_MAX),
        )
        _check(manifest)
    except PlainError as error:
        raise StreamError(f"the manifest: {error}") from None
    return manifest


def decode_inventory(data: bytes) -> tuple[Had, ...]:
    """What ``cxlfs receive --have`` printed. Raises StreamError."""
    try:
        found = fields(parse(data, BYTES_MAX), ("schema", "files"))
        constant_text(found["schema"], "cxlfs.inventory/1")
        return row(found["files"], _had, FILES_MAX)
    except PlainError as error:
        raise StreamError(
            f"the inventory: {error}", next_step="make it with: cxlfs receive DIR --have"
        ) from None


def _file(plain: Plain) -> File:
    found = fields(plain, ("name", "size_bytes", "crc32c", "mtime_ns", "sha256", "base"))
    sha256, base = text(found["sha256"]), found["base"]
    if sha256 and not _SHA256.fullmatch(sha256):
        raise PlainError("a checksum that is none")
    if base is not None:
        base = text(base)
        problem = why_not_a_name(base) if base else None
        if problem is not None or not sha256:
            raise PlainError(problem or "a file that is not sent has no SHA-256")
    return File(
        text(found["name"]),
        number(found["size_bytes"]),
        _crc32c(found["crc32c"]),
        number(found["mtime_ns"]),
        sha256,
        base,
    )


def _had(plain: Plain) -> Had:
    found = fields(plain, ("checkpoint", "name", "size_bytes", "crc32c", "staged"))
    return Had(
        text(found["checkpoint"]),
        text(found["name"]),
        number(found["size_bytes"]),
        _crc32c(found["crc32c"]),
        truth(found["staged"]),
    )


def _crc32c(plain: Plain) -> int:
    value = number(plain)
    if value >> 32:
        raise PlainError("a checksum of more than 32 bits")
    return value


def _check(manifest: Manifest) -> None:
    """Raises PlainError."""
    problem = why_not_a_name(manifest.name)
    if problem is not None:
        raise PlainError(f"the name of the checkpoint: {problem}")
    if not manifest.is_directory:
        if manifest.directories or [file.name for file in manifest.files] != [""]:
            raise PlainError("a checkpoint of one file has others")
        return
    directories: set[str] = set()
    for name in manifest.directories:
        _check_path(name, directories)
        directories.add(name)
    seen = set(directories)
    for file in manifest.files:
        _check_path(file.name, directories)
        if file.name in seen:
            raise PlainError(f"the name {file.name[:80]!r}: it is named twice")
        seen.add(file.name)


def _check_path(name: str, directories: set[str]) -> None:
    problem = why_not_a_path(name)
    if problem is None and name in directories:
        problem = "it is named twice"
    parent = str(PurePosixPath(name).parent)
    if problem is None and parent != "." and parent not in directories:
        problem = "its directory is not named before it"
    if problem is not None:
        raise PlainError(f"the name {name[:80]!r}: {problem}")

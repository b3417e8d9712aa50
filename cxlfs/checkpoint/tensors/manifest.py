"""A manifest: what a checkpoint consists of, file by file and tensor by tensor, with checksums.

The format is JSON, version 1, described in docs/inspect.md. CRC32C finds accidents. SHA-256 finds
changes on purpose too, and a signature says who made the manifest: a manifest that is signed has
SHA-256 of each file.

Other modules sum the bytes, print, and write files.

Invariants
- Names are relative to one directory and lead nowhere else; nothing is named twice.
- A manifest that came from elsewhere is checked field by field before anything uses it.
- What is signed is everything in the manifest but the signature, in one form of JSON.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.tensors import signing
from cxlfs.errors import ManifestError
from cxlfs.plain import Plain, PlainError, fields, number, parse, row, text, truth
from cxlfs.units import MIB

SCHEMA = "cxlfs.manifest/1"
BYTES_MAX = 64 * MIB
_VALUES_MAX = 8_000_000
"""Brackets, braces and commas: each makes an object of some 100 bytes at most."""
_PARENTS_MAX = 1000
_HEX_8 = re.compile(r"[0-9a-f]{8}", re.ASCII)
_HEX_64 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ALGORITHM = "ed25519"


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestFile:
    """``sha256``: 64 digits; None: it was not asked for."""

    name: str
    size_bytes: int
    crc32c: str
    sha256: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestPart:
    """``[offset, offset + size_bytes)`` of ``file``: the box of ``shape`` that begins at ``start``.
    ``strides``: in items.
    """

    file: str
    offset: int
    size_bytes: int
    crc32c: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ManifestTensor:
    """``parts`` is empty where the format does not say where the bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ManifestPart, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Parent:
    """What the checkpoint was made from: ``id`` is that of its manifest."""

    name: str
    step: int | None
    id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """``name``: of the checkpoint; ``is_directory``: names of files are relative to it, otherwise
    to the directory that it is in. ``made``: RFC 3339. ``kind`` None: no format that is known.
    """

    name: str
    is_directory: bool
    kind: str | None
    step: int | None
    made: str
    parents: tuple[Parent, ...]
    files: tuple[ManifestFile, ...]
    tensors: tuple[ManifestTensor, ...]
    signature: bytes | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def id(self) -> str:
        """Alike for what has the same files and tensors; 64 digits."""
        plain = [dataclasses.asdict(self)[name] for name in ("files", "tensors")]
        return hashlib.sha256(_canonical(plain)).hexdigest()

    @property
    def signed_bytes(self) -> bytes:
        return _canonical({k: v for k, v in self.plain().items() if k != "signature"})

    def plain(self) -> dict[str, object]:
        """As JSON has it."""
        found = dataclasses.asdict(self)
        found["signature"] = self.plain_signature
        return {"schema": SCHEMA, "id": self.id, **found}

    @property
    def plain_signature(self) -> dict[str, str] | None:
        if self.signature is None:
            return None
        return {
            "algorithm": _ALGORITHM,
            "value": base64.b64encode(self.signature).decode("ascii"),
        }

    def encode(self) -> bytes:
        """Raises ManifestError: it is larger than what is read."""
        data = json.dumps(self.plain(), indent=1).encode() + b"\n"
        if len(data) > BYTES_MAX:
            raise ManifestError(
                f"the manifest is larger than what is read: {len(data)} bytes",
                next_step="name files alone: --no-tensors",
            )
        return data

    def signed(self, key: Path) -> Manifest:
        """The same with a signature. Raises what ``signing.sign`` raises, and ManifestError."""
        if any(file.sha256 is None for file in self.files):
            raise ManifestError("a manifest without SHA-256 is not signed")
        plain = dataclasses.replace(self, signature=None)
        return dataclasses.replace(plain, signature=signing.sign(plain.signed_bytes, key))

    def is_signed_by(self, public_key: Path) -> bool:
        """Raises what ``signing.is_signed`` raises."""
        if self.signature is None or any(file.sha256 is None for file in self.files):
            return False
        return signing.is_signed(self.signed_bytes, self.signature, public_key)


def _canonical(plain: object) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def sha256_lines(files: Iterable[ManifestFile]) -> str:
    """As ``sha256sum`` writes them: a name with a line break or a backslash is escaped, and its
    line begins with a backslash.
    """
    lines = []
    for file in files:
        name = file.name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        mark = "\\" if name != file.name else ""
        lines.append(f"{mark}{file.sha256}  {name}\n")
    return "".join(lines)


# --- reading one that came from elsewhere ---------------------------------------------------


def read(path: Path) -> Manifest:
    """Raises ManifestError, OSError."""
    if path.exists() and not path.is_file():
        raise ManifestError(f"{path} is no regular file")
    with path.open("rb") as file:
        return decode(file.read(BYTES_MAX + 1))


def decode(data: bytes) -> Manifest:
    """Raises ManifestError."""
    try:
        return _decoded(data)
    except PlainError as error:
        raise ManifestError(f"the manifest: {error}") from None


def _decoded(data: bytes) -> Manifest:
    """Raises PlainError."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > _VALUES_MAX:
        raise PlainError("it has more values than are read")
    plain = parse(data, BYTES_MAX)
    if isinstance(plain, dict) and plain.get("schema") != SCHEMA:
        raise PlainError(f"it is no {SCHEMA}")
    names = tuple(each.name for each in dataclasses.fields(Manifest))
    found = fields(plain, ("schema", "id", *names))
    manifest = Manifest(
        text(found["name"]),
        truth(found["is_directory"]),
        None if found["kind"] is None else text(found["kind"]),
        _number_or_none(found["step"]),
        text(found["made"]),
        row(found["parents"], _parent, _PARENTS_MAX),
        row(found["files"], _file, limits.FILES_MAX),
        row(found["tensors"], _tensor, limits.TENSORS_MAX),
        _signature(found["signature"]),
    )
    _check(manifest)
    if found["id"] != manifest.id:
        raise PlainError("its id is not that of its files and tensors")
    return manifest


def _check(manifest: Manifest) -> None:
    sizes = {file.name: file.size_bytes for file in manifest.files}
    if len(sizes) < len(manifest.files):
        raise PlainError("a file is named twice")
    if not _is_name(manifest.name):
        raise PlainError(f"a name that leads elsewhere: {manifest.name[:80]!r}")
    for name in sizes:
        if not all(map(_is_name, name.split("/"))):
            raise PlainError(f"a file outside of the directory: {name[:80]!r}")
    for tensor in manifest.tensors:
        for part in tensor.parts:
            if part.offset + part.size_bytes > sizes.get(part.file, -1):
                raise PlainError(f"tensor {tensor.name[:80]!r} lies outside of its file")


def _is_name(text: str) -> bool:
    """Of one file, in UTF-8."""
    is_plain = text not in ("", ".", "..") and "/" not in text and "\0" not in text
    return is_plain and not any("\ud800" <= each <= "\udfff" for each in text)


def _number_or_none(plain: Plain) -> int | None:
    return None if plain is None else number(plain)


def _matching(plain: Plain, pattern: re.Pattern[str]) -> str:
    found = text(plain)
    if pattern.fullmatch(found) is None:
        raise PlainError("a checksum that is none")
    return found


def _parent(plain: Plain) -> Parent:
    found = fields(plain, ("name", "step", "id"))
    return Parent(
        text(found["name"]), _number_or_none(found["step"]), _matching(found["id"], _HEX_64)
    )


def _file(plain: Plain) -> ManifestFile:
    found = fields(plain, ("name", "size_bytes", "crc32c", "sha256"))
    sha256 = found["sha256"]
    return ManifestFile(
        text(found["name"]),
        number(found["size_bytes"]),
        _matching(found["crc32c"], _HEX_8),
        None if sha256 is None else _matching(sha256, _HEX_64),
    )


def _tensor(plain: Plain) -> ManifestTensor:
    found = fields(plain, ("name", "dtype", "shape", "parts"))
    return ManifestTensor(
        text(found["name"]),
        text(found["dtype"]),
        row(found["shape"], number, limits.DIMENSIONS_MAX),
        row(found["parts"], _part, limits.TENSORS_MAX),
    )


def _part(plain: Plain) -> ManifestPart:
    names = ("file", "offset", "size_bytes", "crc32c", "start", "shape", "strides")
    found = fields(plain, names)
    start, shape, strides = (
        row(found[name], number, limits.DIMENSIONS_MAX) for name in ("start", "shape", "strides")
    )
    return ManifestPart(
        text(found["file"]),
        number(found["offset"]),
        number(found["size_bytes"]),
        _matching(found["crc32c"], _HEX_8),
        start,
        shape,
        strides,
    )


def _signature(plain: Plain) -> bytes | None:
    if plain is None:
        return None
    found = fields(plain, ("algorithm", "value"))
    try:
        value = base64.b64decode(text(found["value"]), validate=True)
    except (binascii.Error, ValueError):
        raise PlainError("a signature that is none") from None
    if found["algorithm"] != _ALGORITHM or len(value) != 64:
        raise PlainError("a signature of a kind that is not known")
    return value

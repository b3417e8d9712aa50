"""Make the manifest of a checkpoint, and compare a directory with one.

Each byte is read once for CRC32C, on several cores, and once more for SHA-256 where that is asked
for. On a cxlfs mount the store knows the CRC32C of each file: a manifest without tensors reads
nothing there. A comparison reads everything.

Other modules hold the format (``manifest``) and sum (``sums``).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.checkpoint.model import BeyondLimitsError, ProblemError
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors.blocks import BLOCK_BYTES, Buffer, spread
from cxlfs.checkpoint.tensors.layout import only_layout
from cxlfs.checkpoint.tensors.manifest import (
    Manifest,
    ManifestFile,
    ManifestPart,
    ManifestTensor,
    Parent,
)
from cxlfs.checkpoint.tensors.model import Layout, StoredTensor
from cxlfs.checkpoint.tensors.sums import Range, Sums, file_sums
from cxlfs.durable import promised_crc32c

_OWN = ".cxlfs"


class Finding(NamedTuple):
    """What differs. ``file`` and ``tensor`` are None where it concerns neither."""

    id: str
    file: str | None
    tensor: str | None
    message: str


def manifest_of(
    path: Path,
    *,
    with_tensors: bool = True,
    with_sha256: bool = False,
    parents: Sequence[Parent] = (),
    left_out: Sequence[Path] = (),
) -> Manifest:
    """Of the checkpoint at ``path``, or of any directory. ``left_out``: files that are no part of
    it. Raises ProblemError, DirectoryAbsentError, NotInspectableError.
    """
    if not path.name:
        raise BeyondLimitsError("a manifest needs the name of a checkpoint")
    layout = only_layout(path)
    is_directory = path.is_dir()
    root = Place(path if is_directory else path.parent)
    skipped = {os.path.realpath(each) for each in left_out}
    names = [
        name
        for name in _names(root, path, layout)
        if os.path.realpath(root.path / name) not in skipped
    ]
    for name in names:
        if _in_utf8(name) != name:
            raise BeyondLimitsError(f"the name of the file {_in_utf8(name)} is not UTF-8")
    tensors: tuple[StoredTensor, ...] = ()
    if with_tensors and layout is not None:
        tensors = tuple(_from_root(each, layout, root) for each in layout.tensors)
    files, sums = _files(root, names, tensors)
    if with_sha256:
        files = _with_sha256(root, files)
    return Manifest(
        name=path.name,
        is_directory=is_directory,
        kind=None if layout is None else layout.kind,
        step=None if layout is None else layout.step,
        made=f"{dt.datetime.now(dt.UTC):%Y-%m-%dT%H:%M:%SZ}",
        parents=tuple(parents),
        files=tuple(files),
        tensors=tuple(_tensor(each, sums) for each in tensors),
    )


def _from_root(tensor: StoredTensor, layout: Layout, root: Place) -> StoredTensor:
    """With names of files that are relative to ``root``."""

    def named(file: str) -> str:
        return os.path.relpath(layout.home.path / file if file else layout.home.path, root.path)

    parts = tuple(dataclasses.replace(each, file=named(each.file)) for each in tensor.parts)
    return dataclasses.replace(tensor, parts=parts)


def _names(root: Place, path: Path, layout: Layout | None) -> list[str]:
    """Of the files, sorted."""
    if not path.is_dir():
        if layout is None:
            return [path.name]
        return sorted(f.name or path.name for f in layout.files if f.size_bytes is not None)
    found: list[str] = []
    for directory, below, files in os.walk(root.path, onerror=_refuse):
        below[:] = sorted(
            name for name in below if not name.startswith(OWN_PREFIX) and name != _OWN
        )
        inside = os.path.relpath(directory, root.path)
        for name in files:
            full = name if inside == "." else f"{inside}/{name}"
            if not name.startswith(OWN_PREFIX) and root.is_file(full):
                found.append(full)
        if len(found) > limits.FILES_MAX:
            raise BeyondLimitsError(f"{root.path} holds more than {limits.FILES_MAX} files")
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise BeyondLimitsError(f"a directory cannot be read: {error}") from error


def _files(
    root: Place, names: list[str], tensors: Sequence[StoredTensor]
) -> tuple[list[ManifestFile], dict[str, Sums]]:
    ranges: dict[str, list[Range]] = {name: [] for name in names}
    for tensor in tensors:
        for part in tensor.parts:
            if part.file in ranges:
                ranges[part.file].append((part.offset, part.offset + part.size_bytes))
    promised = {name: promised_crc32c(root.path / name) for name in names if not ranges[name]}
    read = {name: inside for name, inside in ranges.items() if promised.get(name) is None}
    sums = file_sums(root, read)
    found = []
    for name in names:
        if name not in sums:
            found.append(ManifestFile(name, root.size_of(name) or 0, f"{promised[name]:08x}"))
            continue
        of_file = sums[name]
        if of_file.crc32c is None:
            raise BeyondLimitsError(f"{name} cannot be read: {of_file.problem}")
        found.append(ManifestFile(name, of_file.size_bytes, f"{of_file.crc32c:08x}"))
    return found, sums


def _tensor(tensor: StoredTensor, sums: dict[str, Sums]) -> ManifestTensor:
    parts = []
    for part in tensor.parts:
        of_file = sums.get(part.file)
        crc = (
            None
            if of_file is None
            else of_file.ranges.get((part.offset, part.offset + part.size_bytes))
        )
        if crc is None:
            return ManifestTensor(_in_utf8(tensor.name), tensor.dtype, tensor.shape, ())
        parts.append(
            ManifestPart(
                part.file,
                part.offset,
                part.size_bytes,
                f"{crc:08x}",
                part.start,
                part.shape,
                part.strides,
            )
        )
    return ManifestTensor(_in_utf8(tensor.name), tensor.dtype, tensor.shape, tuple(parts))


def _in_utf8(name: str) -> str:
    """Halves of surrogate pairs, which a pickle may hold, are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def _with_sha256(root: Place, files: list[ManifestFile]) -> list[ManifestFile]:
    found = []
    sums = spread(files, lambda each: _sha256(root, each.name))
    for file, value in zip(files, sums, strict=True):
        if isinstance(value, ProblemError):
            raise value
        found.append(dataclasses.replace(file, sha256=value))
    return found


def _sha256(root: Place, name: str) -> str | ProblemError:
    found = hashlib.sha256()
    buffer = Buffer()
    try:
        with root.open(name) as reader:
            for at in range(0, reader.size_bytes, BLOCK_BYTES):
                length = min(BLOCK_BYTES, reader.size_bytes - at)
                found.update(buffer.read(reader, at, length).data)
    except ProblemError as error:
        return error
    return found.hexdigest()


# --- comparing ------------------------------------------------------------------------------


def compare(manifest: Manifest, root: Path) -> tuple[list[Finding], list[str]]:
    """What differs between a directory and its manifest; and the names of files that it does not
    have. Raises BeyondLimitsError.
    """
    place = Place(root)
    ranges: dict[str, list[Range]] = {file.name: [] for file in manifest.files}
    for tensor in manifest.tensors:
        for part in tensor.parts:
            ranges[part.file].append((part.offset, part.offset + part.size_bytes))
    sums = file_sums(place, ranges)
    found: list[Finding] = []
    bad: dict[str, list[str]] = {}
    for tensor in manifest.tensors:
        for part in tensor.parts:
            value = sums[part.file].ranges.get((part.offset, part.offset + part.size_bytes))
            if value is None or f"{value:08x}" != part.crc32c:
                bad.setdefault(part.file, []).append(tensor.name)
    for file in manifest.files:
        found += _differences(place, file, sums[file.name], bad.get(file.name, []))
    named = {file.name for file in manifest.files}
    others: list[str] = []
    if manifest.is_directory:
        others = [name for name in _names(place, root, None) if name not in named]
    return found + _sha256_differences(place, manifest, {f.file for f in found}), others


def _differences(place: Place, file: ManifestFile, sums: Sums, tensors: list[str]) -> list[Finding]:
    size = place.size_of(file.name)
    if size is None:
        message = (
            f"{file.name} is missing"
            if place.status(file.name) is None
            else (f"{file.name} is no regular file")
        )
        kind = "file-missing"
    elif size != file.size_bytes:
        message = f"{file.name} has {size} bytes, and had {file.size_bytes}"
        kind = "file-size"
    elif sums.crc32c is None:
        message, kind = f"{file.name}: {sums.problem}", "file-unreadable"
    elif f"{sums.crc32c:08x}" != file.crc32c:
        message = f"{file.name}: CRC32C is {sums.crc32c:08x}, and was {file.crc32c}"
        kind = "file-checksum"
    else:
        return []
    names = list(dict.fromkeys(tensors))
    if not names:
        return [Finding(kind, file.name, None, message)]
    return [Finding(kind, file.name, name, message) for name in names]


def _sha256_differences(place: Place, manifest: Manifest, known: set[str | None]) -> list[Finding]:
    """Of files in which nothing else differs."""
    files = [f for f in manifest.files if f.sha256 is not None and f.name not in known]
    found = []
    for file, value in zip(
        files, spread(files, lambda each: _sha256(place, each.name)), strict=True
    ):
        if isinstance(value, ProblemError):
            found.append(Finding("file-unreadable", file.name, None, f"{file.name}: {value}"))
        elif value != file.sha256:
            message = f"{file.name}: SHA-256 differs, and CRC32C does not: changed on purpose"
            found.append(Finding("file-sha256", file.name, None, message))
    return found

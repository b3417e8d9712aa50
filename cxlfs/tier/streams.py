"""Send a checkpoint down a pipe, and receive it from one: whole under its name, or not there.

Never: opens the pipe; decides who is at its other end.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.errors import NotSendableError, StreamError
from cxlfs.tier import archive
from cxlfs.tier.archive import Archive, Readable
from cxlfs.tier.manifest import Had, Manifest, decode, why_not_a_name
from cxlfs.tier.staging import RECEIVING_NAME, staged, staging
from cxlfs.tier.survey import Progress, no_progress, pieces, survey


class Writable(Protocol):
    """Where a stream goes: all that is given is taken."""

    def write(self, data: bytes, /) -> object: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """Sizes in bytes. ``left_out``: of files that the other side has."""

    manifest: Manifest
    files: int
    size_bytes: int
    left_out_files: int
    left_out_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """``kept``: by a receive that broke off; ``taken``: from other checkpoints of the directory."""

    path: Path
    files: int
    size_bytes: int
    received_bytes: int
    kept_files: int
    taken_files: int


def send(
    path: Path,
    stream: Writable,
    had: Iterable[Had] = (),
    *,
    judge: bool = True,
    progress: Progress = no_progress,
) -> Sent:
    """The checkpoint at ``path`` as a pax archive. What the other side has (``had``) is named, with
    a SHA-256, and not sent.

    Raises NotSendableError, also in the middle, where what was read is not what was announced;
    OSError, BrokenPipeError.
    """
    manifest = _without(survey(path, judge=judge, progress=progress), path, had)
    going = [file for file in manifest.files if file.base is None]
    total, done = sum(file.size_bytes for file in going), 0
    stream.write(archive.beginning(manifest))
    for file in going:
        stream.write(archive.member(manifest, file))
        for piece in pieces(path, file):
            stream.write(piece)
            done += len(piece)
            progress("sending", done, total)
        stream.write(archive.padding(file.size_bytes))
    stream.write(archive.ending())
    count = len(manifest.files) - len(going)
    return Sent(manifest, len(going), total, count, manifest.size_bytes - total)


def _without(manifest: Manifest, path: Path, had: Iterable[Had]) -> Manifest:
    """The same, naming what needs not be sent. The same name, size and CRC32C make a candidate;
    whether it is the same is told by SHA-256, which the other side compares.
    """
    bases: dict[tuple[str, int, int], str] = {}
    for each in had:
        key = (each.name, each.size_bytes, each.crc32c)
        if not each.staged:
            bases.setdefault(key, each.checkpoint)
        elif each.checkpoint == manifest.name:
            bases[key] = ""
    if not bases:
        return manifest
    files = []
    for file in manifest.files:
        base = bases.get((file.name, file.size_bytes, file.crc32c))
        if base is None:
            files.append(file)
            continue
        sha256 = hashlib.sha256()
        for piece in pieces(path, file):
            sha256.update(piece)
        files.append(dataclasses.replace(file, sha256=sha256.hexdigest(), base=base))
    return dataclasses.replace(manifest, files=tuple(files))


def receive(
    directory: Path,
    stream: Readable,
    *,
    name: str | None = None,
    replace: bool = False,
    progress: Progress = no_progress,
) -> Received:
    """What ``send`` wrote, as ``directory``/NAME: durable and compared byte by byte when this
    returns. Whatever it raises, no name was given; files that had arrived whole are kept in
    ``.cxlfs-receiving`` for the next try.

    Raises StreamError, CheckpointExistsError, NoSpaceError, BusyError, OSError.
    """
    source = Archive(stream)
    manifest = decode(source.manifest())
    name = manifest.name if name is None else name
    problem = why_not_a_name(name)
    if problem is not None:
        raise StreamError(f"the name {name[:80]!r}: {problem}", next_step="give another --name")
    source.directories(manifest)
    going = sum(file.size_bytes for file in manifest.files if file.base is None)
    done = kept = taken = 0
    with staging(directory, name) as place:
        place.begin(manifest, replace=replace)
        place.require_room(going)
        for file in manifest.files:
            if file.base is None:
                place.take(file, _counted(source.pieces(manifest, file), done, going, progress))
                done += file.size_bytes
            elif place.has(file):
                kept += 1
            else:
                if not file.base:
                    raise StreamError(
                        f"{file.name or name} was left out of the stream, and is not here any more",
                        next_step="send it again with a new inventory (cxlfs receive DIR --have)",
                    )
                place.take_from(file, directory / file.base / file.name)
                taken += 1
        source.end()
        path = place.publish(manifest, replace=replace)
    return Received(path, len(manifest.files), manifest.size_bytes, going, kept, taken)


def _counted(source: Iterable[bytes], done: int, total: int, progress: Progress) -> Iterator[bytes]:
    for piece in source:
        yield piece
        done += len(piece)
        progress("receiving", done, total)


def inventory(directory: Path, *, progress: Progress = no_progress) -> tuple[Had, ...]:
    """What a sender may leave out: what receives that broke off have kept, and the files of each
    checkpoint in the directory. On a cxlfs mount checksums are asked for,
    elsewhere every byte is read.

    Raises OSError.
    """
    found: list[Had] = []
    waiting = directory / RECEIVING_NAME
    if waiting.is_dir():
        for path in sorted(waiting.iterdir()):
            found += staged(directory, path.name)
    for path in sorted(directory.iterdir()):
        if path.name.startswith(OWN_PREFIX):
            continue
        try:
            manifest = survey(path, judge=False, progress=progress)
        except NotSendableError:  # being written, a link: nothing to rely on
            continue
        found += [Had(path.name, f.name, f.size_bytes, f.crc32c) for f in manifest.files]
    return tuple(found)

"""The file in which repairing saves what it will change: three parts, easy to read without cxlfs.

    line 1    JSON: ``schema``, ``source``, ``uuid``, ``media_size_bytes``, ``saved_at``,
              ``actions`` (text), ``ranges``: media offset, length and CRC32C of each, in order;
              ``generations``: of the newest root, lowest and highest for which it can be put back
    line 2    CRC32C of line 1 without its newline, eight hexadecimal digits
    the rest  the bytes of the ranges, one after the other

Never here: what to change.

Invariants
- The file is complete and durable before anything is changed, and is never overwritten.
- Everything is checked before the first byte is put back.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Final, NamedTuple

from cxlfs.durable import sync_directory
from cxlfs.errors import CxlfsError, MediaError, SavedCopyError
from cxlfs.format import roots, superblock
from cxlfs.media import Media
from cxlfs.native import crc32c
from cxlfs.units import format_time_ns
from cxlfs.verify.overlay import Range

SCHEMA: Final = "cxlfs.saved_copy/1"
_BEGINNING: Final = f'{{"schema": "{SCHEMA.partition("/")[0]}/'.encode()
_PIECE_BYTES = 64
_NAME_IT = "name the copy that --repair said it saved"


def write_saved_copy(
    media: Media,
    ranges: list[Range],
    actions: list[str],
    save_path: Path,
    *,
    roots_written: int,
) -> None:
    """Durable when it returns. ``roots_written``: how many the repair will write at most.

    Raises SavedCopyError when the file cannot be made.
    """
    generation = _generation_of(media)
    parts = [_read_tolerantly(media, offset, length) for offset, length in ranges]
    header = {
        "schema": SCHEMA,
        "source": media.path,
        "uuid": _uuid_of(media),
        "media_size_bytes": media.size_bytes,
        "saved_at": format_time_ns(time.time_ns()),
        "actions": actions,
        "generations": None if generation is None else [generation, generation + roots_written],
        "ranges": [
            {"media_offset": offset, "length": length, "crc32c": f"{crc32c(part):08x}"}
            for (offset, length), part in zip(ranges, parts, strict=True)
        ],
    }
    line = json.dumps(header).encode()
    try:
        with save_path.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(line + b"\n" + f"{crc32c(line):08x}\n".encode())
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(save_path.resolve().parent)
    except OSError as error:
        raise SavedCopyError(f"cannot write {save_path}: {error.strerror}") from error


def restore_saved_copy(media: Media, save_path: Path) -> int:
    """Put everything back; returns how many bytes. Durable when it returns.

    Raises SavedCopyError (nothing was changed), MediaError.
    """
    header, data = _load(save_path)
    position = 0
    for _, length, crc in header.ranges:
        part = data[position : position + length]
        if len(part) != length or crc32c(part) != crc:
            raise SavedCopyError(f"{save_path} is cut short or damaged", next_step=_NAME_IT)
        position += length
    if header.size_bytes != media.size_bytes or _uuid_of(media) not in (header.uuid, None):
        raise SavedCopyError(f"{save_path} was saved from another store", next_step=_NAME_IT)
    generation = _generation_of(media)
    if header.generations is not None and generation is not None:
        lowest, highest = header.generations
        if not lowest <= generation <= highest:
            raise SavedCopyError(
                f"the store has been written since it was repaired: its root is {generation}, "
                f"and {save_path} belongs to roots {lowest} to {highest}",
                next_step="leave the store as it is: putting back old metadata would lose what was "
                "committed since",
            )
    position = 0
    for offset, length, _ in header.ranges:
        media.store(offset, data[position : position + length])
        media.write_back(offset, length)
        position += length
    media.fence()
    return position


class _Header(NamedTuple):
    uuid: str | None
    size_bytes: int
    ranges: list[tuple[int, int, int]]
    generations: tuple[int, int] | None


def _load(save_path: Path) -> tuple[_Header, memoryview]:
    """The header and the bytes behind it. Raises SavedCopyError."""
    try:
        with save_path.open("rb") as file:
            content = file.read(len(_BEGINNING))
            if content == _BEGINNING:
                content += file.read()
    except OSError as error:
        raise SavedCopyError(
            f"cannot read {save_path}: {error.strerror}", next_step=_NAME_IT
        ) from error
    line, _, rest = content.partition(b"\n")
    crc, _, _ = rest.partition(b"\n")
    if crc != f"{crc32c(line):08x}".encode():
        raise SavedCopyError(f"{save_path} is not a saved copy, or is damaged", next_step=_NAME_IT)
    header = json.loads(line)
    generations = header.get("generations")
    if header["schema"] != SCHEMA:
        raise SavedCopyError(
            f"{save_path} has the unknown format {header['schema']}",
            next_step="use a newer cxlfs",
        )
    ranges = [(r["media_offset"], r["length"], int(r["crc32c"], 16)) for r in header["ranges"]]
    data = memoryview(content)[len(line) + len(crc) + 2 :]
    span = None if generations is None else (int(generations[0]), int(generations[1]))
    return _Header(header["uuid"], header["media_size_bytes"], ranges, span), data


def _uuid_of(media: Media) -> str | None:
    """Of the store on the media; None when its superblock cannot be read."""
    try:
        block, _ = superblock.choose(media)
    except CxlfsError:
        return None
    return str(uuid.UUID(bytes=block.uuid))


def _generation_of(media: Media) -> int | None:
    """Of the newest root; None when there is none."""
    try:
        block, _ = superblock.choose(media)
    except CxlfsError:
        return None
    found = roots.candidates(roots.read_slots(media, block))
    return found[0].generation if found else None


def _read_tolerantly(media: Media, offset: int, length: int) -> bytes:
    """What cannot be read is saved as zeros: it is lost already."""
    try:
        return media.read(offset, length)
    except MediaError:
        pieces = []
    for start in range(offset, offset + length, _PIECE_BYTES):
        size = min(_PIECE_BYTES, offset + length - start)
        try:
            pieces.append(media.read(start, size))
        except MediaError:
            pieces.append(bytes(size))
    return b"".join(pieces)

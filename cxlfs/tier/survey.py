"""A checkpoint as it lies in a directory, for whoever takes it elsewhere: what it consists of, and
its bytes, which are compared with that as they are read.

Never: changes anything; takes along a link, a device, or what a place keeps for itself.

Invariants
- What is read of a file is what its manifest says, or an error: one that changes meanwhile is never
  taken for whole.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from cxlfs.checkpoint import State, inspect
from cxlfs.checkpoint.ages import STATE_XATTR, attribute
from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.durable import READ_BYTES, opened_file, promised_crc32c, size_and_crc32c
from cxlfs.errors import NotSendableError
from cxlfs.native import crc32c
from cxlfs.tier.manifest import FILES_MAX, File, Manifest, why_not_a_name, why_not_a_path

Progress = Callable[[str, int, int], None]
"""What is going on, and how many bytes of how many are behind."""


def no_progress(_activity: str, _done: int, _total: int) -> None:
    """Nobody watches."""


def survey(path: Path, *, judge: bool = True, progress: Progress = no_progress) -> Manifest:
    """What a checkpoint consists of. On a cxlfs mount checksums are asked for, elsewhere every byte
    is read. ``judge``: refuse what is not complete, as far as its format is known.

    Raises NotSendableError, OSError.
    """
    problem = why_not_a_name(path.name)
    if problem is not None:
        raise NotSendableError(f"{path}: {problem}")
    if judge:
        _judge(path)
    is_directory, directories, found = _walk(path)
    total = sum(status.st_size for _, status in found)
    files, done = [], 0
    for name, status in found:
        files.append(_measured(path / name, name, status))
        done += status.st_size
        progress("checksums", done, total)
    return Manifest(path.name, is_directory, tuple(directories), tuple(files))


def pieces(path: Path, file: File, size_bytes: int = READ_BYTES) -> Iterator[bytes]:
    """Every byte of a file of the checkpoint at ``path``, some at a time.

    Raises NotSendableError behind the last one, where they are not what was surveyed; OSError.
    """
    at = found = 0
    where = path / file.name
    with opened_file(where, NotSendableError) as (descriptor, _):
        while piece := os.pread(descriptor, min(size_bytes, file.size_bytes + 1 - at), at):
            found = crc32c(piece, found)
            at += len(piece)
            if at > file.size_bytes:
                break
            yield piece
    if (at, found) != (file.size_bytes, file.crc32c):
        raise NotSendableError(
            f"{where}: it changed while it was read (CRC32C {found:08x}, not {file.crc32c:08x})"
        )


def _judge(path: Path) -> None:
    """A checkpoint of which something is missing replaces none that is whole elsewhere."""
    found = inspect(path)
    if found is not None and found.state in {State.INCOMPLETE, State.DAMAGED}:
        raise NotSendableError(f"{path} is {found.words}")


_Found = list[tuple[str, os.stat_result]]


def _walk(path: Path) -> tuple[bool, list[str], _Found]:
    """Whether it is a directory; directories, parents first, and files, by names below it."""
    status = path.lstat()
    if stat.S_ISREG(status.st_mode):
        return False, [], [("", status)]
    if not stat.S_ISDIR(status.st_mode):
        raise NotSendableError(f"{path}: neither a file nor a directory")
    directories: list[str] = []
    files: _Found = []
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        with os.scandir(path / inside) as entries:
            for entry in entries:
                if entry.name.startswith(OWN_PREFIX):
                    continue
                name = f"{inside}/{entry.name}" if inside else entry.name
                problem = why_not_a_path(name)
                if problem is not None:
                    raise NotSendableError(f"{entry.path}: {problem}")
                if entry.is_dir(follow_symlinks=False):
                    directories.append(name)
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    files.append((name, entry.stat(follow_symlinks=False)))
                else:
                    raise NotSendableError(f"{entry.path}: neither a file nor a directory")
                if len(files) + len(directories) > FILES_MAX:
                    raise NotSendableError(f"{path}: more than {FILES_MAX} names")
    return True, sorted(directories), sorted(files, key=lambda each: each[0])


def _measured(path: Path, name: str, status: os.stat_result) -> File:
    state = attribute(path, STATE_XATTR)
    if state not in {None, State.COMPLETE.value}:
        raise NotSendableError(f"{path} is {state}")
    size, found = status.st_size, promised_crc32c(path)
    if found is None:
        if state is not None:
            raise NotSendableError(f"{path} is being written")
        with opened_file(path, NotSendableError) as (descriptor, _):
            size, found = size_and_crc32c(descriptor)
    return File(name, size, found, max(0, status.st_mtime_ns))

"""Which of two files is older, where a format writes one of them last.

On a cxlfs mount by the number of the commit that published each (``user.cxlfs.commit``), elsewhere
by the time of the last write. Never here: times of the wall clock as numbers for people.

A copy of a directory writes its files in any order, and the one that should be last may come first.
It makes all of them anew, though: a file that did not exist when the last one was written is a
copy's, and proves nothing. On a cxlfs mount inode numbers grow and are never used again; elsewhere
the time of birth says so, where the file system keeps one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from cxlfs.checkpoint.place import Place

STATE_XATTR = "user.cxlfs.state"
COMMIT_XATTR = "user.cxlfs.commit"
_AT_FDCWD = -100
_STATX_BTIME = 0x800
_NANOSECONDS = 1_000_000_000


class Age(NamedTuple):
    """Two moments on one scale; ``born`` None: not known."""

    born: int | None
    written: int
    in_commits: bool


def attribute(path: Path, name: str) -> str | None:
    """What a cxlfs mount says of a file; None elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        return os.getxattr(path, name).decode("ascii", "replace")
    return None


def commit_of(path: Path) -> int | None:
    """Number of the commit that published a file; None: not on a cxlfs mount, or never."""
    text = attribute(path, COMMIT_XATTR)
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def age_of(path: Path) -> Age | None:
    """None: it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    commit = commit_of(path)
    if commit is not None:
        return Age(status.st_ino, commit, in_commits=True)
    return Age(birth_ns(path), status.st_mtime_ns, in_commits=False)


def written_after(place: Place, last: str, names: list[str]) -> str | None:
    """The first of ``names`` that was there when ``last`` was written, and was written to later.

    None: there is none, or nothing is known.
    """
    end = age_of(place.path / last)
    if end is None:
        return None
    for name in names:
        age = age_of(place.path / name)
        if age is None or age.in_commits != end.in_commits or age.written <= end.written:
            continue
        if not _is_newborn(age, end):
            return name
    return None


class Mixed(NamedTuple):
    """One file that was written before the last one, and one that was written after it. Not
    ``is_proven``: the later one was made then, as copies are, and by savers that rename.
    """

    older: str
    newer: str
    is_proven: bool


def mixed(place: Place, last: str, names: list[str]) -> Mixed | None:
    """Files of two saves: one over an older one was broken off. None: all lie on one side of
    ``last``, or nothing is known. Only on a cxlfs mount is one said that is not proven: elsewhere
    every copy would look so.
    """
    end = age_of(place.path / last)
    if end is None:
        return None
    ages = {name: age_of(place.path / name) for name in names}
    older = [n for n, a in ages.items() if a is not None and a.written <= end.written]
    newer = written_after(place, last, names)
    if older and newer is not None:
        return Mixed(older[0], newer, is_proven=True)
    later = [n for n, a in ages.items() if a is not None and a.written > end.written]
    if older and later and end.in_commits:
        return Mixed(older[0], later[0], is_proven=False)
    return None


def _is_newborn(age: Age, end: Age) -> bool:
    """It was made after the last file had been written: by a copy."""
    if age.born is None:
        return False
    if age.in_commits:  # numbers of inodes: compared with each other
        return end.born is not None and age.born > end.born
    return age.born >= end.written  # the kernel's clock ticks every few milliseconds


def birth_ns(path: Path) -> int | None:
    """When a file was made; None: it is not known. statx(2), Linux 4.11, glibc 2.28."""
    statx = _statx()
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(256)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer) != 0:
        return None
    raw = buffer.raw
    if not int.from_bytes(raw[:4], "little") & _STATX_BTIME:
        return None
    seconds = int.from_bytes(raw[80:88], "little", signed=True)
    return seconds * _NANOSECONDS + int.from_bytes(raw[88:92], "little")


@functools.cache
def _statx() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
    function.argtypes = [
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_char_p,
    ]
    return function

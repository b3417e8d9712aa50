"""Rights of a file of the whole machine, widened while some test process needs that; and of a
thread, which gives one up.

Several processes test side by side: the first one widens them, the last one puts them back.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

CAP_SYS_NICE = 23
_CAPABILITIES_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def drop_capability(number: int) -> None:
    """Of the calling thread, and of those that it starts: capset(2). Raises OSError."""
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    if _libc.capget(header, data) == 0:
        words = list(struct.unpack("=6I", data.raw))
        for kind in range(3):  # effective, permitted, inheritable
            words[number // 32 * 3 + kind] &= ~(1 << number % 32)
        if _libc.capset(header, struct.pack("=6I", *words)) == 0:
            return
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def widened(path: Path, mode: int, folder: Path) -> Iterator[None]:
    """``path`` has the bits of ``mode`` as well. ``folder``: the same for all who do that; two
    locks lie there: one is held for a moment by who changes anything, the other is shared by all
    who need it so.
    """
    with (
        (folder / f"{path.name}.changing").open("a") as changing,
        (folder / f"{path.name}.needing").open("a+") as needing,
    ):
        with _locked(changing):
            if _nobody_else(needing):
                before = stat.S_IMODE(path.stat().st_mode)
                needing.truncate(0)
                needing.write(f"{before:o}")
                needing.flush()
                path.chmod(before | mode)
            fcntl.flock(needing, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with _locked(changing):
                fcntl.flock(needing, fcntl.LOCK_UN)
                if _nobody_else(needing):
                    needing.seek(0)
                    path.chmod(int(needing.read(), 8))


@contextlib.contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _nobody_else(needing: IO[str]) -> bool:
    try:
        fcntl.flock(needing, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

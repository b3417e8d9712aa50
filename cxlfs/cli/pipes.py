"""Where streams go, and come from: standard output and input, and files named with --output.

Never here: what a stream consists of (``tier``).

Invariants
- All that is written is taken, and a read that gives nothing is the end: also where another process
  has made the pipe non-blocking, and where Python does not buffer (PYTHONUNBUFFERED).
- A file gets its name when all of it is durable; until then what had the name stays.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.durable import sync_directory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_BUFFER_BYTES = 1 << 16
_SPECIAL = ("/dev/", "/proc/")


def standard_output() -> io.BufferedWriter:
    """Raises OSError as it is written to."""
    return io.BufferedWriter(_Patient(1), _BUFFER_BYTES)


def standard_input() -> io.BufferedReader:
    """Raises OSError as it is read."""
    return io.BufferedReader(_Patient(0), _BUFFER_BYTES)


class _Patient(io.RawIOBase):
    """A descriptor of somebody else; where it says EAGAIN it is waited for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while True:
            try:
                return os.readv(self._descriptor, [buffer])
            except BlockingIOError:
                self._wait(select.POLLIN)

    def write(self, data: ReadableBuffer, /) -> int:
        while True:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._descriptor, event)
        poll.poll()


@contextlib.contextmanager
def opened_output(path: Path) -> Iterator[BinaryIO]:
    """What is neither a regular file nor a new name (a pipe, /dev/fd/3) is written to as it is.

    Raises OSError.
    """
    if os.fspath(path.absolute()).startswith(_SPECIAL) or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
        return
    target = path.resolve()
    beside = target.with_name(f"{OWN_PREFIX}sending-{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(target.parent)

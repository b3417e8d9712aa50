"""A checkpoint's directory or file, read with POSIX calls and within limits.

Never here: what the bytes mean. Nothing is written; devices, pipes and sockets are never opened,
and no name leads out of the directory but a symbolic link that somebody put there (the cache of
downloaded models is made of them).

Invariants
- A read beyond the end is an :class:`IncompleteError`, one that the system refuses (EIO: a cxlfs
  mount verifies what it reads) a :class:`DamagedError` that names the bytes.
- The sum of what is read as structure has a limit, shared by all files of one checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NARROWING_BYTES = (64 << 10, 4 << 10)
"""What a store has a checksum for, and a page."""
_MEDIA_ERRNOS = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})


class UnreadableRangeError(DamagedError):
    """The system refused to read ``[offset, offset + length)`` of ``name``."""

    def __init__(self, name: str, offset: int, length: int) -> None:
        super().__init__(f"bytes {offset} to {offset + length} of {name or 'it'} cannot be read")
        self.name = name
        self.offset = offset
        self.length = length


@dataclasses.dataclass(slots=True)
class Budget:
    """Bytes of structure that may still be read."""

    left_bytes: int = limits.METADATA_BYTES_MAX

    def take(self, size_bytes: int) -> None:
        """Raises BeyondLimitsError."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise BeyondLimitsError("its headers are larger than what is read of a checkpoint")


class Reader:
    """An open regular file. ``name`` is what messages call it."""

    def __init__(self, descriptor: int, name: str, size_bytes: int, budget: Budget) -> None:
        self._descriptor = descriptor
        self.name = name
        self.size_bytes = size_bytes
        self._budget = budget

    @property
    def descriptor(self) -> int:
        """Open for reading as long as the reader is."""
        return self._descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes of structure.

        Raises IncompleteError, DamagedError, BeyondLimitsError.
        """
        if length > limits.HEADER_BYTES_MAX:
            raise BeyondLimitsError(f"a header of {length} bytes is larger than what is read")
        self._budget.take(length)
        return self.read_data(offset, length)

    def read_data(self, offset: int, length: int) -> bytes:
        """As :meth:`read`, of tensors: not counted, for callers that read piece by piece."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise IncompleteError(
                f"it ends at byte {self.size_bytes}, {offset + length} are needed"
            )
        pieces = []
        at, end = offset, offset + length
        while at < end:
            try:
                piece = os.pread(self._descriptor, min(end - at, 1 << 30), at)
            except OSError as error:
                first, length = self._narrowed(at, end - at)
                raise _problem(error, self.name, first, length) from error
            if not piece:
                raise IncompleteError(f"it ends at byte {at}, {end} are needed")
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, target: memoryview) -> None:
        """As :meth:`read_data`, into memory of the caller's: all of ``target``."""
        at, end = offset, offset + len(target)
        if offset < 0 or end > self.size_bytes:
            raise IncompleteError(f"it ends at byte {self.size_bytes}, {end} are needed")
        while at < end:
            try:
                count = os.preadv(self._descriptor, [target[at - offset :]], at)
            except OSError as error:
                first, length = self._narrowed(at, end - at)
                raise _problem(error, self.name, first, length) from error
            if not count:
                raise IncompleteError(f"it ends at byte {at}, {end} are needed")
            at += count

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """``[first, last)`` of a range, and whether that is a hole: zeros that nobody wrote."""
        at = begin
        while at < end:
            data = self._seek(at, os.SEEK_DATA, end)
            if data > at:
                yield at, data, True
            hole = self._seek(data, os.SEEK_HOLE, end) if data < end else end
            if hole > data:
                yield data, hole, False
            at = max(hole, at + 1)

    def _seek(self, at: int, whence: int, end: int) -> int:
        try:
            return min(os.lseek(self._descriptor, at, whence), end)
        except OSError as error:
            # ENXIO: a hole up to the end. A file system that knows no holes has data everywhere.
            is_last_hole = error.errno == errno.ENXIO
            return end if is_last_hole or whence == os.SEEK_HOLE else at

    def _narrowed(self, offset: int, length: int) -> tuple[int, int]:
        """The first bytes of a range that are refused: one bad page fails a whole request."""
        for step in _NARROWING_BYTES:
            for at in range(offset, offset + length, step):
                try:
                    os.pread(self._descriptor, min(step, offset + length - at), at)
                except OSError:
                    offset, length = at, min(step, offset + length - at)
                    break
        return offset, length

    def head(self, length: int) -> bytes:
        """The first bytes; fewer where it is shorter."""
        return self.read(0, min(length, self.size_bytes))

    def tail(self, length: int) -> bytes:
        """The last bytes; fewer where it is shorter."""
        length = min(length, self.size_bytes)
        return self.read(self.size_bytes - length, length)


def _problem(error: OSError, name: str, offset: int, length: int) -> Exception:
    if error.errno in _MEDIA_ERRNOS:
        return UnreadableRangeError(name, offset, length)
    return BeyondLimitsError(f"{name or 'it'} cannot be read: {error.strerror}")


class Place:
    """A path, the names in it, and the files below it by relative name ("" is the path itself)."""

    def __init__(self, path: Path, budget: Budget | None = None, prefix: str = "") -> None:
        """``prefix``: this place is a part of a checkpoint, and messages name files from there."""
        self.path = path
        self.prefix = prefix
        self.budget = budget if budget is not None else Budget()
        self._names: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        return self.path.name

    def is_directory(self, name: str = "") -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def is_file(self, name: str = "") -> bool:
        found = self.status(name)
        return found is not None and stat.S_ISREG(found.st_mode)

    def status(self, name: str = "") -> os.stat_result | None:
        """None: nothing is there. Raises BeyondLimitsError where it cannot be looked at."""
        try:
            return self._path_of(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise BeyondLimitsError(f"{name or self.name} cannot be looked at: {error}") from error

    def size_of(self, name: str = "") -> int | None:
        """Bytes of a regular file; None: it is missing, or something else."""
        found = self.status(name)
        return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None

    def names(self) -> tuple[str, ...]:
        """What the directory holds, sorted; nothing for a file. Raises BeyondLimitsError."""
        if self._names is None:
            self._names = tuple(sorted(self._listed()))
        return self._names

    def _listed(self) -> list[str]:
        found = []
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    found.append(entry.name)
                    if len(found) > limits.ENTRIES_MAX:
                        raise BeyondLimitsError(
                            f"{self.path} holds more than {limits.ENTRIES_MAX} names"
                        )
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise BeyondLimitsError(f"{self.path} cannot be listed: {error.strerror}") from error
        return found

    def below(self, name: str) -> Place:
        """A directory in it, as a part of the same checkpoint."""
        return Place(self._path_of(name), self.budget, self.full_name(name) + "/")

    def full_name(self, name: str) -> str:
        """As the checkpoint's own path sees it."""
        return self.prefix + name

    @contextlib.contextmanager
    def open(self, name: str = "") -> Iterator[Reader]:
        """Read a file. Raises IncompleteError: it is missing; DamagedError: it is no file."""
        path, full_name = self._path_of(name), self.full_name(name)
        found = self.status(name)
        if found is None:
            raise IncompleteError(f"{full_name or self.name} is missing")
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{full_name or self.name} is not a regular file")
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError as error:
            raise _problem(error, full_name, 0, found.st_size) from error
        try:
            opened = os.fstat(descriptor)
            if not stat.S_ISREG(opened.st_mode):
                raise DamagedError(f"{full_name or self.name} is not a regular file")
            yield Reader(descriptor, full_name, opened.st_size, self.budget)
        finally:
            os.close(descriptor)

    def _path_of(self, name: str) -> Path:
        if not name:
            return self.path
        parts = name.split("/")
        if len(name) > limits.NAME_CHARACTERS_MAX or "\0" in name or name.startswith("/"):
            raise DamagedError("it names a file that cannot be")
        if any(part in ("", ".", "..") for part in parts):
            raise DamagedError(f"it names a file outside of itself: {name[:80]}")
        return self.path.joinpath(*parts)

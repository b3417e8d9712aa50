"""Where a checkpoint that comes from elsewhere lies until it is whole, and how it gets its name.

    DIR/.cxlfs-receiving/NAME/tree       what is there so far: each file verified and durable
    DIR/.cxlfs-receiving/NAME/partial-N  files that are on their way
    DIR/NAME                             one rename, of all of it at once

Never: takes a file for whole because it has its name; replaces a checkpoint unless that was asked.

Invariants
- A file gets its name in the tree when its bytes were compared with its manifest and synced. After
  a crash the bytes are compared again.
- One process at a time stages a name.
- What stays of a receive that broke off is kept for the next one, and is no checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from cxlfs.checkpoint.catalogue import OWN_PREFIX
from cxlfs.durable import (
    READ_BYTES,
    opened_file,
    promised_crc32c,
    size_and_crc32c,
    sync_directory,
)
from cxlfs.errors import (
    BusyError,
    CheckpointExistsError,
    CxlfsError,
    NoSpaceError,
    NotSendableError,
    StreamError,
)
from cxlfs.native import crc32c
from cxlfs.tier.manifest import File, Had, Manifest, why_not_a_path

RECEIVING_NAME = f"{OWN_PREFIX}receiving"
_TRIES = 100
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def staging(directory: Path, name: str) -> Iterator[Staging]:
    """That of the checkpoint ``name`` in ``directory``, for this process alone.

    Raises BusyError, NoSpaceError (whatever fails inside for want of room), OSError.
    """
    place = directory / RECEIVING_NAME / name
    with _full_is_an_error(directory):
        descriptor = _locked(place)
        try:
            yield Staging(directory, name)
        finally:
            for empty in (place, place.parent):  # what is left of it is kept, and so is its place
                with contextlib.suppress(OSError):
                    empty.rmdir()
            os.close(descriptor)


def _locked(place: Path) -> int:
    """Its descriptor. Others remove it, and what it lies in, when they have ended."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            for each in (place.parent, place):
                each.mkdir(exist_ok=True)
                if each.is_symlink():
                    raise CxlfsError(f"{each} is a symbolic link", next_step="remove it")
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            break
        place.parent.parent.stat()
    else:
        raise _busy(place)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(descriptor), place.stat())
    except (BlockingIOError, FileNotFoundError):
        is_ours = False  # or whoever had it has just removed it
    if not is_ours:
        os.close(descriptor)
        raise _busy(place)
    return descriptor


def _busy(place: Path) -> BusyError:
    return BusyError(
        f"{place.name} is being received in {place.parent.parent} by another process",
        next_step="wait until it has ended",
    )


@contextlib.contextmanager
def _full_is_an_error(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise NoSpaceError(
            f"{directory} is full; no name was given, and what had arrived whole is kept",
            next_step="delete checkpoints that are no longer needed, and receive it again",
        ) from error


class Staging:
    """Made by ``staging``. All methods raise OSError."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._place = directory / RECEIVING_NAME / name
        self._tree = self._place / "tree"

    def begin(self, manifest: Manifest, *, replace: bool) -> None:
        """Room for the manifest's directories; what lies there and is no part of it goes.

        Raises CheckpointExistsError, NoSpaceError.
        """
        if not replace:
            self._refuse_existing()
        for path in self._place.glob("partial*"):
            _remove(path)
        if manifest.is_directory != self._tree.is_dir():
            _remove(self._tree)
        if not manifest.is_directory:
            return
        self._tree.mkdir(exist_ok=True)
        directories, files = set(manifest.directories), {file.name for file in manifest.files}
        for name in list(_names_below(self._tree)):
            path = self._tree / name
            is_directory = path.is_dir() and not path.is_symlink()
            if name not in (directories if is_directory else files):
                _remove(path)
        for name in manifest.directories:
            (self._tree / name).mkdir(exist_ok=True)

    def require_room(self, size_bytes: int) -> None:
        """Raises NoSpaceError, before anything is written that cannot fit."""
        found = os.statvfs(self._place)
        available = found.f_bavail * found.f_frsize
        if size_bytes > available:
            raise NoSpaceError(
                f"{self._directory} has room for {available} bytes, and {size_bytes} are to come",
                needed_bytes=size_bytes,
                available_bytes=available,
            )

    def has(self, file: File) -> bool:
        """It lies there, byte for byte."""
        try:
            with opened_file(self._tree / file.name, StreamError) as (descriptor, size_bytes):
                if size_bytes != file.size_bytes:
                    return False
                return _sums(descriptor, file) == (file.crc32c, file.sha256)
        except (FileNotFoundError, NotADirectoryError, StreamError):
            return False

    def take(self, file: File, pieces: Iterable[bytes]) -> None:
        """It has its place in the tree when this returns: compared, and durable.

        Raises StreamError where the bytes are not those of the manifest.
        """
        found = size = 0
        sha256 = hashlib.sha256()
        partial = self._partial()
        with partial.open("wb", buffering=0) as opened:
            for piece in pieces:
                found = crc32c(piece, found)
                size += len(piece)
                if file.sha256:
                    sha256.update(piece)
                _write(opened.fileno(), piece)
            if (size, found) != (file.size_bytes, file.crc32c):
                raise StreamError(
                    f"{file.name or self._name}: its bytes are not what was announced"
                )
            if file.sha256 and sha256.hexdigest() != file.sha256:
                raise StreamError(f"{file.name or self._name}: its SHA-256 is another one")
            self._settle(partial, opened.fileno(), file)

    def take_from(self, file: File, source: Path) -> None:
        """A copy of what lies in ``source`` (shared blocks where the file system has them), read
        and compared.

        Raises StreamError.
        """
        refusal = StreamError(
            f"{source} is not the {file.name or self._name} that was left out of the stream",
            next_step="send it again without --base, or with a new one",
        )
        partial = self._partial()
        with partial.open("w+b", buffering=0) as opened:
            try:
                with opened_file(source, StreamError) as (descriptor, _):
                    _copy(descriptor, opened.fileno(), file.size_bytes)
            except (FileNotFoundError, NotADirectoryError, StreamError):
                raise refusal from None
            if _sums(opened.fileno(), file) != (file.crc32c, file.sha256):
                raise refusal
            self._settle(partial, opened.fileno(), file)

    def _partial(self) -> Path:
        """Where a file lies on its way: one for each thread."""
        return self._place / f"partial-{threading.get_ident()}"

    def _settle(self, partial: Path, descriptor: int, file: File) -> None:
        os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
        os.fsync(descriptor)
        promised = promised_crc32c(partial)
        if promised is not None and promised != file.crc32c:
            raise StreamError(f"{partial}: CRC32C {promised:08x} was stored")
        partial.replace(self._tree / file.name)

    def publish(self, manifest: Manifest, *, replace: bool) -> Path:
        """All of it gets the checkpoint's name, in one step; durable on return. What had the name
        before goes, where ``replace`` is asked for.

        Raises CheckpointExistsError.
        """
        target = self._directory / self._name
        for name in reversed(manifest.directories):
            sync_directory(self._tree / name)
        if manifest.is_directory:
            sync_directory(self._tree)
        sync_directory(self._place)
        try:
            _rename(self._tree, target, _NOREPLACE)
        except FileExistsError:
            if not replace:
                self._refuse_existing()
                raise
            _rename(self._tree, target, _EXCHANGE)
        sync_directory(self._directory)
        _remove(self._tree)
        return target

    def _refuse_existing(self) -> None:
        target = self._directory / self._name
        if os.path.lexists(target):
            raise CheckpointExistsError(f"{target} is there")


def staged(directory: Path, name: str) -> Iterator[Had]:
    """What a receive of ``name`` that broke off has kept. Raises OSError."""
    tree = directory / RECEIVING_NAME / name / "tree"
    names = [""] if tree.is_file() else _names_below(tree)
    for each in names:
        with (
            contextlib.suppress(NotSendableError, IsADirectoryError),
            opened_file(tree / each, NotSendableError) as (descriptor, _),
        ):
            size, found = size_and_crc32c(descriptor)
            yield Had(name, each, size, found, staged=True)


def _names_below(tree: Path) -> Iterator[str]:
    """Files and directories, those below one behind it."""
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        try:
            entries = sorted(os.scandir(tree / inside), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            name = f"{inside}/{entry.name}" if inside else entry.name
            if why_not_a_path(name) is None:
                yield name
            if entry.is_dir(follow_symlinks=False):
                waiting.append(name)


def _sums(descriptor: int, file: File) -> tuple[int, str]:
    """CRC32C, and SHA-256 where the manifest has one, of as many bytes as it says."""
    found = at = 0
    sha256 = hashlib.sha256()
    while piece := os.pread(descriptor, READ_BYTES, at):
        found = crc32c(piece, found)
        if file.sha256:
            sha256.update(piece)
        at += len(piece)
    return found, sha256.hexdigest() if file.sha256 and at == file.size_bytes else ""


def _copy(source: int, target: int, size_bytes: int) -> None:
    at = 0
    try:
        while at < size_bytes:
            copied = os.copy_file_range(source, target, size_bytes - at, at, at)
            if not copied:
                return
            at += copied
    except OSError as error:
        if error.errno not in {errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:
            raise
    os.lseek(target, at, os.SEEK_SET)
    while at < size_bytes and (piece := os.pread(source, READ_BYTES, at)):
        _write(target, piece)
        at += len(piece)


def _write(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _remove(path: Path) -> None:
    """A file, a link, or a directory with all below it; or nothing."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def _rename(source: Path, target: Path, flags: int) -> None:
    """renameat2(2). Raises FileExistsError, CxlfsError (not there), OSError."""
    function = _renameat2()
    number = errno.ENOSYS
    if function is not None:
        if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
            return
        number = ctypes.get_errno()
    if number in {errno.ENOSYS, errno.EINVAL}:
        raise CxlfsError(
            f"{target.parent}: its file system cannot rename without replacing",
            next_step="receive it on another one (cxlfs, ext4, xfs, btrfs, tmpfs), and copy it",
        )
    raise OSError(number, os.strerror(number), str(target))


@functools.cache
def _renameat2() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return None
    path = ctypes.c_char_p
    function.argtypes = [ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint]
    return function

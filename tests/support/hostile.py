"""What must hold for every image, however hostile: clear errors, nothing changed by reading, and
verify has something to say of what cannot be opened.

Never here: making images (``fuzz``), processes, limits (``scripts/fuzz-images``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

import numpy as np

from cxlfs.errors import CxlfsError, OutOfMemoryError
from cxlfs.media import MemoryMedia
from cxlfs.store import Store, StoreOptions
from cxlfs.store.namespace import FileKind
from cxlfs.verify import inspect, run_passes

DUMPS = (
    inspect.superblock_copies,
    inspect.root_slots,
    inspect.segment_headers,
    inspect.journal_records,
)
"""What there is to see of any image."""


class Outcome(NamedTuple):
    """How an image was taken: ``opened``; ids of what verify found."""

    opened: bool
    findings: tuple[str, ...]
    wrote: bool


class Failure(AssertionError):  # noqa: N818  it is a kind of assertion
    """Something that must never happen."""


@functools.lru_cache(maxsize=1)
def _media(size_bytes: int) -> MemoryMedia:
    """The same memory again and again: fresh pages would cost more than the rest."""
    return MemoryMedia(size_bytes)


def exercise(image: bytes, index: int) -> Outcome:
    """Open, read and verify an image; every third one is also dumped, every third written to.

    Raises what must never be raised.
    """
    if not image:
        return Outcome(opened=False, findings=(), wrote=False)
    media = _media(len(image))
    memory = np.frombuffer(media.unguarded_memory(), dtype=np.uint8)
    content = np.frombuffer(image, dtype=np.uint8)
    memory[:] = content
    opened = _read_everything(media)
    findings = tuple(finding.id for finding in run_passes(media, structure_only=False))
    if index % 3 == 0:
        _dump(media)
    if not np.array_equal(memory, content):
        raise Failure("reading changed the image")
    if not opened and not findings:
        raise Failure("the store cannot be opened, and verify finds nothing")
    wrote = index % 3 == 1 and opened and _write_something(media, Random(index))
    return Outcome(opened, findings, wrote)


def _allowed(error: CxlfsError) -> None:
    """Every error of the tree is a clear answer, but not this one: the images are small."""
    if isinstance(error, OutOfMemoryError):
        raise Failure("an image of 2 MiB asked for too much memory") from error


def _read_everything(media: MemoryMedia) -> bool:
    try:
        store = Store.open(media, StoreOptions(read_only=True))
    except CxlfsError as error:
        _allowed(error)
        return False
    try:
        store.statfs()
        store.statistics()
        for inode in list(store.namespace.inodes.values()):
            inode.attributes()
            store.path_of(inode.ino)
            store.list_xattrs(inode.ino)
            if inode.kind is FileKind.FILE:
                _read_file(store, inode.ino)
            elif inode.kind is FileKind.DIRECTORY:
                _list_directory(store, inode.ino)
        list(store.list_checkpoints())
    finally:
        store.close()
    return True


def _read_file(store: Store, ino: int) -> None:
    """Both ends and what is allocated: a hostile file may claim 2^56 bytes."""
    handle = store.open_file(ino, os.O_RDONLY)
    size = store.get_attributes(ino).size
    for offset in sorted({0, 4096, size // 2, max(size - 4096, 0)}):
        try:
            store.read(handle, offset, 65536)
        except CxlfsError as error:
            _allowed(error)
    store.release(handle)


def _list_directory(store: Store, ino: int) -> None:
    handle = store.open_directory(ino)
    for entry in store.read_directory(handle, 0):
        store.lookup(ino, entry.name)
    store.release_directory(handle)


def _dump(media: MemoryMedia) -> None:
    for dump in DUMPS:
        try:
            for _item in dump(media):
                pass
        except CxlfsError as error:
            _allowed(error)


def _write_something(media: MemoryMedia, rng: Random) -> bool:
    """Work on the store as a mount would, close it, and open it again. False: read-only."""
    try:
        store = Store.open(media)
    except CxlfsError as error:
        _allowed(error)
        return False
    if store.read_only:
        store.close()
        return False
    try:
        for change in _changes(store, rng):
            try:
                change()
            except CxlfsError as error:
                _allowed(error)
        store.maintain(1e9)
    finally:
        try:
            store.close() if rng.random() < 0.7 else store.abandon()
        except CxlfsError as error:
            _allowed(error)
    return _read_everything(media)


def _changes(store: Store, rng: Random) -> Iterator[Callable[[], object]]:
    inodes = [inode.ino for inode in store.namespace.inodes.values()]
    directories = [i.ino for i in store.namespace.inodes.values() if i.entries is not None]
    for number in range(4):
        parent = rng.choice(directories)
        yield lambda parent=parent, number=number: _new_file(store, parent, b"fuzz-%d" % number)
    for ino in rng.sample(inodes, min(len(inodes), 4)):
        inode = store.namespace.inodes.get(ino)
        if inode is not None and inode.kind is FileKind.FILE:
            yield lambda ino=ino: _overwrite(store, ino, rng)
    names = [(d, n) for d in directories for n in store.namespace.inodes[d].entries or {}]
    for parent, name in rng.sample(names, min(len(names), 4)):
        target = rng.choice(directories)
        yield lambda p=parent, n=name, t=target: store.rename(p, n, t, b"moved")
        yield lambda p=parent, n=name: store.unlink(p, n)
        yield lambda p=parent, n=name: store.remove_directory(p, n)


def _new_file(store: Store, parent: int, name: bytes) -> None:
    _, handle = store.create(parent, name, 0o644, 0, 0, os.O_RDWR)
    try:
        store.write(handle, 0, b"fuzz" * 3000)
        store.flush(handle, writer_killed=False)
    finally:
        store.release(handle)


def _overwrite(store: Store, ino: int, rng: Random) -> None:
    handle = store.open_file(ino, rng.choice((os.O_RDWR, os.O_RDWR | os.O_TRUNC)))
    try:
        store.write(handle, rng.choice((0, 100, 5000)), b"over" * 600)
        store.flush(handle, writer_killed=rng.random() < 0.3)
    finally:
        store.release(handle)

"""The handlers of a mount without a kernel: a store in memory, and what the kernel would send."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyfuse3
import pytest

from cxlfs.fuse import operations as operations_module
from cxlfs.fuse.operations import Operations
from cxlfs.fuse.processes import ProcessTable
from cxlfs.media import MemoryMedia
from cxlfs.store import Store

MIB = 1 << 20
ROOT = pyfuse3.ROOT_INODE
RANDOM_PID = 4242

Result = TypeVar("Result")


@dataclass
class Context:
    """Stands for pyfuse3.RequestContext, which cannot be made."""

    uid: int = 0
    gid: int = 0
    pid: int = RANDOM_PID
    umask: int = 0o022


@dataclass
class Token:
    """Stands for pyfuse3.ReaddirToken: takes ``room`` entries."""

    room: int
    entries: list[tuple[bytes, Any, int]] = field(default_factory=list)


def take_entry(token: Token, name: bytes, entry: Any, cookie_next: int) -> bool:
    """Stands for pyfuse3.readdir_reply."""
    if len(token.entries) == token.room:
        return False
    token.entries.append((name, entry, cookie_next))
    return True


class Fields:
    """Stands for pyfuse3.SetattrFields: only what is named is updated."""

    def __init__(self, *names: str) -> None:
        for name in ("atime", "mtime", "ctime", "mode", "uid", "gid", "size"):
            setattr(self, f"update_{name}", name in names)


def finish(coroutine: Coroutine[object, object, Result]) -> Result:
    """Run a handler: it must answer without ever waiting."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise AssertionError("a handler waited")


class Kernel:
    """Sends requests as the kernel would, and knows what it holds."""

    def __init__(self, store: Store, proc_root: Path) -> None:
        self.store = store
        self.operations = Operations(store, processes=ProcessTable(proc_root))
        store.on_event = self.operations.on_store_event
        self.context: Any = Context()

    def create(self, name: bytes, flags: int = os.O_RDWR, parent: int = ROOT) -> tuple[int, int]:
        """Inode and handle of a new file."""
        info, entry = finish(
            self.operations.create(parent, name, stat.S_IFREG | 0o644, flags, self.context)
        )
        return entry.st_ino, info.fh

    def open(self, ino: int, flags: int = os.O_RDWR) -> pyfuse3.FileInfo:
        return finish(self.operations.open(ino, flags, self.context))

    def lookup(self, name: bytes, parent: int = ROOT) -> pyfuse3.EntryAttributes:
        return finish(self.operations.lookup(parent, name, self.context))

    def getattr(self, ino: int) -> pyfuse3.EntryAttributes:
        return finish(self.operations.getattr(ino, self.context))

    def setattr(self, ino: int, *, handle: int | None = None, **values: int) -> Any:
        attributes = pyfuse3.EntryAttributes()
        names = {"atime": "st_atime_ns", "mtime": "st_mtime_ns", "ctime": "st_ctime_ns"}
        for name, value in values.items():
            setattr(attributes, names.get(name, f"st_{name}"), value)
        fields: Any = Fields(*values)
        return finish(self.operations.setattr(ino, attributes, fields, handle, self.context))

    def write_file(self, name: bytes, content: bytes) -> int:
        """A new file with ``content``, closed; returns the inode."""
        ino, handle = self.create(name, os.O_WRONLY)
        finish(self.operations.write(handle, 0, content))
        self.close(handle)
        return ino

    def close(self, handle: int) -> None:
        finish(self.operations.flush(handle))
        finish(self.operations.release(handle))

    def read(self, ino: int, size: int = MIB) -> bytes:
        handle = self.open(ino, os.O_RDONLY).fh
        content = bytes(finish(self.operations.read(handle, 0, size)))
        self.close(handle)
        return content

    def list(self, handle: int, room: int = 1000, cookie: int = 0) -> list[tuple[bytes, Any, int]]:
        token: Any = Token(room)
        finish(self.operations.readdir(handle, cookie, token))
        entries: list[tuple[bytes, Any, int]] = token.entries
        return entries


@contextlib.contextmanager
def error_number(number: int) -> Iterator[None]:
    """The block must end with FUSEError of that errno."""
    with pytest.raises(pyfuse3.FUSEError) as caught:
        yield
    assert caught.value.errno == number, os.strerror(caught.value.errno)


@contextlib.contextmanager
def kernel_without_a_kernel(proc_root: Path) -> Iterator[Kernel]:
    """A Kernel over a fresh store; in the end nothing may be broken, pinned or open."""
    media = MemoryMedia(64 * MIB)
    Store.format(media)
    store = Store.open(media)
    kernel = Kernel(store, proc_root)
    original = operations_module.pyfuse3.readdir_reply
    operations_module.pyfuse3.readdir_reply = take_entry  # type: ignore[assignment]
    try:
        yield kernel
        assert not kernel.operations.failures.counts
        kernel.operations.lookups.forget_all()
        assert not store.namespace.orphan_count() or len(kernel.operations.files)
        stopped = store.read_only
        store.close()
        again = Store.open(media)
        assert again.statistics().recovery.clean != stopped
        again.close()
    finally:
        operations_module.pyfuse3.readdir_reply = original
        store.abandon()
        media.close()

"""Two users who save in the same directories of a small store, and keep logs there."""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.store import Store
from tests.support.shop import close
from tests.support.stores import write_file
from tests.support.unit_scenes import CHECKPOINT, Writers, save, shards

ALICE, BOB = 1000, 1001
DCP = {b"__0_0.distcp": b"a" * 900, b"__1_0.distcp": b"b" * 900}
Back = Callable[[Store], Store]


class Users(Writers):
    """Two of them; what each does is done as that one."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.uid: int | None = ALICE
        store.units.user = lambda: self.uid


def become(users: Users, uid: int) -> None:
    users.uid, users.present = uid, uid


def create(store: Store, parent: int, name: bytes, uid: int, data: bytes, *, flags: int = 0) -> int:
    """A file of a user, fsynced and closed; returns its number."""
    attributes, handle = store.create(parent, name, 0o666, uid, uid, os.O_RDWR | flags)
    store.write(handle, 0, data)
    store.fsync(handle)
    close(store, handle)
    return attributes.ino


def append(store: Store, parent: int, name: bytes, data: bytes) -> int:
    """An open handle of a log, behind a line; committed."""
    inode = store.namespace.find(parent, name)
    if inode is None:
        attributes, handle = store.create(parent, name, 0o644, ALICE, ALICE, os.O_WRONLY | _APPEND)
        end = attributes.size
    else:
        handle, end = store.open_file(inode.ino, os.O_WRONLY | _APPEND), inode.content.size
    store.write(handle, end, data)
    store.fsync(handle)
    return handle


_APPEND = os.O_APPEND


def directory_of(store: Store, uid: int, name: bytes, parent: int = 1) -> int:
    return store.make_directory(parent, name, 0o777, uid, uid).ino


def saved_by_alice(store: Store) -> tuple[int, dict[bytes, bytes]]:
    """A complete checkpoint of alice."""
    directory = directory_of(store, ALICE, CHECKPOINT)
    return directory, save(store, directory, shards(1))


def dcp(store: Store, directory: int, letter: bytes, uid: int = ALICE) -> dict[bytes, bytes]:
    """A save of two shards, and its marker by rename."""
    files = dict.fromkeys(DCP, letter * 900)
    for name, data in files.items():
        inode = store.namespace.find(directory, name)
        if inode is None:
            create(store, directory, name, uid, data)
        else:
            write_file(store, directory, name, data)
    create(store, directory, b".metadata.tmp", uid, letter)
    store.rename(directory, b".metadata.tmp", directory, b".metadata")
    return {**files, b".metadata": letter}

"""Checkpoint directories on a small store: saving them, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Hashable

from cxlfs.errors import NotFoundError
from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_rules import Ending
from tests.support.stores import read_file, write_file

CHECKPOINT = b"checkpoint-5"
MARKER = b"trainer_state.json"
Tree = dict[bytes, bytes]
"""Path below a directory: content."""


def find(store: Store, path: bytes) -> Inode:
    """Raises NotFoundError."""
    inode = store.namespace.get(1)
    for part in path.split(b"/"):
        if part:
            found = store.namespace.find(inode.ino, part)
            if found is None:
                raise NotFoundError(f"no {path!r}")
            inode = found
    return inode


def tree(store: Store, path: bytes) -> Tree | None:
    """Every file below a directory; None: there is no such directory."""
    try:
        top = find(store, path)
    except NotFoundError:
        return None
    found: Tree = {}
    pending = [(b"", top)]
    while pending:
        above, directory = pending.pop()
        for name, ino in (directory.entries or {}).items():
            inode = store.namespace.get(ino)
            if inode.entries is not None:
                pending.append((above + name + b"/", inode))
            elif inode.live is not None:
                found[above + name] = read_file(store, ino)
    return found


def make(store: Store, name: bytes, parent: int = 1) -> int:
    return store.make_directory(parent, name, 0o755, 5, 6).ino


def shards(version: int, count: int = 3) -> Tree:
    """Files of several chunks, all of one version."""
    return {b"shard-%d" % n: b"%d-%d " % (version, n) * (500 * n + 7) for n in range(count)}


def save(store: Store, directory: int, files: Tree, marker: bytes | None = MARKER) -> Tree:
    """Write the files, then the marker, as one saver does; returns all of it."""
    for name, data in files.items():
        write_file(store, directory, name, data)
    if marker is None:
        return files
    data = b"state of %d files " % len(files) + next(iter(files.values()))[:8]
    write_file(store, directory, marker, data)
    return {**files, marker: data}


def saved(store: Store, name: bytes = b"checkpoint-5", version: int = 1) -> tuple[int, Tree]:
    """A complete checkpoint: inode number of its directory, and what is in it."""
    directory = make(store, name)
    return directory, save(store, directory, shards(version))


def begin(store: Store, directory: int) -> None:
    """Change something that was there: a set begins with that, whoever makes the change."""
    present = store.namespace.get(directory).entries or {}
    name = next(name for name, ino in present.items() if store.namespace.get(ino).live is not None)
    write_file(store, directory, name, b"begun")
    assert store.units.unit_of(store.namespace.get(directory)) is not None


def kept_count(store: Store) -> int:
    """How many units have something in the place where they keep what was there."""
    place = store.namespace.find(1, ASIDE_NAME)
    return len((place.entries or {}) if place is not None else {})


def in_history(store: Store, name: bytes) -> list[bytes]:
    """Each content that history has of that name, the last one first."""
    rows = [row for row in store.past if row.name == name and row.data is not None]
    return [bytes(row.data.read(0, row.data.size)) for row in reversed(rows) if row.data]


def remove_tree(store: Store, parent: int, name: bytes) -> None:
    """As shutil.rmtree: files, then the directory."""
    inode = store.namespace.find(parent, name)
    assert inode is not None
    for child in list(inode.entries or {}):
        store.unlink(inode.ino, child)
    store.remove_directory(parent, name)


def open_writing(store: Store, directory: int, name: bytes, data: bytes) -> int:
    """A handle on a file that is being overwritten, or made."""
    inode = store.namespace.find(directory, name)
    if inode is None:
        handle = store.create(directory, name, 0o644, 5, 6, os.O_RDWR)[1]
    else:
        handle = store.open_file(inode.ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, data)
    return handle


def finish_work(store: Store) -> None:
    """All that the store does in the background."""
    while store.units.maintain():
        pass


class Writers:
    """Stands for the processes that save; the clock moves when told."""

    def __init__(self, store: Store) -> None:
        self.now = 0.0
        self.present: Hashable | None = "trainer"
        self.endings: dict[Hashable, Ending] = {}
        store.units.clock = lambda: self.now
        store.units.writer = lambda: self.present
        store.units.ending_of = lambda who: self.endings.get(who, Ending.ALIVE)


def open_count(store: Store) -> int:
    return len(store.units.open_units())

"""What a store holds, as the model of user histories sees it, and the model made to follow it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_aside import ASIDE_NAME
from tests.support.stores import read_file
from tests.support.user_histories.model import Directory, File, Path, Picture


def walk(store: Store) -> Iterator[tuple[Path, Inode]]:
    """All that has a name, but for what went back."""
    pending: list[tuple[Path, int]] = [((), 1)]
    while pending:
        path, ino = pending.pop()
        for name, child in (store.namespace.get(ino).entries or {}).items():
            inode = store.namespace.get(child)
            if (*path, name) == (ASIDE_NAME,):
                continue
            yield (*path, name), inode
            if inode.entries is not None:
                pending.append(((*path, name), child))


def contents_of(store: Store) -> Picture:
    """Every file, but for what went back."""
    files = ((path, inode) for path, inode in walk(store) if inode.live is not None)
    return {path: read_file(store, inode.ino) for path, inode in files}


def everything_in(store: Store) -> set[bytes]:
    """Every content that has a name, is kept aside, or is in history."""
    found = {bytes(r.data.read(0, r.data.size)) for r in store.past if r.data is not None}
    for inode in store.namespace.walk(1):
        if inode.live is not None and inode.links:
            found.add(read_file(store, inode.ino))
        for content in (inode.aside, inode.committed):
            if content is not None:
                found.add(bytes(content.read(0, content.size)))
    return found


def adopt(
    root: Directory, store: Store, contents: Picture, come_back: Callable[[Inode], File]
) -> None:
    """The model's objects become the store's: what went back has other numbers. ``come_back``: what
    stands for a file that had no name, or that the model does not know.
    """
    named = {file.ino: file for _, file in root.below()}
    directories = {1: root}
    pending = [root]
    while pending:
        here = pending.pop()
        for child in here.entries.values():
            if isinstance(child, Directory):
                directories[child.ino] = child
                pending.append(child)
    for directory in directories.values():
        directory.entries = {}
    for path, inode in walk(store):
        above = root.find(path[:-1])
        assert isinstance(above, Directory)
        if inode.entries is not None:
            above.put(path[-1], directories.get(inode.ino) or Directory(inode.ino, inode.uid))
        elif inode.live is not None:
            file = named.get(inode.ino) or come_back(inode)
            named[inode.ino] = file
            file.live = contents[path]
            if not file.is_dirty:
                file.committed = file.live
            file.is_linked = file.is_linked or inode.links > 1
            above.put(path[-1], file)

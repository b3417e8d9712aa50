"""From an inode back to a path: for messages, and for whoever asks where a file lies.

Never here: looking names up, changing anything.

Invariants
- Nothing is kept for it but the last name of each inode: a search happens only where that name is
  gone and others are left, and looks at ``names_max`` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from cxlfs.store.namespace import Inode, Namespace
from cxlfs.types import ROOT_INO


def path_of(namespace: Namespace, ino: int, *, names_max: int | None = None) -> bytes | None:
    """One path that means the inode; None when it has no name, or none that was found in
    ``names_max`` names (None: in all of them).
    """
    parts: list[bytes] = []
    current = ino
    for _ in range(len(namespace.inodes) + 1):
        if current == ROOT_INO:
            return b"/" + b"/".join(reversed(parts))
        inode = namespace.inodes.get(current)
        if inode is None:
            return None
        found = name_of(namespace, inode, names_max=names_max)
        if found is None:
            return None
        current, name = found
        parts.append(name)
    return None


def name_of(
    namespace: Namespace, inode: Inode, *, names_max: int | None = None
) -> tuple[int, bytes] | None:
    """One directory and name that mean the inode; None as in :func:`path_of`."""
    likely = namespace.inodes.get(inode.parent)
    if likely is not None and (likely.entries or {}).get(inode.name) == inode.ino:
        return likely.ino, inode.name
    if inode.links == 0:
        return None
    for directory, name, child in islice(_names(namespace, inode, likely), names_max):
        if child == inode.ino:
            return directory, name
    return None


def _names(
    namespace: Namespace, inode: Inode, likely: Inode | None
) -> Iterator[tuple[int, bytes, int]]:
    """Every name that may mean the inode: directory, name, inode."""
    directories = [likely] if likely is not None else []
    if inode.entries is None:
        directories.extend(i for i in namespace.inodes.values() if i.entries is not None)
    for directory in directories:
        for name, child in (directory.entries or {}).items():
            yield directory.ino, name, child

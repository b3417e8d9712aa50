"""Which files below the directory of a checkpoint unit belong to it.

Other modules say what happens to those that do (``units``) and to the others (``unit_returns``).

Invariants
- The answer depends on names, owners and what the unit's record says. A recovery finds all three.
- A policy that names a file, or has a pattern for it other than ``*``, wins over the names that
  never belong.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from cxlfs.store.unit_rules import EACH_FILE

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace

NEVER_FILES = (
    *(b"*.log", b"*.out", b"*.err", b"*.jsonl", b"*.csv", b"*.lock"),
    b"events.out.tfevents*",
    *(b"*.db", b"*.sqlite*", b"*-wal", b"*-shm", b"*-journal"),
)
"""Logs, and files that a library keeps open and makes safe by itself."""
NEVER_DIRECTORIES = frozenset({b"wandb", b"mlruns", b"tb_logs"})
_BELOW, _NEVER_BELOW = b"lightning_logs", b"metrics"
"""A file of such a beginning, two levels below a directory of that name."""
_LOGS = re.compile(b"|".join(fnmatch.translate(each.decode()).encode() for each in NEVER_FILES))
_NAMES_KNOWN = 4096
UNKNOWN = -1
"""In the place of a user: the changes of everybody belong to the unit."""


def is_named(name: bytes, done: Iterable[bytes]) -> bool:
    """A policy asks for a file of this name."""
    return any(each != EACH_FILE and fnmatch.fnmatchcase(name, each) for each in done)


@functools.lru_cache(maxsize=_NAMES_KNOWN)  # it is asked at each change
def never_belongs(path: tuple[bytes, ...], is_directory: bool, done: tuple[bytes, ...]) -> bool:  # noqa: FBT001
    """The names below the top of a unit that lead to a file or directory say that it never does."""
    name, above = path[-1], path[:-1]
    if not NEVER_DIRECTORIES.isdisjoint(path if is_directory else above):
        return True
    if is_directory:
        return False
    is_below = path[-3:-2] == (_BELOW,) and name.startswith(_NEVER_BELOW)
    return (is_below or bool(_LOGS.match(name))) and not is_named(name, done)


def path_below(namespace: Namespace, top: Inode, directory: Inode) -> tuple[bytes, ...] | None:
    """The names that lead from ``top`` to a directory; None: it does not lie there."""
    names: list[bytes] = []
    current: Inode | None = directory
    while current is not None and current is not top:
        if current.ino == current.parent or not current.links:
            return None
        names.append(current.name)
        current = namespace.inodes.get(current.parent)
    return None if current is None else tuple(reversed(names))


def name_at_top(
    namespace: Namespace, top: Inode, directory: Inode, name: bytes | None
) -> bytes | None:
    """The name in ``top`` through which a name in ``directory`` is reached; None: not known."""
    path = path_below(namespace, top, directory)
    return path[0] if path else name


def is_others(inode: Inode, uid: int) -> bool:
    """It belongs to another user than the one whose unit it lies in."""
    return uid not in {UNKNOWN, inode.uid}

"""Pass 8: inodes, names, extended attributes, and that everything is reachable from the root.

Never here: permissions, content.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from itertools import chain

import numpy as np

from cxlfs.format import layout
from cxlfs.types import ROOT_INO
from cxlfs.verify.columns import Columns, Rows
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import Finding, make

ROWS_AT_ONCE = 512
_TYPES = {
    stat.S_IFREG,
    stat.S_IFDIR,
    stat.S_IFLNK,
    stat.S_IFIFO,
    stat.S_IFSOCK,
    stat.S_IFCHR,
    stat.S_IFBLK,
}
_FLAGS_KNOWN = layout.INODE_FLAGS_KNOWN | layout.INODE_ASIDE


def check_namespace(context: Context) -> Steps:
    """Link counts and directory contents are derived, so it is names that must be right."""
    columns = context.columns()
    if columns is None:
        return
    checker = _Checker(context, columns)
    total = len(columns.inodes) + len(columns.names)
    done = 0
    for start in range(0, len(columns.inodes), ROWS_AT_ONCE):
        rows = columns.inodes[start : start + ROWS_AT_ONCE]
        yield from checker.check_inodes(rows)
        done += len(rows)
        yield Amount(done, total)
    for start in range(0, len(columns.names), ROWS_AT_ONCE):
        rows = columns.names[start : start + ROWS_AT_ONCE]
        yield from checker.check_names(rows)
        done += len(rows)
        yield Amount(done, total)
    for number, finding in enumerate(chain(checker.check_strings(), checker.check_reachable())):
        if finding is not None:
            yield finding
        elif number % ROWS_AT_ONCE == 0:
            yield Amount(total, total)
    yield Amount(total, total)


class _Checker:
    """Goes over the rows once; ``parents`` and ``named`` grow with the names."""

    def __init__(self, context: Context, columns: Columns) -> None:
        self.context = context
        self.columns = columns
        self.modes: dict[int, int] = {}
        self.parents: dict[int, int] = {}
        """Of directories only."""
        self.named: set[int] = set()
        self._entries: set[tuple[int, bytes]] = set()

    def _finding(self, kind: str, message: str, ino: int | None) -> Finding:
        return make(kind, message, ino=ino, path=self.context.path_of(ino))

    # --- inodes -----------------------------------------------------------------------------

    def check_inodes(self, rows: Rows) -> Iterator[Finding]:
        fields = ("ino", "mode", "flags", "size", "ref_count", "aside_size", "aside_ref_count")
        for ino, mode, flags, *content in rows[list(fields)].tolist():
            problem = self._inode_problem(ino, mode, flags, content)
            if problem is not None:
                yield self._finding("inode-impossible", f"inode {ino}: {problem}", ino)
            self.modes[ino] = mode

    def _inode_problem(self, ino: int, mode: int, flags: int, content: list[int]) -> str | None:
        if not 0 < ino < self.columns.next_ino:
            return f"its number is not below {self.columns.next_ino}"
        if ino in self.modes:
            return "its number appears twice"
        if stat.S_IFMT(mode) not in _TYPES:
            return f"no such type: mode {mode:#o}"
        if flags & ~_FLAGS_KNOWN:
            return f"unknown flags {flags:#x}"
        size, _refs, aside_size, aside_refs = content
        if not stat.S_ISREG(mode) and any(content):
            return "it is not a file, but has content"
        if max(size, aside_size) > layout.FILE_SIZE_MAX:
            return f"its size is {max(size, aside_size)}"
        if (aside_size or aside_refs) and not flags & layout.INODE_ASIDE:
            return "it has a version kept aside, but does not say so"
        return None

    # --- names ------------------------------------------------------------------------------

    def check_names(self, rows: Rows) -> Iterator[Finding]:
        for row in rows:
            parent, ino = int(row["parent"]), int(row["ino"])
            name = self.columns.name_at(row)
            problem = self._name_problem(row, parent, name)
            if problem is not None:
                message = f"a name of inode {ino} in directory {parent}: {problem}"
                yield make("name-impossible", message, ino=ino, path=self.context.path_of(ino))
            self._entries.add((parent, name))
            if ino not in self.modes:
                message = f"{name!r} in directory {parent} means inode {ino}, which does not exist"
                yield self._finding("name-dangling", message, parent)
            if not stat.S_ISDIR(self.modes.get(parent, 0)):
                message = f"{name!r} lies in inode {parent}, which is no directory"
                yield make("name-dangling", message, ino=ino)
                continue
            if stat.S_ISDIR(self.modes.get(ino, 0)):
                if ino in self.parents or ino == ROOT_INO:
                    message = f"directory {ino} has more than one name"
                    yield self._finding("name-impossible", message, ino)
                self.parents.setdefault(ino, parent)
            self.named.add(ino)

    def _name_problem(self, row: np.void, parent: int, name: bytes) -> str | None:
        length = int(row["name_bytes"])
        if len(name) != length:
            return "it lies outside the strings"
        if not 0 < length <= layout.NAME_BYTES_MAX:
            return f"it has {length} bytes"
        if b"/" in name or b"\0" in name or name in (b".", b".."):
            return "it cannot be a name"
        if (parent, name) in self._entries:
            return "it appears twice"
        return None

    # --- attributes and symbolic links ------------------------------------------------------

    def check_strings(self) -> Iterator[Finding | None]:
        """None: one more was looked at."""
        targets: set[int] = set()
        for section in (self.columns.xattrs, self.columns.symlinks):
            is_target = section is self.columns.symlinks
            for ino, start, name_bytes, value_bytes in section.tolist():
                problem = self._string_problem(
                    ino, start, name_bytes, value_bytes, is_target=is_target
                )
                if problem is None and is_target and ino in targets:
                    problem = "a second target"
                if problem is not None:
                    yield self._finding("attribute-impossible", f"inode {ino}: {problem}", ino)
                if is_target:
                    targets.add(ino)
                yield None
        for ino, mode in self.modes.items():
            if stat.S_ISLNK(mode) and ino not in targets:
                message = f"symbolic link {ino} has no target"
                yield self._finding("attribute-impossible", message, ino)

    def _string_problem(
        self, ino: int, start: int, name_bytes: int, value_bytes: int, *, is_target: bool
    ) -> str | None:
        if ino not in self.modes:
            return "an attribute of an inode that does not exist"
        if start + name_bytes + value_bytes > len(self.columns.strings):
            return "an attribute that lies outside the strings"
        if is_target:
            fits = name_bytes == 0 and 0 < value_bytes <= layout.SYMLINK_BYTES_MAX
            if not fits or not stat.S_ISLNK(self.modes[ino]):
                return "a target that cannot be"
        elif not 0 < name_bytes <= layout.XATTR_NAME_BYTES_MAX:
            return f"an attribute's name has {name_bytes} bytes"
        elif value_bytes > layout.XATTR_VALUE_BYTES_MAX:
            return f"an attribute's value has {value_bytes} bytes"
        return None

    # --- reachability -----------------------------------------------------------------------

    def check_reachable(self) -> Iterator[Finding | None]:
        """Every inode has a name, every directory leads up to the root. None as above."""
        if not stat.S_ISDIR(self.modes.get(ROOT_INO, 0)):
            yield make("inode-impossible", "there is no root directory", ino=ROOT_INO)
        for ino in self.modes:
            yield None
            if ino != ROOT_INO and ino not in self.named:
                yield make("inode-nameless", f"inode {ino} has no name", ino=ino)
        reached: set[int] = {ROOT_INO}
        told: set[int] = set()
        for ino in self.parents:
            yield None
            trail: list[int] = []
            current = ino
            while current not in reached and current not in told and current in self.parents:
                trail.append(current)
                told.add(current)  # seen on this way: meeting it again is a loop
                current = self.parents[current]
            if current in reached:
                reached.update(trail)
                told.difference_update(trail)
            elif trail and current in trail:
                message = f"directory {current} lies below itself"
                yield make("directory-unreachable", message, ino=current)

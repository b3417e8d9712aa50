"""What an unmarked set of files lacks, compared with one that was whole: one beside it, the one
that it replaces, or the one that it is written over.

Other modules know whether its writers are gone, and what follows (``unit_rules``).

Invariants
- A set is said to lack something only where a whole one shows it, and where it holds nothing that
  the whole one does not have. What its own bytes call whole, or its marker, is never asked for.
- What programs that copy files leave out is nobody's mistake. Who changes a file in place means
  that change alone.
- With what was there before a set is compared once, until something changes in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cxlfs.store.unit_aside import CONTENTS
from cxlfs.store.unit_markers import says_something
from cxlfs.store.unit_rules import matches

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.open_unit import OpenUnit
    from cxlfs.store.unit_policies import Policies

NAMES_MAX: Final = 50_000
"""Of a set: more are not compared, which takes a microsecond for each and lets others wait."""


class Lacks:
    """One for each open store. ``belongs``: whether a file in a unit is a part of it."""

    def __init__(
        self,
        namespace: Namespace,
        policies: Policies,
        belongs: Callable[[OpenUnit, Inode], bool],
    ) -> None:
        self._namespace = namespace
        self._policies = policies
        self._belongs = belongs

    def of(self, unit: OpenUnit) -> str:
        """What is missing in a unit that has no marker, for people; empty: nothing that is known.
        Its directory is there.
        """
        if unit.edited or all(unit.writers.values()):
            return ""
        if unit.is_new and not unit.replaces:
            return ""
        if unit.looked is None or unit.looked[0] != unit.changed:
            look = self._of_replaced if unit.replaces else self._of_overwritten
            unit.looked = unit.changed, look(unit)
        return unit.looked[1]

    def has_all_of_others(self, unit: OpenUnit, inode: Inode) -> bool:
        """A file of a new set was published, and the set has every file of those that come last
        that any directory beside it has: it is finished.
        """
        if not unit.is_new or unit.replaces or inode.parent != unit.inode.ino:
            return False
        parent = self._namespace.inodes.get(unit.inode.parent)
        if parent is None or not matches(inode.name, unit.rule.needs):
            return False
        beside = self._policies.needed_beside(parent, unit.inode.name, unit.rule)
        wanted = frozenset[bytes]().union(*beside)
        return bool(wanted) and all(self._is_there(unit, name) for name in wanted)

    def _is_there(self, unit: OpenUnit, name: bytes) -> bool:
        inode = self._namespace.find(unit.inode.ino, name)
        return inode is not None and inode.ino in unit.published and says_something(inode, name)

    # --- compared with what was there before ----------------------------------------------------

    def _of_replaced(self, unit: OpenUnit) -> str:
        """The directory was removed and is made again. The one before ended with its marker; this
        one does not, and has only a part of its names. Whoever only empties it, or prepares it for
        others, fills no directory of it.
        """
        newest = marker = count = 0
        lacking = b""
        is_begun = False
        pending: list[tuple[int, Inode | None, bytes]] = [(unit.before, unit.inode, b"")]
        while pending:
            before, directory, path = pending.pop()
            kept = self._kept_names(unit, before)
            present = (directory.entries if directory is not None else None) or {}
            count += len(kept) + len(present)
            if count > NAMES_MAX or self._has_new_directory(present, kept):
                return ""
            files: set[bytes] = set()
            for name, ino in kept.items():
                inode = self._namespace.get(ino)
                lacking = lacking or (path + name if name not in present else b"")
                if inode.entries is not None:
                    below = present.get(name)
                    now = None if below is None else self._namespace.get(below)
                    pending.append((ino, now, path + name + b"/"))
                    continue
                files.add(name)
                newest = max(newest, inode.commit_lsn)
                if not path and name in unit.rule.done:
                    marker = max(marker, inode.commit_lsn)
            if files and len(files) == len(kept):
                parts = files & present.keys() - set(unit.rule.done)
                is_begun = is_begun or (parts == files if path else bool(parts))
        return os.fsdecode(lacking) if is_begun and marker and marker == newest else ""

    def _has_new_directory(self, present: dict[bytes, int], kept: dict[bytes, int]) -> bool:
        new = (ino for name, ino in present.items() if name not in kept)
        return any(self._namespace.get(ino).entries is not None for ino in new)

    def _of_overwritten(self, unit: OpenUnit) -> str:
        """The files of the directory are written again, one after the other, in the order in which
        they were written before, and some have not come. Whoever changes one of them alone
        writes in another order, or changes its length.
        """
        rule = unit.rule
        if not (rule.files and rule.done):
            return ""
        entries = unit.inode.entries or {}
        kept = self._kept_names(unit, unit.inode.ino)
        if len(entries) > NAMES_MAX or not kept.keys() <= entries.keys():
            return ""
        order: list[tuple[int, bytes]] = []
        written: set[bytes] = set()
        for name, ino in entries.items():
            inode = self._namespace.get(ino)
            if inode.live is None or not self._belongs(unit, inode):
                continue
            before = inode
            if inode.commit_lsn > unit.lsn:
                found = self._before(unit, inode, kept.get(name))
                is_part = matches(name, rule.files)
                if found is None or (is_part and found.content.size != inode.content.size):
                    return ""
                written.add(name)
                before = found
            order.append((before.commit_lsn, name))
        order.sort()
        return self._not_come([name for _, name in order], written, unit)

    @staticmethod
    def _not_come(order: list[bytes], written: set[bytes], unit: OpenUnit) -> str:
        """``order``: of all names, as they were written before; ``written``: since then."""
        parts = [name for name in order if matches(name, unit.rule.files)]
        marker = max((order.index(name) for name in unit.rule.done if name in order), default=-1)
        missing = [name for name in parts if name not in written]
        if not parts or len(missing) == len(parts):
            return ""
        if not (missing or unit.rule.marker_may_stay):
            missing = order[marker : marker + 1] if marker >= 0 else []
        if not missing or marker < order.index(parts[-1]) or written != set(order[: len(written)]):
            return ""
        return f"a new {os.fsdecode(missing[0])}"

    def _before(self, unit: OpenUnit, inode: Inode, renamed_over: int | None) -> Inode | None:
        """What a file had when the unit began; None: it is new."""
        if renamed_over is not None:
            return self._namespace.get(renamed_over)
        if unit.kept_in is None or inode.ino not in unit.contents:
            return None
        home = self._namespace.find(unit.kept_in.ino, CONTENTS)
        return None if home is None else self._namespace.find(home.ino, b"%d" % inode.ino)

    def _kept_names(self, unit: OpenUnit, directory: int) -> dict[bytes, int]:
        """The names that a directory has lost in the unit."""
        if unit.kept_in is None:
            return {}
        home = self._namespace.find(unit.kept_in.ino, b"%d" % directory)
        return (home.entries if home is not None else None) or {}

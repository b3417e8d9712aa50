"""What can be said of a directory of files that belong together, whether it is a unit or not: that
the one its saver writes last is missing, or is older than what it describes.

Never here: what the files hold (``cxlfs.checkpoint`` reads formats), changing anything.

Invariants
- A set that is said to be mixed may be whole (a saver that wrote something more behind its marker);
  one that is not said to be may be mixed only if its marker was published by another order than the
  rule's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cxlfs.store import unit_rules
from cxlfs.store.unit_rules import Rule

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.unit_policies import Policies


def set_problem(namespace: Namespace, directory: Inode, policies: Policies) -> str | None:
    """Why the files of a directory may not belong together; None: nothing speaks against it, or
    nothing is known of directories like this.
    """
    rule = _rule(directory, policies)
    entries = directory.entries or {}
    if rule is None or not rule.done or rule.ends_with_each_file or not entries:
        return None
    markers = [namespace.get(entries[name]) for name in rule.done if name in entries]
    if not markers:
        if not rule.always_marked:
            return None
        return f"incomplete set: there is no {os.fsdecode(rule.done[0])}"
    newest = max(markers, key=lambda inode: inode.commit_lsn)
    for name, inode in _members(namespace, directory, rule):
        if inode.commit_lsn > newest.commit_lsn and inode not in markers:
            later = os.fsdecode(name)
            return f"set may be mixed: {later} was committed after {os.fsdecode(newest.name)}"
    return None


def _rule(directory: Inode, policies: Policies) -> Rule | None:
    rule = policies.rule_of(directory)
    if rule is None:
        rule = unit_rules.known_directory(directory.name)
    if rule is None:
        names = directory.entries or {}
        found = (unit_rules.known_file(name) for name in names)
        rule = next((one for one in found if one is not None), None)
    return rule


def _members(namespace: Namespace, directory: Inode, rule: Rule) -> Iterator[tuple[bytes, Inode]]:
    """The files that the marker describes: with a rule for files those, else all below."""
    pending = [(b"", directory)]
    while pending:
        above, current = pending.pop()
        for name, ino in (current.entries or {}).items():
            inode = namespace.get(ino)
            if inode.entries is not None:
                if not rule.files:
                    pending.append((above + name + b"/", inode))
            elif inode.live is not None and not inode.uncommitted:
                belongs = unit_rules.matches(name, rule.files) if rule.files else True
                if belongs and not unit_rules.matches(name, rule.after):
                    yield above + name, inode

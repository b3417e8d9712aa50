"""The control request ``policy``: which directories of the mounted store are checkpoint units.

Parameters: ``path``, of a directory below the mount point, and ``set`` (missing: only show):
``unit`` (patterns; none: forget the policy), ``done`` (names) and ``quiet_seconds`` (or null). The
answer: one ``policy`` for each policy of the store that the caller can reach. Who owns a directory
sets its policy.

Never here: what a unit is (``store.units``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from cxlfs.daemon.callers import Caller
from cxlfs.daemon.control_server import Message
from cxlfs.errors import NotFoundError, UsageError
from cxlfs.store import Store
from cxlfs.store.hidden import require_shown
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_record import NAMES_MAX, QUIET_SECONDS_MAX, policy_rule
from cxlfs.store.unit_rules import Rule
from cxlfs.types import ROOT_INO

_NAME_BYTES_MAX = 255


def policy(store: Store, parameters: Mapping[str, object], caller: Caller) -> Iterator[Message]:
    """See the module. Raises UsageError, NotFoundError, NotPermittedError, LimitError,
    ReadOnlyError.
    """
    path = parameters.get("path")
    if not isinstance(path, str):
        raise UsageError("policy: path must be text")
    caller.require_reach(store, os.fsencode(path))
    directory = _directory(store, path)
    wanted = parameters.get("set")
    if wanted is not None:
        if not isinstance(wanted, dict):
            raise UsageError("policy: set must be an object")
        caller.require_owned(directory, os.fsencode(path))
        store.volume.require_writable()
        store.units.set_policy(directory, _rules(wanted))
    for ino, rules in list(store.units.policies.all().items()):
        place = store.path_of(ino) or b""
        for rule in rules if caller.can_reach(store, place) else ():
            yield {
                "message_type": "policy",
                "path": os.fsdecode(place),
                "unit": [os.fsdecode(name) for name in rule.directories],
                "done": [os.fsdecode(name) for name in rule.done],
                "quiet_seconds": rule.quiet_seconds,
            }


def _directory(store: Store, path: str) -> Inode:
    inode = store.namespace.get(ROOT_INO)
    for part in os.fsencode(path).split(b"/"):
        require_shown(inode.ino, part)
        found = store.namespace.find(inode.ino, part) if part else inode
        if found is None:
            raise NotFoundError(f"no such path: {path}")
        inode = found
    return store.namespace.directory(inode.ino)


def _rules(wanted: Mapping[str, object]) -> tuple[Rule, ...]:
    units, done = _names(wanted, "unit"), _names(wanted, "done")
    quiet = wanted.get("quiet_seconds")
    if quiet is not None and not (
        isinstance(quiet, int | float) and 0 <= quiet <= QUIET_SECONDS_MAX
    ):
        raise UsageError(
            f"--quiet {quiet}: not a time", next_step=f"give seconds, 0 to {QUIET_SECONDS_MAX:.0f}"
        )
    return (policy_rule(units, done, None if quiet is None else float(quiet)),) if units else ()


def _names(wanted: Mapping[str, object], key: str) -> list[bytes]:
    texts = wanted.get(key)
    if not isinstance(texts, list) or len(texts) > NAMES_MAX:
        raise UsageError(f"policy: {key} must be a list of at most {NAMES_MAX} names")
    names = [os.fsencode(str(text)) for text in texts]
    for name in names:
        if not 0 < len(name) <= _NAME_BYTES_MAX or b"/" in name or b"\0" in name:
            raise UsageError(
                f"--{key} {os.fsdecode(name)}: not a name",
                next_step="give a name without / as it stands in its directory",
            )
    return names

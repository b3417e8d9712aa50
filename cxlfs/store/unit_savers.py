"""Which programs have finished checkpoint sets in a directory: savers, told from all others who
write there.

A program is known by its command line. Its digest, together with the name of the rule, is kept on
the directory that the sets lie in: a job that is started again is the same saver. What a process
itself has finished says more: jobs that make one part each have the same command line, too.

Other modules say what follows from it (``units``, ``unit_deciding``), and what a command line is.

Invariants
- Only the end of a set by its marker makes savers: nobody is one by what he begins.
- Who is not known, because no process could be found, counts as one: he loses no promise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Final

from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.format.operations import XattrSetOperation

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.unit_rules import Rule

SAVERS_XATTR: Final = XATTR_HIDDEN_PREFIX + b"savers"
_DIGEST_BYTES: Final = 16
_SAVERS_MAX: Final = 64
"""Of a directory, the last ones: ranks of a job have command lines of their own."""
_PROGRAMS_MAX: Final = 1024


class Savers:
    """One for each open store. ``program``: the command line of whom a token stands for, while it
    is there; empty: not known.
    """

    def __init__(self) -> None:
        self.program: Callable[[Hashable], bytes] = lambda writer: repr(writer).encode()
        self._programs: dict[Hashable, bytes] = {}
        self._processes: dict[tuple[Hashable, str], None] = {}
        """Who has finished sets of which rule since the store was opened: the last ones."""

    def note(self, writer: Hashable) -> None:
        """A process writes: what it is has to be known when it is gone."""
        if writer not in self._programs:
            if len(self._programs) >= _PROGRAMS_MAX:
                del self._programs[next(iter(self._programs))]
            self._programs[writer] = self.program(writer)

    def is_one(self, writer: Hashable | None, rule: Rule, directory: Inode) -> bool:
        """It has finished a set of that rule in a directory."""
        if writer is None:
            return True
        known = (directory.xattrs or {}).get(SAVERS_XATTR, b"")
        return bool(known) and self._digest(writer, rule) in _digests(known)

    def is_same_process(self, writer: Hashable, rule: Rule) -> bool:
        """It has finished a set of that rule in this life."""
        return (writer, rule.name) in self._processes

    def finished(
        self, writers: Iterable[Hashable], rule: Rule, directory: Inode
    ) -> list[XattrSetOperation]:
        """What says that they have finished a set there; nothing, if that was known."""
        writers = list(writers)
        self._processes |= dict.fromkeys((writer, rule.name) for writer in writers)
        while len(self._processes) > _PROGRAMS_MAX:
            del self._processes[next(iter(self._processes))]
        known = _digests((directory.xattrs or {}).get(SAVERS_XATTR, b""))
        new = [self._digest(writer, rule) for writer in writers]
        new = [digest for digest in dict.fromkeys(new) if digest and digest not in known]
        if not new:
            return []
        value = b"".join([*known, *new][-_SAVERS_MAX:])
        return [XattrSetOperation(directory.ino, SAVERS_XATTR, value)]

    def _digest(self, writer: Hashable, rule: Rule) -> bytes:
        self.note(writer)
        program = self._programs[writer]
        told = rule.name.encode() + b"\0" + program
        return hashlib.sha256(told).digest()[:_DIGEST_BYTES] if program else b""


def _digests(value: bytes) -> list[bytes]:
    """What an attribute says; what is no digest is left out."""
    found = (value[at : at + _DIGEST_BYTES] for at in range(0, len(value), _DIGEST_BYTES))
    return [digest for digest in found if len(digest) == _DIGEST_BYTES]

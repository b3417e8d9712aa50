"""What is known of the version before of a file that was overwritten, while it is held.

Its content is the one kept aside (``Inode.aside``). An extended attribute under the hidden prefix
says so on the media, so that a program of any version reads the store.

Here too: the operations that say so.

Other modules decide when a version is held, and what becomes of it (``overwrites``).

Invariants
- A value on the media that makes no sense counts as none: the content kept aside is an incomplete
  one then, as ever.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING, Final

from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.format.operations import (
    AsideDropOperation,
    ContentOperation,
    Operation,
    XattrRemoveOperation,
    XattrSetOperation,
)

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap

HELD_XATTR: Final = XATTR_HIDDEN_PREFIX + b"held"
"""On a file: what is kept aside is the version before. The value: see ``_VALUE``."""
_VALUE = struct.Struct("<B7xqQq")
"""State, then of the version before: mtime, ns; commit number; time of that commit, ns."""
_UNDECIDED, _REPORTED = 0, 1
_STATES = (_UNDECIDED, _REPORTED)


@dataclasses.dataclass(slots=True, eq=False)
class Held:
    """Of a file whose kept-aside content is the version before.

    ``mtime_ns``, ``commit_lsn``, ``commit_ns``: those of that version. ``reason``: why the present
    content is known to be torn, else empty. ``is_decided``: it stays as it is; only a user changes
    that.
    """

    mtime_ns: int
    commit_lsn: int
    commit_ns: int
    is_decided: bool = False
    reason: str = ""
    ended_lsn: int = 0
    """Record that replaced that version; 0: not known, as after an opening."""

    @property
    def value(self) -> bytes:
        """Of HELD_XATTR."""
        state = _REPORTED if self.is_decided else _UNDECIDED
        return _VALUE.pack(state, self.mtime_ns, self.commit_lsn, self.commit_ns)

    @classmethod
    def decode(cls, value: bytes) -> Held | None:
        """None: the value makes no sense."""
        if len(value) != _VALUE.size or value[0] not in _STATES:
            return None
        state, mtime_ns, lsn, time_ns = _VALUE.unpack(value)
        reason = "some of the version before is missing" if state == _REPORTED else ""
        return cls(mtime_ns, lsn, time_ns, state == _REPORTED, reason)


def aside_content(ino: int, content: FileMap) -> Operation:
    """A content that is committed is kept aside from this record on."""
    aside, cut = True, 0
    return ContentOperation(ino, aside, cut, content.size, content.references())


def hold_operations(ino: int, before: FileMap, held: Held) -> list[Operation]:
    """What the record that publishes an overwrite says besides, in front of the new content."""
    return [aside_content(ino, before), XattrSetOperation(ino, HELD_XATTR, held.value)]


def drop_operations(ino: int, held: Held | None) -> list[Operation]:
    """What says that a file has nothing kept aside any more."""
    ops: list[Operation] = [AsideDropOperation(ino)]
    if held is not None:
        ops.append(XattrRemoveOperation(ino, HELD_XATTR))
    return ops


def last_of(ino: int, links: int, held: Held | None) -> list[Operation]:
    """What comes before the end of one of ``links`` names. With the last one the version that is
    held dies too, and history has both.
    """
    return [AsideDropOperation(ino)] if links == 1 and held is not None else []


def undecided_operation(ino: int, held: Held) -> Operation:
    """A file that stayed as it was is overwritten again: that is to be decided anew."""
    again = dataclasses.replace(held, is_decided=False)
    return XattrSetOperation(ino, HELD_XATTR, again.value)

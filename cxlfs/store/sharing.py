"""Contents that become those of another file: references are copied, never bytes.

Never here: which content becomes whose, and the record that says so.

Invariants
- The last extent of a content may be open: whoever fills the content still writes to it, or whoever
  fills one that shares it, or a program that stores by itself. An open extent has no checksum yet
  and is not shared. It is closed first, and its writer goes on in another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from cxlfs.errors import InvariantError, invariant

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.leases import Leases
    from cxlfs.store.namespace import Inode

_Made = TypeVar("_Made")


class Sharing:
    """One for each volume. ``close_slips`` ends what programs store by themselves; they ask for
    more.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.close_slips: Callable[[], object] = lambda: None

    def whole(self, source: FileMap, target: FileMap, *, of: Inode | None = None) -> None:
        """Let an empty content refer to all that another one has. ``of``: the file that it is of,
        whose writer is asked first.
        """
        size = source.size
        self.range(source, target, (0, 0, size), of=of)
        target.truncate(size)

    def range(
        self,
        source: FileMap,
        target: FileMap,
        part: tuple[int, int, int],
        *,
        of: Inode | None = None,
    ) -> None:
        """The same of a part of it: offset in the source, offset in the target, bytes. It lies
        within the source.
        """
        at, target_at, length = part
        if not length:
            return
        shared = source.share(at, length, target, target_at)
        if shared is None:
            shared = self._closed(lambda: source.share(at, length, target, target_at), source, of)
        invariant(shared == length, "what is shared lies within the source")

    def twin(self, source: FileMap, owner: int, *, of: Inode | None = None) -> FileMap:
        """The same content of another file, clean: whoever makes it says all of it in a record."""
        made = source.twin(owner)
        return made if made is not None else self._closed(lambda: source.twin(owner), source, of)

    def _closed(
        self, attempt: Callable[[], _Made | None], source: FileMap, of: Inode | None
    ) -> _Made:
        """What the attempt makes as soon as nothing keeps an extent open."""
        closing = (lambda: self._close(source, of), self._leases.close_all, self.close_slips)
        for close in closing:
            close()
            made = attempt()
            if made is not None:
                return made
        raise InvariantError("only leases and slips keep an extent of a content open")

    def _close(self, source: FileMap, of: Inode | None) -> None:
        self._leases.close(source)
        if of is None:
            return
        for content in (of.live, of.committed):
            if content is not None:
                self._leases.close(content)
        if of.direct is not None:
            of.direct.close()

"""CRC32C of whole files, combined from the checksums that are kept of chunks.

Data is read only of chunks that a file has in part: the end of one that is shorter than its chunk
(at most one chunk for each extent), and what was overwritten, cut or copied from within. Those
chunks are read as a whole, and verified.

Never here: what a value looks like or who may ask (``attributes``).

Invariants
- A sum is of what readers get, and that is what is committed: while a file is being written it has
  none.
- It says what the content has to be: damage in a chunk that is combined does not change it, so that
  whoever reads the file and compares finds it.
- Between two steps the content may be replaced (the sum begins again), and its bytes may move to
  other places of the media, which changes none of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import CorruptionError, MediaError, NoAttributeError
from cxlfs.store.handle import UnfinishedError

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode

_STEP_BYTES = 4 << 20
"""What a step is as much work as reading so much of the media: 4096 chunks that are combined, or 62
of 64 KiB that are read. Less than a millisecond, in which everybody waits."""
_KNOWN_MAX = 256
"""Files whose sum is remembered: whoever asks for the size of a value asks for the value next."""


@dataclasses.dataclass(slots=True)
class _Sum:
    """Of the first ``summed_bytes`` of the content that was committed with ``commit_lsn``."""

    commit_lsn: int
    summed_bytes: int = 0
    crc: int = 0


class ContentSums:
    """The sums of one store's files. ``damaged``: called when a chunk that is read is damaged."""

    def __init__(self, damaged: Callable[[Inode, CorruptionError | MediaError], None]) -> None:
        self._damaged = damaged
        self._begun: dict[int, _Sum] = {}
        """As many as there are requests that go on: what they end with takes it away."""
        self._known: collections.OrderedDict[int, _Sum] = collections.OrderedDict()

    def crc32c(self, inode: Inode, *, in_steps: bool = False) -> int:
        """Of a file's content. ``in_steps``: UnfinishedError is raised between two steps of it, and
        the same asked again goes on.

        Raises NoAttributeError (no file, or being written), CorruptionError, MediaError.
        """
        begun = self._begun.pop(inode.ino, None)
        if inode.live is None or inode.version is not None or inode.uncommitted:
            raise NoAttributeError("not a file, or it is being written")
        known = self._known.get(inode.ino)
        if known is not None and known.commit_lsn == inode.commit_lsn:
            return known.crc
        if begun is None or begun.commit_lsn != inode.commit_lsn:
            begun = _Sum(inode.commit_lsn)
        while self._step(inode, begun):
            if in_steps:
                self._begun[inode.ino] = begun
                raise UnfinishedError
        self._known[inode.ino] = begun
        self._known.move_to_end(inode.ino)
        if len(self._known) > _KNOWN_MAX:
            self._known.popitem(last=False)
        return begun.crc

    def _step(self, inode: Inode, begun: _Sum) -> bool:
        """False: it is of all the content."""
        try:
            count, begun.crc = inode.content.crc32c(begun.summed_bytes, begun.crc, _STEP_BYTES)
        except (CorruptionError, MediaError) as error:
            self._damaged(inode, error)
            raise
        begun.summed_bytes += count
        return begun.summed_bytes < inode.content.size

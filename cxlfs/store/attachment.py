"""What a program needs to map the medium by itself, and how it knows later that this is still so.

Never here: who may ask (``fuse``), room (``direct``).

Invariants
- The watch (``media/locks``) is there as long as this process serves the medium, and no longer: who
  finds it need not ask again what the medium is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import InvalidArgumentError, MediaError

if TYPE_CHECKING:
    from cxlfs.store.volume import Volume


class Attachment(NamedTuple):
    """``watch``: 0 where other processes would not find it."""

    granularity: int
    media_bytes: int
    device: int
    inode: int
    special_device: int
    chunk_bytes: int
    is_synchronous: bool
    uuid: bytes
    watch: int
    path: bytes


class Attachments:
    """One for each store."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._watch = 0

    def attach(self) -> Attachment:
        """Raises InvalidArgumentError where no other program can map the medium."""
        media = self._volume.media
        identity = media.identity()
        if identity is None:
            raise InvalidArgumentError("the medium is memory of this process")
        self._watch = self._watch or media.begin_watch() or 0
        return Attachment(
            int(media.granularity),
            media.size_bytes,
            identity.device,
            identity.inode,
            identity.special_device,
            self._volume.superblock.chunk_bytes,
            identity.synchronous,
            self._volume.superblock.uuid,
            self._watch,
            identity.path.encode("utf-8", "surrogateescape"),
        )

    def abandon(self) -> None:
        """Before the store is closed."""
        watch, self._watch = self._watch, 0
        if watch:
            with contextlib.suppress(MediaError):  # it ends with this process's descriptor
                self._volume.media.end_watch(watch)

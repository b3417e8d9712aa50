"""A store that leaves its media alone for a while: closed for writing, and opened again.

Never here: who asks for it, and who keeps writers away meanwhile.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cxlfs.errors import NoSpaceError

if TYPE_CHECKING:
    from cxlfs.store.core import Store

SUSPENDED = "it was remounted read-only"
"""Why a store that could write does not."""


def suspend_writing(store: Store) -> None:
    """Leave the media as ``close`` does, and change nothing from then on; reads go on. Nothing
    happens where it has stopped writing already. Nobody has a file open for writing. Raises
    MediaError, NoSpaceError.
    """
    if not store.read_only:
        store.units.finish()
        store.settle_all()
    if not store.read_only:
        volume = store.volume
        volume.close_cleanly()
        volume.read_only_reason = SUSPENDED
        for inode in store.namespace.inodes.values():
            inode.stop_writes()
        volume.event("read-only", SUSPENDED, level=logging.INFO)


def resume_writing(store: Store) -> None:
    """Go on after :func:`suspend_writing`. Idempotent. Raises ReadOnlyError (it stopped writing for
    another reason), MediaError, NoSpaceError; the store stays as it is then.
    """
    volume = store.volume
    if volume.read_only_reason == SUSPENDED:
        volume.read_only_reason = None
        try:
            volume.refresh_reserve()
            volume.begin_journal()
        except NoSpaceError:
            volume.read_only_reason = SUSPENDED
            raise
        volume.event("writable", "it was remounted to be written", level=logging.INFO)
    volume.require_writable()

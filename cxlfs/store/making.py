"""Making an empty store.

Never here: opening one, choosing where it lies.

Invariants
- Superblocks are erased first and written last: until then there is no store, old or new.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from cxlfs.format import layout, roots, superblock
from cxlfs.media import locks
from cxlfs.store.loading import empty_engine
from cxlfs.store.names import root_attributes
from cxlfs.store.namespace import Namespace
from cxlfs.store.rollover import Rollovers
from cxlfs.store.volume import Volume

if TYPE_CHECKING:
    from cxlfs.media import Media


def format_store(
    media: Media,
    *,
    label: str = "",
    segment_size_bytes: int | None = None,
    uuid: bytes | None = None,
    unit_bytes: int = layout.UNIT_BYTES,
    chunk_bytes: int = layout.CHUNK_BYTES,
) -> superblock.Superblock:
    """Make an empty store; whatever the media held is gone. Durable when it returns.

    ``unit_bytes`` and ``chunk_bytes`` are for the small geometry of tests. Raises UsageError (too
    small), BusyError (a program can still store into it), MediaError.
    """
    locks.refuse_locked(media.path, media.locked_ranges())
    block = superblock.plan_geometry(
        media.size_bytes,
        label=label,
        uuid=uuid,
        segment_size_bytes=segment_size_bytes,
        unit_bytes=unit_bytes,
        chunk_bytes=chunk_bytes,
    )
    superblock.erase(media, block)
    namespace = Namespace()
    namespace.add(root_attributes(os.getuid(), os.getgid(), time.time_ns()))
    engine = empty_engine(media, block)
    volume = Volume(
        media,
        block,
        engine,
        namespace,
        roots.NOTHING,
        next_extent_id=1,
        next_epoch=1,
        last_lsn=0,
        rollovers=Rollovers,
    )
    volume.close_cleanly()
    engine.close()
    superblock.write(media, block)
    return block

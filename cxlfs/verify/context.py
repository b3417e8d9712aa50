"""What the passes of one run share: the media, the structures found so far, and an open store.

Never here: judging, writing to the media.

Invariants
- Without a store given, one is opened read-only, which writes nothing, and closed at the end.
- With one given (a mounted store, inside its daemon) everything is read between two steps of the
  generator, when no verb is under way: then media and store belong together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from cxlfs.errors import CxlfsError, MediaError
from cxlfs.format import roots
from cxlfs.format.roots import Root, SlotState
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media
from cxlfs.store import Store, StoreOptions
from cxlfs.verify.columns import Columns, columns_of_media, columns_of_store
from cxlfs.verify.findings import Finding


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """So much of a pass is done: the end of a slice, after which others may run."""

    done: int
    total: int
    unit: str = "items"


Step = Finding | Amount
Steps = Iterator[Step]


class Context:
    """See the module. ``live``: the store is the daemon's own and goes on changing."""

    def __init__(self, media: Media, store: Store | None) -> None:
        self.media = media
        self.live = store is not None
        self.superblock: Superblock | None = None if store is None else store.superblock
        self.slots: list[SlotState] = []
        self.newest: Root | None = None
        self.fallback: Root | None = None
        """The root whose image and journal are kept in case the newest is lost."""
        self.open_error: CxlfsError | None = None
        self._store = store
        self._tried = store is not None
        self._columns: Columns | None = None
        self._paths: dict[int, bytes | None] = {}

    # --- roots ------------------------------------------------------------------------------

    def read_roots(self) -> None:
        """Read both rings, and choose the newest root and the one behind it."""
        block = self.superblock
        if block is None:
            return
        self.slots = roots.read_slots(self.media, block)
        found = roots.candidates(self.slots)
        self.newest = found[0] if found else None
        self.fallback = None
        for root in found[1:]:
            if root.image_segments != found[0].image_segments:
                self.fallback = root
                break

    def is_superseded(self, root: Root) -> bool:
        """A mounted store has written a new root since ``root`` was read as the newest."""
        return (
            self.live
            and self._store is not None
            and self._store.volume.root.generation != root.generation
        )

    def keeps_fallback(self) -> bool:
        """The segments of the fallback root have not been given to anything else."""
        store = self.store()
        if self.fallback is None or store is None:
            return False
        volume, root = store.volume, self.fallback
        kept = [volume.fallback.segments]
        if volume.current.image_segments == root.image_segments:
            kept.append(volume.current.segments)  # the store was opened with it
        return any(set(segments).issuperset(root.segments) for segments in kept)

    # --- the store --------------------------------------------------------------------------

    def store(self) -> Store | None:
        """The store, opened read-only at the first call; None when it cannot be opened."""
        if not self._tried:
            self._tried = True
            try:
                self._store = Store.open(self.media, StoreOptions(read_only=True))
            except CxlfsError as error:
                self.open_error = error
        return self._store

    def require_open(self) -> None:
        """Raises MediaError when the store was closed (unmounted) in mid-run."""
        if self._store is not None and self._store.volume.engine.closed:
            raise MediaError(
                "the store was closed while it was verified",
                next_step="verify the source now that it is not mounted",
            )

    def close(self) -> None:
        if not self.live and self._store is not None:
            self._store.close()

    # --- the state as columns ---------------------------------------------------------------

    def columns(self) -> Columns | None:
        """The committed state; of a store that cannot be opened that of the newest image whose
        checksums are right; None when there is none.
        """
        if self._columns is None:
            store = self.store()
            if store is not None:
                self._columns = columns_of_store(store)
            elif self.superblock is not None:
                for root in roots.candidates(self.slots):
                    self._columns = columns_of_media(self.media, self.superblock, root)
                    if self._columns is not None:
                        break
        return self._columns

    def path_of(self, ino: int | None) -> bytes | None:
        """One path of an inode, by the namespace of the open store or else by the columns."""
        if ino is None:
            return None
        if self._store is not None:
            return self._store.path_of(ino)
        if ino not in self._paths:
            self._paths[ino] = None if self._columns is None else self._columns.path_of(ino)
        return self._paths[ino]

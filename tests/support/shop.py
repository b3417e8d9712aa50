"""Small stores that are followed through a test, then reopened, compared and verified."""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.errors import NoSpaceError
from cxlfs.media import Granularity
from cxlfs.store import Store, StoreEvent, StoreOptions
from cxlfs.store.namespace import FileKind
from cxlfs.verify import run_passes
from tests.support.stores import (
    SMALL_BYTES,
    Entry,
    format_small,
    make_media,
    picture,
)


class Shop:
    """Makes stores, follows them through reopening, and looks at what they left in the end."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.events: list[StoreEvent] = []
        self.damaged = False
        """The test damages media on purpose: only that opening works is checked."""
        self.directory_times = True
        """Compare times of directories too (a file that was created and unlinked before it was
        committed leaves them different)."""

    def new(
        self,
        size_bytes: int = SMALL_BYTES,
        granularity: Granularity = Granularity.LINE,
        **options: object,
    ) -> Store:
        media = make_media(size_bytes, granularity)
        format_small(media)
        store = Store.open(media, StoreOptions(**options))  # type: ignore[arg-type]
        return self._watch(store)

    def new_ordinary(
        self,
        size_bytes: int,
        granularity: Granularity = Granularity.LINE,
        segment_size_bytes: int | None = None,
        *,
        dedup: bool = False,
    ) -> Store:
        """With the geometry that users get, or that of a larger store."""
        media = make_media(size_bytes, granularity)
        Store.format(media, label="test", segment_size_bytes=segment_size_bytes)
        return self._watch(Store.open(media, StoreOptions(dedup=dedup)))

    def _watch(self, store: Store) -> Store:
        store.on_event = self.events.append
        self.stores.append(store)
        return store

    def reopen(self, store: Store, *, clean: bool = False, **options: object) -> Store:
        """As a kill of the daemon, or after a clean close."""
        if clean:
            store.close()
        else:
            store.abandon()
        self.stores.remove(store)
        chosen = StoreOptions(**options)  # type: ignore[arg-type]
        return self._watch(Store.open(store.media, chosen))

    def check(self) -> None:
        for store in self.stores:
            self._check(store)

    def _check(self, store: Store) -> None:
        media = store.media
        comparable = not (
            store.files.open_count or store.read_only or store.volume.engine.closed or self.damaged
        )
        before = self._picture(store) if comparable else None
        store.abandon()
        if not self.damaged:
            assert list(run_passes(media, structure_only=False)) == []
        for clean in (False, True):
            again = Store.open(media)
            if not self.damaged:
                assert again.read_only_reason is None
                found = self._picture(again)
                assert before is None or found == before
                before = found
            if clean:
                again.close()
                if not self.damaged:
                    assert list(run_passes(media, structure_only=False)) == []
            else:
                again.abandon()
        media.close()

    def _picture(self, store: Store) -> dict[bytes, object]:
        result: dict[bytes, object] = dict(picture(store))
        if not self.directory_times:
            for path, entry in result.items():
                if isinstance(entry, Entry) and entry.kind is FileKind.DIRECTORY:
                    result[path] = (entry.mode, entry.nlink, entry.ino, entry.xattrs)
        result[b"(aside)"] = [
            (e.path, e.size_bytes, e.kept_aside) for e in store.list_checkpoints()
        ]
        return result


def open_for_overwrite(store: Store, name: bytes, data: bytes) -> int:
    """A handle that truncated the file and wrote."""
    handle = store.open_file(store.lookup(1, name).ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, data)
    return handle


def close(store: Store, handle: int, *, killed: bool = False) -> None:
    store.flush(handle, writer_killed=killed)
    store.release(handle)


def create(store: Store, name: bytes, data: bytes = b"", *, parent: int = 1) -> tuple[int, int]:
    """(ino, open handle) of a new file."""
    attributes, handle = store.create(parent, name, 0o640, 10, 20, os.O_RDWR)
    if data:
        store.write(handle, 0, data)
    return attributes.ino, handle


def until_no_space(step: Callable[[int], object]) -> int:
    """Call step(0), step(1), and so on until one finds no room; how many succeeded."""
    number = 0
    while True:
        try:
            step(number)
        except NoSpaceError:
            return number
        number += 1


def fill(store: Store, name: bytes = b"filler", *, piece: int = 4096) -> int:
    """Write until there is no room; what was written is closed well. Returns its bytes."""
    ino, handle = create(store, name)
    size = piece * until_no_space(
        lambda step: store.write(handle, piece * step, bytes([step & 0xFF]) * piece)
    )
    store.set_attributes(ino, size=size, handle=handle)
    close(store, handle)
    return size
